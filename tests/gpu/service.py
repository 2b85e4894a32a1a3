"""The real server and client on a GPU: the demo model's greedy answers, one by one and all at once.

Usage: service.py BIN_DIR MODEL_DIR GREEDY_JSON PLAN     BIN_DIR holds qwend and qwend-client
The server must take the plan; for PLAN auto it must say in its log which one it takes, and why. Every prompt whose
smallest margin exceeds 0.05 must give the reference's token ids, alone; and all prompts sent at once must give the same
ids as alone. Then the kernel profile and the metrics must name the kernels, and SIGTERM end the server
with exit code 0. Exit code 1 when any of it fails.
"""
import concurrent.futures
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request

if len(sys.argv) < 5:
    sys.exit(__doc__)

MARGIN = 0.05


def main():
    bin_dir, model, greedy, plan = sys.argv[1:5]
    cases = json.load(open(greedy, encoding="utf-8"))
    log = tempfile.NamedTemporaryFile("r", suffix=".log")
    server = subprocess.Popen([f"{bin_dir}/qwend", f"--model={model}", "--backend=cuda", f"--decode_plan={plan}",
                               "--listen=127.0.0.1:0", "--metrics_listen=127.0.0.1:0", "--log_format=json",
                               "--profile_every=8"], stderr=open(log.name, "w"))
    try:
        serving = None
        for _ in range(600):
            lines = [json.loads(l) for l in open(log.name) if l.startswith("{")]
            serving = next((l for l in lines if "metrics_port" in l), None)
            if serving or server.poll() is not None:
                break
            time.sleep(0.1)
        if serving is None:
            sys.exit("the server did not start:\n" + open(log.name).read())
        took = serving["decode_plan"]
        if plan == "auto":
            why = next((l["message"] for l in lines if l.get("message", "").startswith(f"decode plan {took}; ")), None)
            if took not in ("fused", "persistent") or why is None:
                sys.exit(f"auto took the plan {took} and did not say why:\n" + open(log.name).read())
            print(why)
        elif took != plan:
            sys.exit(f"the server took the plan {took}, not {plan}")
        address = f"--server=127.0.0.1:{serving['port']}"

        def answer(case):
            ids = ",".join(map(str, case["prompt_ids"]))
            out = subprocess.run([f"{bin_dir}/qwend-client", "generate", address, f"--token_ids={ids}", "--temperature=0",
                                  f"--max_tokens={len(case['greedy_ids'])}", "--json", "--timeout=60"],
                                 capture_output=True, text=True, timeout=90)
            if out.returncode != 0:
                sys.exit(f"qwend-client: {out.stderr}")
            return [int(i) for line in out.stdout.splitlines()
                    for i in json.loads(line).get("tokenIds", json.loads(line).get("token_ids", []))]

        alone = [answer(c) for c in cases]
        wrong = [i for i, c in enumerate(cases) if c["min_margin"] > MARGIN and alone[i] != c["greedy_ids"]]
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            together = list(pool.map(answer, cases))
        moved = [i for i in range(len(cases)) if together[i] != alone[i]]
        clear = sum(c["min_margin"] > MARGIN for c in cases)
        print(f"demo model: {clear - len(wrong)}/{clear} greedy answers equal the references; "
              f"{len(cases) - len(moved)}/{len(cases)} the same alone and 16 at once")
        profile = subprocess.run([f"{bin_dir}/qwend-client", "profile", address, "--no_color"], capture_output=True,
                                 text=True, timeout=30)
        print(profile.stdout)
        page = urllib.request.urlopen(f"http://127.0.0.1:{serving['metrics_port']}/metrics", timeout=10).read().decode()
        kernels = set(re.findall(r'qwend_kernel_seconds_total\{[^}]*kernel="([^"]+)"', page))
        print(f"/metrics names {len(kernels)} kernels")
        server.send_signal(signal.SIGTERM)
        code = server.wait(timeout=40)
        print(f"server ended with {code}")
        if wrong or moved or not kernels or profile.returncode or code:
            sys.exit(f"FAILED: wrong {wrong}, moved {moved}, profile {profile.returncode}, exit {code}")
    finally:
        if server.poll() is None:
            server.kill()


main()
