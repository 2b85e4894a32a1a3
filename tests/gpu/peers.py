"""transformers on the same checkpoint and device: eager, static cache + CUDA graph, and the same with torch.compile.
Batch 1, greedy, bf16.

Usage: peers.py MODEL_DIR [CONTEXT...]
Prints tokens/s of each: the graphs the median of 5 x 256 tokens from each context on (128, 1,024 and 8,192 when none is
given; those up to 1,024 share a static cache, all of which is read, and so one compilation), eager of 3 x 24 tokens from
128 on; and eager's time to the first token at 128 and 1,024 prompt tokens. Each peer is a process of its own with LIMIT_S
seconds. Exit code 1 when one could not run; what it said is printed.
"""
import statistics
import subprocess
import sys
import time

TOKENS = 256
EAGER_TOKENS = 24
PROMPT = 128
LIMIT_S = 110
PEERS = {"eager": "eager", "graph": "static cache + CUDA graph", "compiled": "torch.compile + CUDA graph"}

if len(sys.argv) < 2:
    sys.exit(__doc__)
if sys.argv[1] == "--peer":
    import torch
    from transformers import AutoModelForCausalLM, StaticCache


def say(peer, text):
    print(f"transformers {PEERS[peer]}{text}", flush=True)


def timed(step, tokens):
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(tokens):
        step()
    torch.cuda.synchronize()
    return tokens / (time.perf_counter() - start)


def eager(model, _):
    ids = torch.randint(0, 3000, (1, 1024), device="cuda")
    for length in (128, 1024):
        times = []
        for _ in range(4):
            torch.cuda.synchronize()
            start = time.perf_counter()
            model(ids[:, :length], use_cache=True).logits[:, -1].argmax(-1).item()
            times.append(time.perf_counter() - start)
        say("eager", f": first token at {length} prompt tokens {statistics.median(times[1:]) * 1e3:.1f} ms")
    out = model(ids[:, :PROMPT], use_cache=True)
    state = {"cache": out.past_key_values, "token": out.logits[:, -1:].argmax(-1)}

    def step():
        o = model(state["token"], past_key_values=state["cache"], use_cache=True)
        state["cache"], state["token"] = o.past_key_values, o.logits[:, -1:].argmax(-1)

    timed(step, 8)
    speed = statistics.median(timed(step, EAGER_TOKENS) for _ in range(3))
    say("eager", f", context {PROMPT}: {speed:.1f} tokens/s")
    say("eager", f": device memory {torch.cuda.max_memory_reserved() / 1e6:.0f} MB reserved at most, "
                 f"{torch.cuda.max_memory_allocated() / 1e6:.0f} MB in tensors")


def graph(model, contexts, peer="graph"):
    forward = torch.compile(model, fullgraph=True, dynamic=False) if peer == "compiled" else model
    length = max(contexts) + TOKENS + 8
    cache = StaticCache(config=model.config, max_cache_len=length)
    ids = torch.randint(0, 3000, (1, max(contexts)), device="cuda")
    token = ids[:, :1].clone()
    position = torch.tensor([0], device="cuda")

    def begin(context):  # the cache counts its positions itself
        cache.reset()
        model(ids[:, :context], past_key_values=cache, use_cache=True, logits_to_keep=1)
        position.fill_(context)

    def step():
        logits = forward(token, past_key_values=cache, use_cache=True, position_ids=position[None]).logits
        token.copy_(logits[:, -1:].argmax(-1))
        position.add_(1)

    stream = torch.cuda.Stream()
    begin(contexts[0])
    start = time.perf_counter()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    ready = time.perf_counter() - start
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        step()
    for context in contexts:
        speeds = []
        for _ in range(6):  # the first one warms up
            begin(context)
            speeds.append(timed(captured.replay, TOKENS))
        say(peer, f", context {context}: {statistics.median(speeds[1:]):.1f} tokens/s ({min(speeds[1:]):.1f} to "
                  f"{max(speeds[1:]):.1f}; cache of {length} positions; ready after {ready:.0f} s)")


def run_peer(peer, path, contexts):
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).cuda().eval()
        if peer == "eager":
            eager(model, contexts)
        else:
            graph(model, contexts, peer)


def main():
    path = sys.argv[1]
    contexts = [int(c) for c in sys.argv[2:]] or [128, 1024, 8192]
    groups = [g for g in ([c for c in contexts if c <= 1024], [c for c in contexts if c > 1024]) if g]
    failed = False
    for peer in PEERS:
        for group in groups[:1] if peer == "eager" else groups:
            command = [sys.executable, __file__, "--peer", peer, path, *map(str, group)]
            try:
                done = subprocess.run(command, timeout=LIMIT_S, stderr=subprocess.PIPE, text=True)
                why = "" if done.returncode == 0 else "\n".join(done.stderr.splitlines()[-3:])[:600] or str(done.returncode)
            except subprocess.TimeoutExpired:
                why = f"longer than {LIMIT_S} s"
            if why:
                say(peer, f", context {group}: NOT RUN: {why}")
                failed = True
    sys.exit(1 if failed else 0)


if sys.argv[1] == "--peer":
    run_peer(sys.argv[2], sys.argv[3], [int(c) for c in sys.argv[4:]])
else:
    main()
