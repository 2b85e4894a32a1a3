"""transformers on the same checkpoint and device: eager, static cache + CUDA graph, and the same with torch.compile.
Batch 1, greedy, bf16.

Usage: peers.py MODEL_DIR [CONTEXT...]
Prints tokens/s of each: the graphs the median of 5 x 256 tokens from each context on (128, 1,024 and 8,192 when none is
given; the first two share a static cache and so one compilation), eager of 3 x 24 tokens from 128 on; and eager's time
to the first token at 128 and 1,024 prompt tokens. A peer that cannot run, or takes longer than LIMIT_S seconds, is said.
"""
import signal
import statistics
import sys
import time

if len(sys.argv) < 2:
    sys.exit(__doc__)

import torch
from transformers import AutoModelForCausalLM, StaticCache

TOKENS = 256
PROMPT = 128
LIMIT_S = 150


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
        contexts = [int(c) for c in sys.argv[2:]] or [128, 1024, 8192]
        for name, forward in (("static cache + CUDA graph", model),
                              ("torch.compile + CUDA graph", torch.compile(model, dynamic=False))):
            for group in ([c for c in contexts if c <= 1024], [c for c in contexts if c > 1024]):
                signal.alarm(LIMIT_S)
                try:
                    if group:
                        graphs(model, forward, name, group)
                except Exception as e:  # a peer that cannot run is said, not hidden
                    print(f"transformers {name}, context {group}: not run: {type(e).__name__}: {str(e)[:200]}", flush=True)
                signal.alarm(0)


def graphs(model, forward, name, contexts):
    cache = StaticCache(config=model.config, max_cache_len=max(contexts) + TOKENS + 8)
    ids = torch.randint(0, 3000, (1, max(contexts)), device="cuda")
    token = ids[:, :1].clone()
    position = torch.tensor([0], device="cuda")

    def begin(context):  # the cache counts its positions itself
        cache.reset()
        model(ids[:, :context], past_key_values=cache, use_cache=True, logits_to_keep=1)
        position.fill_(context)

    def step():
        logits = forward(token, past_key_values=cache, use_cache=True, cache_position=position,
                         position_ids=position[None]).logits
        token.copy_(logits[:, -1:].argmax(-1))
        position.add_(1)

    stream = torch.cuda.Stream()
    begin(contexts[0])
    start = time.perf_counter()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    ready = time.perf_counter() - start
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for context in contexts:
        speeds = []
        for _ in range(6):  # the first one warms up
            begin(context)
            speeds.append(timed(graph.replay))
        print(f"transformers {name}, context {context}: {statistics.median(speeds[1:]):.1f} tokens/s "
              f"({min(speeds[1:]):.1f} to {max(speeds[1:]):.1f}; ready after {ready:.0f} s)", flush=True)


def too_long(*_):
    raise TimeoutError(f"longer than {LIMIT_S} s")


signal.signal(signal.SIGALRM, too_long)
main()
