"""qwend-client and the Python client, as a user runs them."""
import json
import os
import pty
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import harness
from harness import run_client, wait_until

FRANCE = "What is the capital of France?"
PARIS = "The capital of France is Paris."


def on_a_terminal(*args, stdin=b"", interrupt_when=None):
    """Runs the client on a pseudo-terminal: (exit code, what the terminal showed, chunks as read)."""
    master, slave = pty.openpty()
    client = subprocess.Popen([harness.CLIENT, *args], stdin=slave, stdout=slave, stderr=slave,
                              start_new_session=True)
    os.close(slave)
    os.write(master, stdin)
    chunks = []
    try:
        while True:
            chunk = os.read(master, 4096)
            if not chunk:
                break
            chunks.append(chunk)
            if interrupt_when and interrupt_when in b"".join(chunks):
                client.send_signal(signal.SIGINT)
                interrupt_when = None
    except OSError:  # the terminal's other end is closed
        pass
    os.close(master)
    return client.wait(harness.PATIENCE), b"".join(chunks).decode(errors="replace"), chunks


class ClientTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = harness.Server("--max_sequences=8", "--profile_every=4")
        cls.flag = f"--server={cls.server.address}"
        cls.api = cls.server.api()

    @classmethod
    def tearDownClass(cls):
        cls.api.channel.close()
        cls.server.__exit__(None)

    def run_ok(self, *args, **kw):
        code, out, err = run_client(*args, self.flag, **kw)
        self.assertEqual(code, 0, err)
        return out

    def test_generate_in_a_pipe_prints_the_answer_alone(self):
        code, out, err = run_client("generate", FRANCE, "--temperature=0", self.flag)
        self.assertEqual((code, out, err), (0, PARIS + "\n", ""))
        self.assertEqual(self.run_ok("generate", "-", "--temperature=0", stdin=FRANCE), PARIS + "\n")

    def test_generate_on_a_terminal_shows_tokens_and_a_line(self):
        code, text, _ = on_a_terminal("generate", FRANCE, "--temperature=0", self.flag)
        self.assertEqual(code, 0)
        self.assertIn(PARIS, text)
        self.assertIn("tokens/s", text)
        self.assertIn("end of answer", text)
        self.assertIn("\033[", text)
        _, text, _ = on_a_terminal("generate", FRANCE, "--temperature=0", "--no_color", self.flag)
        self.assertNotIn("\033[", text)
        # A long answer shows up piece by piece; a few pieces may be read together.
        _, _, chunks = on_a_terminal("generate", FRANCE, "--ignore_eos", "--max_tokens=500", self.flag)
        self.assertGreater(len(chunks), 10)

    def test_generate_json(self):
        lines = [json.loads(line) for line in
                 self.run_ok("generate", FRANCE, "--temperature=0", "--json").splitlines()]
        self.assertEqual("".join(m.get("text", "") for m in lines), PARIS)
        self.assertEqual(lines[-1]["finish"]["reason"], "FINISH_REASON_EOS")
        self.assertIn("usage", lines[-1])
        # Tokens that wait for a slow reader come in one message, so the number of lines varies.
        self.assertGreaterEqual(len(lines), 2)

    def test_options_reach_the_server(self):
        ids = self.run_ok("generate", FRANCE, "--temperature=0", "--ids", "--max_tokens=3").split()
        self.assertEqual(len(ids), 3)
        cut = self.run_ok("generate", FRANCE, "--temperature=0", "--stop=zzz", "--stop= of")
        self.assertEqual(cut, "The capital\n")
        raw = self.run_ok("generate", "Monday, Tuesday,", "--raw", "--temperature=0")
        self.assertEqual(raw.strip(), "Wednesday, Thursday, Friday, Saturday, Sunday")
        prompt = ",".join(map(str, self.api.tokenize("12 + 30 =")))
        self.assertEqual(self.run_ok("generate", f"--token_ids={prompt}", "--temperature=0").strip(), "42")
        seeded = ["generate", "Tell me a story.", "--temperature=1.5", "--seed=9", "--max_tokens=30"]
        self.assertEqual(self.run_ok(*seeded), self.run_ok(*seeded))

    def test_failures(self):
        code, out, err = run_client("generate", "hi", "--top_k=-1", "--top_p=7", self.flag)
        self.assertEqual((code, out), (1, ""))
        self.assertIn("INVALID_ARGUMENT", err)
        self.assertIn("sampling.top_k", err)
        self.assertIn("sampling.top_p", err)
        code, _, err = run_client("generate", "hi", "--server=127.0.0.1:1")
        self.assertEqual(code, 1)
        self.assertIn("UNAVAILABLE", err)
        code, _, err = run_client("generate", "Tell me a story.", "--ignore_eos", "--timeout=0.2", self.flag)
        self.assertEqual(code, 1)
        self.assertIn("DEADLINE_EXCEEDED", err)

    def test_wrong_usage(self):
        for args in (["generate"], ["generate", "a", "b"], ["generate", "a", "--nope"], ["frobnicate"], [],
                     ["generate", "a", "--top_k=x"], ["abort"], ["info", "x"], ["generate", "a", "--timeout"]):
            with self.subTest(args):
                code, out, err = run_client(*args)
                self.assertEqual((code, out), (2, ""))
                self.assertTrue(err)
        code, out, _ = run_client("--help")
        self.assertEqual(code, 0)
        self.assertIn("exit codes", out)

    def test_interrupt(self):
        args = ["generate", "Tell me a story.", "--ignore_eos", "--max_tokens=3900", self.flag]
        code, _, _ = on_a_terminal(*args, "--temperature=0", interrupt_when=b"a")
        self.assertEqual(code, 130)
        wait_until(lambda: self.api.server().running == 0, "a free slot", 30)

    def test_closed_pipe(self):
        client = subprocess.Popen([harness.CLIENT, "generate", "Tell me a story.", "--ignore_eos",
                                   "--max_tokens=3900", "--temperature=0", self.flag],
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.assertTrue(client.stdout.read(1))
        client.stdout.close()
        self.assertEqual(client.wait(harness.PATIENCE), 141)
        self.assertEqual(client.stderr.read(), b"")
        client.stderr.close()
        wait_until(lambda: self.api.server().running == 0, "a free slot", 30)

    def test_chat_from_a_pipe_keeps_its_history(self):
        out = self.run_ok("chat", "--temperature=0", stdin=f"{FRANCE}\n/reset\nWhat is 17 \\\nplus 25?\n")
        self.assertEqual(out.splitlines()[0], PARIS)
        self.assertEqual(len(out.splitlines()), 2)
        # The second turn's prompt holds the first turn and its answer.
        out = self.run_ok("chat", "--temperature=0", "--json", stdin=f"{FRANCE}\n{FRANCE}\n/exit\nmore\n")
        usages = [m["usage"] for m in map(json.loads, out.splitlines()) if "usage" in m]
        self.assertEqual(len(usages), 2)
        self.assertGreater(usages[1]["prompt_tokens"], usages[0]["prompt_tokens"] * 1.5)
        out = self.run_ok("chat", "--temperature=0", "--json",
                          stdin=f"/system You are a helpful assistant.\n{FRANCE}\n/system\n{FRANCE}\n")
        usages = [m["usage"] for m in map(json.loads, out.splitlines()) if "usage" in m]
        self.assertGreater(usages[0]["prompt_tokens"], usages[1]["prompt_tokens"])

    def test_chat_interrupt_stops_the_answer_only(self):
        code, text, _ = on_a_terminal("chat", "--temperature=0", "--ignore_eos", "--no_color", self.flag,
                                      stdin=b"Tell me a story.\n/exit\n", interrupt_when=b"once")
        self.assertEqual(code, 0, text)
        wait_until(lambda: self.api.server().running == 0, "a free slot", 30)

    def test_tokenize_and_detokenize(self):
        out = self.run_ok("tokenize", "Hello\nworld")
        ids = [line.split("\t")[0] for line in out.splitlines()]
        self.assertEqual(list(map(int, ids)), self.api.tokenize("Hello\nworld"))
        self.assertEqual(self.run_ok("detokenize", *ids), "Hello\nworld\n")
        self.assertEqual(self.run_ok("detokenize", "-", stdin=",".join(ids)), "Hello\nworld\n")

    def test_info_health_profile_abort(self):
        self.assertIn("qwen3_5", self.run_ok("info"))
        model, server = map(json.loads, self.run_ok("info", "--json").splitlines())
        self.assertEqual((model["vocab_size"], server["backend"]), (3264, "cpu"))
        self.assertEqual(self.run_ok("health"), "SERVING\n")
        self.assertEqual(self.run_ok("health", "--service=qwend.v1.Inference"), "SERVING\n")
        self.assertEqual(run_client("health", "--service=no", self.flag)[0], 1)
        self.run_ok("generate", "Tell me a story.", "--ignore_eos", "--max_tokens=100")
        table = self.run_ok("profile", "--batch=1")
        self.assertIn("norm_lm_head", table)
        self.assertIn("GB/s", table)
        code, _, err = run_client("abort", "nobody", self.flag)
        self.assertEqual(code, 1)
        self.assertIn("NOT_FOUND", err)
        client = subprocess.Popen([harness.CLIENT, "generate", "Tell me a story.", "--ignore_eos", "--json",
                                   "--request_id=mine", "--max_tokens=3900", self.flag],
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        client.stdout.readline()
        self.run_ok("abort", "mine")
        self.assertIn("FINISH_REASON_ABORTED", client.stdout.read())
        self.assertIn("not complete", client.stderr.read())
        client.stdout.close()
        client.stderr.close()
        self.assertEqual(client.wait(harness.PATIENCE), 1)

    def test_bench(self):
        text = self.run_ok("bench", "--concurrency=4", "--requests=8", "--max_tokens=20")
        self.assertIn("time to first token", text)
        report = json.loads(self.run_ok("bench", "--concurrency=4", "--requests=10", "--max_tokens=20",
                                        "--ignore_eos", "--json"))
        self.assertEqual((report["requests"], report["tokens"], report["errors"]), (10, 200, {}))
        self.assertGreater(report["tokens_per_second"], 0)
        self.assertLessEqual(report["inter_token_seconds"]["p50"], report["inter_token_seconds"]["p99"])
        code, out, _ = run_client("bench", "--requests=3", "--warmup=0", "--top_k=-1", "--json", self.flag)
        self.assertEqual((code, json.loads(out)["errors"]), (1, {"INVALID_ARGUMENT": 3}))

    def test_wait(self):
        started = time.monotonic()
        code, _, err = run_client("health", "--server=127.0.0.1:1", "--wait=0.5")
        self.assertEqual(code, 1)
        self.assertIn("not SERVING after", err)
        self.assertGreater(time.monotonic() - started, 0.4)
        self.assertEqual(self.run_ok("health", "--wait=30"), "SERVING\n")

    def test_python_client(self):
        script = os.path.join(harness.ROOT, "client", "python", "generate.py")
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(2):  # the second run finds its messages generated
                done = subprocess.run([sys.executable, script, FRANCE, "--temperature=0",
                                       f"--messages={folder}", self.flag], capture_output=True, text=True,
                                      timeout=harness.PATIENCE)
                self.assertEqual((done.returncode, done.stdout), (0, PARIS + "\n"), done.stderr)
            done = subprocess.run([sys.executable, script, "hi", "--max_tokens=0", f"--messages={folder}",
                                   self.flag], capture_output=True, text=True, timeout=harness.PATIENCE)
            self.assertEqual(done.returncode, 1)
            self.assertIn("INVALID_ARGUMENT", done.stderr)


if __name__ == "__main__":
    unittest.main()
