"""Tokens and TLS."""
import functools
import os
import subprocess
import tempfile
import unittest

import grpc

import harness
from harness import request


def make_certificates(folder):
    """An authority and two certificates of its making: server.pem for localhost, client.pem."""
    def openssl(*args):
        subprocess.run(["openssl", *args], cwd=folder, check=True, capture_output=True)

    openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "ca.key", "-out", "ca.pem", "-days", "2",
            "-subj", "/CN=test authority")
    for name in ("server", "client"):
        with open(os.path.join(folder, f"{name}.ext"), "w", encoding="utf-8") as f:
            f.write("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
        openssl("req", "-newkey", "rsa:2048", "-nodes", "-keyout", f"{name}.key", "-out", f"{name}.csr",
                "-subj", f"/CN={name}")
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
                "-out", f"{name}.pem", "-days", "2", "-extfile", f"{name}.ext")


def read(folder, name):
    with open(os.path.join(folder, name), "rb") as f:
        return f.read()


class TokenTest(unittest.TestCase):
    def test_tokens(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "tokens")
            with open(path, "w", encoding="utf-8") as f:
                f.write("secret-one\nsecret-two\n")
            with harness.Server(f"--auth_token_file={path}") as server, server.channel() as channel:
                self.assertEqual(server.health(), "SERVING")  # probes carry no token
                self.expect(channel, None, grpc.StatusCode.UNAUTHENTICATED)
                self.expect(channel, "Bearer wrong", grpc.StatusCode.PERMISSION_DENIED)
                self.expect(channel, "Bearer secret-on", grpc.StatusCode.PERMISSION_DENIED)
                self.expect(channel, "Bearer secret-one", None)
                self.expect(channel, "Bearer secret-two", None)
                self.assertNotIn("secret", server.log())

                server_flag = f"--server={server.address}"
                code, _, err = harness.run_client("generate", "hi", server_flag)
                self.assertEqual(code, 1)
                self.assertIn("UNAUTHENTICATED", err)
                code, out, _ = harness.run_client("info", server_flag, f"--token_file={path}")
                self.assertEqual(code, 0)
                self.assertIn("demo", out)

    def expect(self, channel, header, code):
        api = harness.Api(channel, [("authorization", header)] if header else None)
        calls = (lambda: api.answer(request("hi", max_tokens=1)), lambda: api.unary(request("hi", max_tokens=1)),
                 api.model, api.server, lambda: api.tokenize("hi"))
        for call in calls:
            if code is None:
                call()
            else:
                with self.assertRaises(grpc.RpcError) as caught:
                    call()
                self.assertEqual(caught.exception.code(), code)


class TlsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        make_certificates(cls.folder.name)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def path(self, name):
        return os.path.join(self.folder.name, name)

    def secure(self, client=False):
        pems = (read(self.folder.name, "client.key"), read(self.folder.name, "client.pem")) if client else ()
        credentials = grpc.ssl_channel_credentials(read(self.folder.name, "ca.pem"), *pems)
        return functools.partial(grpc.secure_channel, credentials=credentials)

    def flags(self):
        return [f"--tls_cert={self.path('server.pem')}", f"--tls_key={self.path('server.key')}"]

    def test_tls_and_plaintext_health_port(self):
        with harness.Server(*self.flags(), "--health_listen=127.0.0.1:0", channel=self.secure()) as server:
            with server.api() as api:
                self.assertEqual(api.answer(request("What is the capital of France?")).text,
                                 "The capital of France is Paris.")
            with grpc.insecure_channel(server.health_address) as plain:
                self.assertEqual(harness.Api(plain).health(), "SERVING")
                with self.assertRaises(grpc.RpcError) as caught:
                    harness.Api(plain).model()
                self.assertEqual(caught.exception.code(), grpc.StatusCode.UNIMPLEMENTED)
            with grpc.insecure_channel(server.address) as plain, self.assertRaises(grpc.RpcError):
                harness.Api(plain).model()
            code, out, err = harness.run_client("generate", "What is the capital of France?",
                                                "--temperature=0", f"--server={server.address}",
                                                f"--tls_ca={self.path('ca.pem')}")
            self.assertEqual((code, out), (0, "The capital of France is Paris.\n"), err)
            code, _, err = harness.run_client("health", "--tls", f"--server={server.address}", "--timeout=5")
            self.assertEqual(code, 1)
            self.assertIn("UNAVAILABLE", err)

    def test_client_certificates(self):
        flags = [*self.flags(), f"--tls_client_ca={self.path('ca.pem')}"]
        with harness.Server(*flags, channel=self.secure(client=True)) as server:
            with server.api() as api:
                self.assertEqual(api.model().model_id, "demo")
            with self.secure()(server.address) as channel, self.assertRaises(grpc.RpcError):
                harness.Api(channel).model()
            code, out, err = harness.run_client(
                "health", f"--server={server.address}", f"--tls_ca={self.path('ca.pem')}",
                f"--tls_cert={self.path('client.pem')}", f"--tls_key={self.path('client.key')}")
            self.assertEqual((code, out), (0, "SERVING\n"), err)

    def test_unreadable_certificate(self):
        server = harness.Server("--tls_cert=/no/such.pem", "--tls_key=/no/such.key", wait=False)
        try:
            self.assertEqual(server.wait(), 1)
            self.assertIn("/no/such", server.log())
        finally:
            server.close()


if __name__ == "__main__":
    unittest.main()
