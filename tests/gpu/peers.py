"""transformers on the same checkpoint and device: eager, and static cache + CUDA graph. Batch 1, greedy, bf16.

Usage: peers.py MODEL_DIR
Prints tokens/s of each (median of 3 x 64 tokens after 128 tokens of context) and eager's time to the first token at
128 and 1,024 prompt tokens.
"""
import statistics
import sys
import time

if len(sys.argv) < 2:
    sys.exit(__doc__)

import torch
from transformers import AutoModelForCausalLM, StaticCache

TOKENS = 64
PROMPT = 128


def timed(step, tokens=TOKENS):
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(tokens):
        step()
    torch.cuda.synchronize()
    return tokens / (time.perf_counter() - start)


def main():
    path = sys.argv[1]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).cuda().eval()
    ids = torch.randint(0, 3000, (1, 1024), device="cuda")
    with torch.inference_mode():
        for length in (128, 1024):
            times = []
            for _ in range(4):
                torch.cuda.synchronize()
                start = time.perf_counter()
                model(ids[:, :length], use_cache=True).logits[:, -1].argmax(-1).item()
                times.append(time.perf_counter() - start)
            print(f"transformers eager: first token at {length} prompt tokens {statistics.median(times[1:]) * 1e3:.1f} ms")
        out = model(ids[:, :PROMPT], use_cache=True)
        state = {"cache": out.past_key_values, "token": out.logits[:, -1:].argmax(-1)}

        def eager():
            o = model(state["token"], past_key_values=state["cache"], use_cache=True)
            state["cache"], state["token"] = o.past_key_values, o.logits[:, -1:].argmax(-1)

        timed(eager, 8)
        print(f"transformers eager: {statistics.median(timed(eager, 24) for _ in range(3)):.1f} tokens/s")
        print(f"transformers eager: device memory {torch.cuda.max_memory_reserved() / 1e6:.0f} MB reserved at most, "
              f"{torch.cuda.max_memory_allocated() / 1e6:.0f} MB in tensors")
        try:
            cache = StaticCache(config=model.config, max_cache_len=2048)
            model(ids[:, :PROMPT], past_key_values=cache, use_cache=True)
            token = ids[:, :1].clone()
            position = torch.tensor([PROMPT], device="cuda")

            def step():
                logits = model(token, past_key_values=cache, use_cache=True, cache_position=position,
                               position_ids=position[None]).logits
                token.copy_(logits[:, -1:].argmax(-1))
                position.add_(1)

            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(3):
                    step()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            timed(graph.replay, 8)
            print(f"transformers static cache + CUDA graph: {statistics.median(timed(graph.replay) for _ in range(3)):.1f} tokens/s")
        except Exception as e:  # a peer that cannot run is said, not hidden
            print(f"transformers static cache + CUDA graph: not run: {type(e).__name__}: {str(e)[:200]}")


main()
