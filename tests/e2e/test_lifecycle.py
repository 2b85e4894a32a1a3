"""Health, draining, and callers that vanish."""
import json
import signal
import socket
import subprocess
import time
import unittest

import grpc

import harness
from harness import endless, pb, request, wait_until


def watch(channel, service=""):
    call = channel.unary_stream("/grpc.health.v1.Health/Watch",
                                request_serializer=pb.HealthCheckRequest.SerializeToString,
                                response_deserializer=pb.HealthCheckResponse.FromString)
    return call(pb.HealthCheckRequest(service=service), timeout=harness.PATIENCE)


class LifecycleTest(unittest.TestCase):
    def test_health(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = "127.0.0.1:%d" % free.getsockname()[1]
        server = harness.Server(f"--listen={address}", wait=False)
        server.address = address
        try:
            # Whatever a probe hears before readiness, it is not SERVING and then something else.
            heard = []
            wait_until(lambda: heard.append(server.health()) or heard[-1] == "SERVING", "SERVING")
            self.assertEqual(server.health("qwend.v1.Inference"), "SERVING")
            self.assertEqual(server.health("no.such.Service"), "NOT_FOUND")
            self.assertLessEqual(set(heard), {"SERVING", "NOT_SERVING", "UNAVAILABLE"})
            with server.channel() as channel:
                stream = watch(channel)
                self.assertEqual(next(stream).status, 1)
                server.process.send_signal(signal.SIGTERM)
                self.assertEqual(next(stream).status, 2)
            self.assertEqual(server.wait(), 0)
        finally:
            server.close()

    def test_drain_finishes_running_streams(self):
        server = harness.Server("--drain_seconds=60")
        try:
            with server.api() as api:
                alone = api.answer(endless(max_tokens=1500)).ids
                running = harness.Background(api.generate(endless(max_tokens=1500)))
                server.process.send_signal(signal.SIGTERM)
                wait_until(lambda: server.health() != "SERVING", "not SERVING")
                with self.assertRaises(grpc.RpcError) as caught:
                    api.answer(request("hi"))
                self.assertEqual(caught.exception.code(), grpc.StatusCode.UNAVAILABLE)
                self.assertIsNone(running.join().error)
                self.assertEqual([i for m in running.messages for i in m.token_ids], alone)
                self.assertEqual(harness.FINISH[running.messages[-1].finish.reason], "length")
            self.assertEqual(server.wait(), 0)
        finally:
            server.close()

    def test_drain_limit_aborts_the_rest(self):
        server = harness.Server("--drain_seconds=0.3")
        try:
            with server.api() as api:
                running = [harness.Background(api.generate(endless(max_tokens=3900))) for _ in range(4)]
                started = time.monotonic()
                self.assertEqual(server.stop(), 0)
                self.assertLess(time.monotonic() - started, 20)
                for stream in running:
                    stream.join()
                    self.assertIsNone(stream.error)
                    self.assertEqual(harness.FINISH[stream.messages[-1].finish.reason], "aborted")
        finally:
            server.close()

    def test_second_signal_ends_at_once(self):
        server = harness.Server("--drain_seconds=600", "--max_sequences=4")
        try:
            with server.api() as api:
                # Many queued streams: far more work than five seconds.
                calls = [api.generate(endless(max_tokens=3900)) for _ in range(60)]
                wait_until(lambda: api.server().running == 4, "four running")
                server.process.send_signal(signal.SIGTERM)
                wait_until(lambda: server.health() != "SERVING", "not SERVING")
                started = time.monotonic()
                code = server.stop()
                self.assertLess(time.monotonic() - started, 10)
                self.assertGreaterEqual(code, 0, "ended by a signal")
                for call in calls:
                    call.cancel()
        finally:
            server.close()

    def test_idle_server_stops_quickly(self):
        for sig in (signal.SIGTERM, signal.SIGINT):
            server = harness.Server()
            try:
                with server.api() as api:
                    api.answer(request("hi", max_tokens=2))
                    started = time.monotonic()
                    self.assertEqual(server.stop(sig), 0, server.log())
                    self.assertLess(time.monotonic() - started, 15)
            finally:
                server.close()

    def test_killed_client_frees_its_slot(self):
        with harness.Server("--max_sequences=1") as server, server.api() as api:
            client = subprocess.Popen(
                [harness.CLIENT, "generate", "Tell me a story.", f"--server={server.address}",
                 "--temperature=0", "--ignore_eos", "--max_tokens=3900"], stdout=subprocess.PIPE)
            self.assertTrue(client.stdout.read(1))
            client.kill()
            client.wait()
            client.stdout.close()
            wait_until(lambda: api.server().running == 0, "a free slot", 30)
            self.assertEqual(api.server().kv_pages_used, 0)
            made = harness.value(server.metrics(), "qwend_generation_tokens_total")
            self.assertLess(made, 3800)
            self.assertEqual(api.answer(request("What is the capital of France?")).text,
                             "The capital of France is Paris.")

    def test_reflection(self):
        def services(server):
            with server.channel() as channel:
                call = channel.stream_stream(
                    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
                    request_serializer=pb.ServerReflectionRequest.SerializeToString,
                    response_deserializer=pb.ServerReflectionResponse.FromString)
                answer = next(call(iter([pb.ServerReflectionRequest(list_services="*")]), timeout=30))
                return {s.name for s in answer.list_services_response.service}

        with harness.Server() as server:
            self.assertLessEqual({"qwend.v1.Inference", "qwend.v1.Control", "grpc.health.v1.Health"},
                                 services(server))
        with harness.Server("--reflection=false") as server:
            with self.assertRaises(grpc.RpcError) as caught:
                services(server)
            self.assertEqual(caught.exception.code(), grpc.StatusCode.UNIMPLEMENTED)

    def test_logs_are_json(self):
        with harness.Server() as server, server.api() as api:
            api.answer(request('say "quotes" and \\ and\nnew lines', max_tokens=2, request_id='id"\\'))
            with self.assertRaises(grpc.RpcError):
                api.answer(request("hi", top_k=-1))
            self.assertEqual(server.stop(), 0)
            lines = [json.loads(line) for line in server.log().splitlines()]
        self.assertGreater(len(lines), 2)
        self.assertTrue(all(isinstance(line, dict) for line in lines))


if __name__ == "__main__":
    unittest.main()
