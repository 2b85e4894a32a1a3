"""Teacher-forced logits of qwend against transformers in fp32, and against transformers' own bf16 error.

Usage: parity.py MODEL_PROBE MODEL_DIR PLAN...
Over 64 random positions: relative error of each position's logits (||a - b|| / ||b||, the worst one counts), at most
2e-2 and at most transformers' bf16 error on the same weights; the top token equal wherever fp32's margin exceeds twice
the error in logits. Then 256 greedy tokens must stay finite and come out the same twice. Exit code 1 when any fails.
"""
import json
import subprocess
import sys
import tempfile

if len(sys.argv) < 4:
    sys.exit(__doc__)

import numpy as np
import torch
from transformers import AutoModelForCausalLM

POSITIONS = 64
LIMIT = 2e-2


def reference(path, ids, dtype):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").cuda().eval()
    with torch.inference_mode():
        logits = model(torch.tensor([ids], device="cuda")).logits[0].float().cpu().numpy()
    del model
    torch.cuda.empty_cache()
    return logits


def errors(got, want):
    return np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)


def greedy(probe, path, plan, ids_file):
    return subprocess.run([probe, "greedy", path, "cuda", plan, ids_file, "256"], check=True, timeout=180,
                          capture_output=True, text=True).stdout.split()


def main():
    probe, path, plans = sys.argv[1], sys.argv[2], sys.argv[3:]
    torch.backends.cuda.matmul.allow_tf32 = False
    rng = np.random.default_rng(20261130)
    vocab = json.load(open(f"{path}/config.json"))["vocab_size"]
    ids = rng.integers(0, vocab, POSITIONS).astype(np.int32)
    want = reference(path, ids.tolist(), torch.float32)
    bf16 = errors(reference(path, ids.tolist(), torch.bfloat16), want)
    print(f"{path}: transformers bf16 error worst {bf16.max():.2e} mean {bf16.mean():.2e}")
    failed = False
    for plan in plans:
        with tempfile.TemporaryDirectory() as tmp:
            ids.tofile(f"{tmp}/ids")
            subprocess.run([probe, "logits", path, "cuda", plan, f"{tmp}/ids", f"{tmp}/logits"], check=True, timeout=180)
            decoded, prefilled = np.fromfile(f"{tmp}/logits", np.float32).reshape(2, POSITIONS, vocab)
            runs = [greedy(probe, path, plan, f"{tmp}/ids") for _ in range(2)]
        for name, got in (("decode", decoded), ("prefill", prefilled)):
            error = errors(got, want)
            worst_logit = np.abs(got - want).max(axis=-1)
            top2 = np.sort(want, axis=-1)[:, -2:]
            clear = top2[:, 1] - top2[:, 0] > 2 * worst_logit
            agree = got.argmax(-1) == want.argmax(-1)
            ok = bool(error.max() <= LIMIT and error.max() <= bf16.max() and agree[clear].all() and np.isfinite(got).all())
            failed |= not ok
            print(f"  {plan} {name}: error worst {error.max():.2e} mean {error.mean():.2e}; top-1 equal "
                  f"{agree.sum()}/{POSITIONS}, {agree[clear].sum()}/{clear.sum()} where the margin is clear: "
                  f"{'ok' if ok else 'FAILED'}")
        same = runs[0] == runs[1] and len(runs[0]) == 256
        failed |= not same
        print(f"  {plan}: 256 greedy tokens finite, two runs equal: {'ok' if same else 'FAILED'}")
    sys.exit(1 if failed else 0)


main()
