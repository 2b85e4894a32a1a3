"""Starting up: every mistake is one clear line and an exit code, within seconds, never a signal."""
import json
import os
import shutil
import socket
import subprocess
import tempfile
import unittest

import grpc

import harness
from harness import request


def copy_demo(folder, without=()):
    """The demo model in `folder`/model, weights linked, small files copied."""
    model = os.path.join(folder, "model")
    os.mkdir(model)
    for name in os.listdir(harness.DEMO):
        if name in without:
            continue
        source, target = os.path.join(harness.DEMO, name), os.path.join(model, name)
        if name.endswith(".safetensors"):
            os.symlink(source, target)
        else:
            shutil.copy(source, target)
    return model


class StartupTest(unittest.TestCase):
    def fails(self, code, *mentions, flags=(), model=harness.DEMO, environment=None):
        with tempfile.NamedTemporaryFile() as log:
            env = {k: v for k, v in os.environ.items() if not k.startswith("QWEND_")}
            env.update(environment or {})
            command = [harness.SERVER, f"--model={model}", "--listen=127.0.0.1:0",
                       "--metrics_listen=127.0.0.1:0", *flags]
            done = subprocess.run(command, stdout=log, stderr=subprocess.PIPE, text=True, env=env,
                                  timeout=harness.PATIENCE)
        self.assertEqual(done.returncode, code, done.stderr)
        # Log lines may come before; the last line is the one that says what is wrong.
        last = done.stderr.strip().splitlines()[-1]
        for text in mentions:
            self.assertIn(text, last)
        return last

    def test_bad_flags(self):
        self.fails(2, "no_such_flag", flags=["--no_such_flag=1"])
        self.fails(2, "max_sequences", flags=["--max_sequences=many"])
        self.fails(2, "max_sequences", flags=["--max_sequences=-1"])
        self.fails(2, "backend", "tpu", flags=["--backend=tpu"])
        self.fails(2, "listen", flags=["--listen=nowhere"])
        self.fails(2, "tls_key", flags=["--tls_cert=/tmp/x.pem"])
        self.fails(2, "QWEND_MAX_QUEUED", environment={"QWEND_MAX_QUEUED": "x"})

    def test_environment_and_command_line(self):
        with harness.Server("--max_sequences=3", environment={"QWEND_MAX_SEQUENCES": "5",
                                                              "QWEND_MAX_CONTEXT_TOKENS": "256"}) as server:
            with server.api() as api:
                self.assertEqual(api.server().max_sequences, 3)
                self.assertEqual(api.model().max_context_tokens, 256)

    def test_help(self):
        done = subprocess.run([harness.SERVER, "--help"], capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, 0)
        for flag in ("--model", "--listen", "--drain_seconds", "--auth_token_file"):
            self.assertIn(flag, done.stdout)

    def test_missing_model(self):
        self.fails(1, "/no/such/model", model="/no/such/model")
        with tempfile.TemporaryDirectory() as folder:
            self.fails(1, "config.json", model=folder)
            model = copy_demo(folder, without=["model.safetensors"])
            self.fails(1, "safetensors", model=model)

    def test_truncated_model(self):
        with tempfile.TemporaryDirectory() as folder:
            model = copy_demo(folder, without=["model.safetensors"])
            with open(os.path.join(harness.DEMO, "model.safetensors"), "rb") as f:
                whole = f.read()
            for size in (0, 5, 2000, len(whole) - 1):
                with open(os.path.join(model, "model.safetensors"), "wb") as f:
                    f.write(whole[:size])
                with self.subTest(size=size):
                    self.fails(1, "model.safetensors", model=model)

    def test_weights_that_give_nan(self):
        with tempfile.TemporaryDirectory() as folder:
            model = copy_demo(folder, without=["model.safetensors"])
            with open(os.path.join(harness.DEMO, "model.safetensors"), "rb") as f:
                data = bytearray(f.read())
            length = int.from_bytes(data[:8], "little")
            begin, _ = json.loads(data[8:8 + length])["model.norm.weight"]["data_offsets"]
            data[8 + length + begin:8 + length + begin + 2] = b"\xc0\x7f"
            with open(os.path.join(model, "model.safetensors"), "wb") as f:
                f.write(data)
            self.fails(1, "NaN", model=model)

    def test_unknown_architecture_and_broken_config(self):
        with tempfile.TemporaryDirectory() as folder:
            model = copy_demo(folder)
            path = os.path.join(model, "config.json")
            with open(path, encoding="utf-8") as f:
                config = json.load(f)
            for change, mention in (({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "amba"),
                                    ({"hidden_size": 255}, ""), ({"num_hidden_layers": 9}, "")):
                with open(path, "w", encoding="utf-8") as f:
                    json.dump({**config, **change}, f)
                with self.subTest(change):
                    self.fails(1, mention, model=model)
            with open(path, "w", encoding="utf-8") as f:
                f.write('{"model_type": ')
            self.fails(1, "config.json", model=model)

    def test_port_in_use(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            self.fails(1, str(port), flags=[f"--listen=127.0.0.1:{port}"])
            self.fails(1, str(port), flags=[f"--metrics_listen=127.0.0.1:{port}"])
        # Two servers on one port: gRPC would share it between them if it were let.
        with harness.Server() as server:
            port = server.address.rsplit(":", 1)[1]
            self.fails(1, port, flags=[f"--listen=127.0.0.1:{port}"])

    def test_does_not_fit(self):
        self.fails(1, "max_", flags=["--max_sequences=4096", "--max_context_tokens=4096",
                                     "--memory_fraction=0.01"])

    def test_model_without_tokenizer_serves_token_ids(self):
        with tempfile.TemporaryDirectory() as folder:
            model = copy_demo(folder, without=["tokenizer.json"])
            with harness.Server(model=model) as server, server.api() as api:
                self.assertFalse(api.model().has_tokenizer)
                ids = api.answer(request([3177, 300, 198, 439], max_tokens=4)).ids
                self.assertEqual(len(ids), 4)
                for r in (request("hi"), request("hi", raw=True),
                          request([3177], stop_strings=["x"])):
                    with self.assertRaises(grpc.RpcError) as caught:
                        api.answer(r)
                    self.assertEqual(caught.exception.code(), grpc.StatusCode.FAILED_PRECONDITION)
                code, _, err = harness.run_client("generate", "hi", f"--server={server.address}")
                self.assertEqual(code, 1)
                self.assertIn("--token_ids", err)

    def test_model_without_template_serves_text(self):
        with tempfile.TemporaryDirectory() as folder:
            model = copy_demo(folder, without=["chat_template.jinja"])
            with harness.Server(model=model) as server:
                code, _, err = harness.run_client("generate", "hi", f"--server={server.address}")
                self.assertEqual(code, 1)
                self.assertIn("--raw", err)
                code, out, _ = harness.run_client("generate", "The capital of", "--raw", "--temperature=0",
                                                  "--max_tokens=3", f"--server={server.address}")
                self.assertEqual((code, out), (0, " Peru is Lima\n"))


if __name__ == "__main__":
    unittest.main()
