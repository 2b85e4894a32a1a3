"""What a caller gets when a request cannot be served, and that nothing else suffers for it."""
import re
import threading
import time
import unittest

import grpc

import harness
from harness import endless, pb, request, wait_until


class ErrorsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        # One sequence at a time and a queue of two, so that waiting and refusing are easy to reach.
        cls.server = harness.Server("--max_sequences=1", "--max_queued=2")
        cls.api = cls.server.api()

    @classmethod
    def tearDownClass(cls):
        cls.api.channel.close()
        cls.server.__exit__(None)

    def setUp(self):
        self.wait_idle()

    def tearDown(self):
        self.wait_idle()
        self.assertEqual(self.api.answer(request("What is the capital of France?")).text,
                         "The capital of France is Paris.")

    def wait_idle(self):
        wait_until(lambda: self.api.server().running + self.api.server().waiting == 0, "idle")
        self.assertEqual(self.api.server().kv_pages_used, 0)

    def error(self, r, timeout=harness.PATIENCE):
        with self.assertRaises(grpc.RpcError) as caught:
            self.api.answer(r, timeout)
        return caught.exception

    def start(self, r):
        return harness.Background(self.api.generate(r))

    def test_every_bad_field_is_named(self):
        r = request("hi", temperature=float("nan"), top_p=1.5, max_tokens=1_000_000,
                    stop_strings=["x"] * 17)
        error = self.error(r)
        self.assertEqual(error.code(), grpc.StatusCode.INVALID_ARGUMENT)
        fields = harness.violations(error)
        for name in ("sampling.temperature", "sampling.top_p", "stopping.max_tokens",
                     "stopping.stop_strings"):
            self.assertTrue(any(f.startswith(name) for f in fields), (name, fields))

    def test_bad_requests(self):
        vocabulary = self.api.model().vocab_size
        bad = {
            "no prompt": pb.GenerateRequest(),
            "empty text": request("", raw=True),
            "no message": pb.GenerateRequest(chat=pb.Chat()),
            "no ids": pb.GenerateRequest(token_ids=pb.TokenIds()),
            "id outside": request([1, vocabulary]),
            "top_k": request("hi", top_k=-1),
            "top_p": request("hi", top_p=0.0),
            "min_p": request("hi", min_p=1.0),
            "temperature": request("hi", temperature=-1.0),
            "infinity": request("hi", temperature=float("inf")),
            "max_tokens": request("hi", max_tokens=0),
            "min above max": request("hi", min_tokens=5, max_tokens=4),
            "stop id": request("hi", stop_token_ids=[vocabulary]),
            "empty stop string": request("hi", stop_strings=[""]),
            "role": pb.GenerateRequest(chat=pb.Chat(messages=[pb.Message(role="robot", content="hi")])),
            "schema": pb.GenerateRequest(text="hi", sampling=pb.Sampling(constraint=pb.Constraint(
                json_schema="{"))),
        }
        for name, r in bad.items():
            with self.subTest(name):
                error = self.error(r)
                expected = ("INVALID_ARGUMENT", "UNIMPLEMENTED") if name == "schema" else ("INVALID_ARGUMENT",)
                self.assertIn(error.code().name, expected, error.details())
                self.assertTrue(error.details())

    def test_prompt_over_the_context(self):
        context = self.api.model().max_context_tokens
        error = self.error(request([5] * (context + 1)))
        self.assertEqual(error.code(), grpc.StatusCode.INVALID_ARGUMENT)
        self.assertIn(str(context), error.details() + str(harness.violations(error)))
        # Prompt and answer may fill it exactly.
        answer = self.api.answer(request([5] * (context - 2), max_tokens=2, ignore_eos=True))
        self.assertEqual((len(answer.ids), answer.reason), (2, "length"))
        error = self.error(request([5] * (context - 2), max_tokens=3))
        self.assertEqual(error.code(), grpc.StatusCode.INVALID_ARGUMENT)

    def test_what_is_not_built_says_so(self):
        error = self.error(request("hi", beam_width=4))
        self.assertIn(error.code().name, ("UNIMPLEMENTED", "FAILED_PRECONDITION"))

    def test_queue_full(self):
        running = self.start(endless())
        waiting = [self.api.generate(request("hi", max_tokens=1)) for _ in range(2)]
        wait_until(lambda: self.api.server().waiting == 2, "two waiting")
        error = self.error(request("hi"))
        self.assertEqual(error.code(), grpc.StatusCode.RESOURCE_EXHAUSTED)
        self.assertGreater(harness.retry_delay(error), 0)
        self.assertIn("grpc-retry-pushback-ms", dict(error.trailing_metadata()))
        running.cancel()
        for stream in waiting:
            self.assertEqual(len(harness.Answer(stream).ids), 1)

    def test_priority_goes_first(self):
        running = self.start(endless())

        def ask(priority):
            self.api.answer(request("Tell me a story about a fox.", max_tokens=40, priority=priority,
                                    request_id=f"priority-{priority}"))

        threads = [threading.Thread(target=ask, args=[priority]) for priority in (0, 5)]
        for waiting, thread in enumerate(threads, 1):
            thread.start()
            wait_until(lambda: self.api.server().waiting == waiting, f"{waiting} waiting")
        running.cancel()
        for thread in threads:
            thread.join()
        finished = re.findall(r'"request finished","request_id":"(priority-\d)"', self.server.log())
        self.assertEqual(finished, ["priority-5", "priority-0"])

    def test_cancel_frees_the_slot(self):
        before = self.server.metrics()
        stream = self.start(endless())
        stream.cancel()
        self.assertEqual(len(self.api.answer(request("hi", max_tokens=1)).ids), 1)
        after = self.server.metrics()
        produced = (harness.value(after, "qwend_generation_tokens_total")
                    - harness.value(before, "qwend_generation_tokens_total"))
        self.assertLess(produced, 3000)
        self.assertEqual(harness.value(after, "qwend_requests_total", finish_reason="cancelled")
                         - harness.value(before, "qwend_requests_total", finish_reason="cancelled"), 1)

    def test_cancel_while_waiting(self):
        running = self.start(endless())
        waiting = self.api.generate(request("hi"))
        wait_until(lambda: self.api.server().waiting == 1, "one waiting")
        waiting.cancel()
        wait_until(lambda: self.api.server().waiting == 0, "none waiting", 5)
        self.assertEqual(self.api.server().running, 1)
        running.cancel()

    def test_deadline_while_running_and_while_waiting(self):
        started = time.monotonic()
        error = self.error(endless(), timeout=0.3)
        self.assertEqual(error.code(), grpc.StatusCode.DEADLINE_EXCEEDED)
        self.assertLess(time.monotonic() - started, 10)
        self.wait_idle()
        running = self.start(endless())
        error = self.error(request("hi"), timeout=0.2)
        self.assertEqual(error.code(), grpc.StatusCode.DEADLINE_EXCEEDED)
        wait_until(lambda: self.api.server().waiting == 0, "none waiting", 5)
        running.cancel()

    def test_abort(self):
        with self.assertRaises(grpc.RpcError) as caught:
            self.api.abort("nobody")
        self.assertEqual(caught.exception.code(), grpc.StatusCode.NOT_FOUND)
        running = self.start(endless(request_id="mine"))
        waiting = self.api.generate(request("hi", request_id="queued"))
        wait_until(lambda: self.api.server().waiting == 1, "one waiting")
        self.api.abort("queued")
        self.assertEqual(harness.Answer(waiting).reason, "aborted")
        self.api.abort("mine")
        last = running.join().messages[-1]
        self.assertIsNone(running.error)
        self.assertEqual(harness.FINISH[last.finish.reason], "aborted")
        self.assertTrue(last.HasField("usage"))

    def test_duplicate_id(self):
        running = self.start(endless(request_id="twin"))
        self.assertEqual(self.error(request("hi", request_id="twin")).code(), grpc.StatusCode.ALREADY_EXISTS)
        running.cancel()
        self.wait_idle()
        self.assertTrue(self.api.answer(request("hi", request_id="twin", max_tokens=1)).ids)


class SlowReaderTest(unittest.TestCase):
    def test_ends_alone(self):
        with harness.Server("--max_sequences=2", "--max_buffered_tokens=32") as server, server.api() as api:
            # Small windows: the transport takes only a few kB that nobody reads.
            options = [("grpc.http2.lookahead_bytes", 1), ("grpc.http2.bdp_probe", 0)]
            with server.api(options=options) as slow:
                stream = slow.generate(endless(max_tokens=3900))
                next(stream)
                wait_until(lambda: api.server().running == 0, "the slow stream's slot")
                self.assertEqual(len(api.answer(request("Count.", max_tokens=5, ignore_eos=True)).ids), 5)
                with self.assertRaises(grpc.RpcError) as caught:
                    list(stream)
                self.assertEqual(caught.exception.code(), grpc.StatusCode.RESOURCE_EXHAUSTED)


if __name__ == "__main__":
    unittest.main()
