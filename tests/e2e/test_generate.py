"""What a caller gets: answers, streams, finish reasons, reproducibility."""
import concurrent.futures
import unittest

import harness
from harness import pb, request


class GenerateTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = harness.Server("--max_sequences=16")
        cls.api = cls.server.api()

    @classmethod
    def tearDownClass(cls):
        cls.api.channel.close()
        cls.server.__exit__(None)

    def test_capital_of_france(self):
        answer = self.api.answer(request("What is the capital of France?"))
        self.assertEqual(answer.text, "The capital of France is Paris.")
        self.assertEqual(answer.reason, "eos")
        self.assertEqual(answer.usage.completion_tokens, len(answer.ids))
        self.assertGreater(answer.usage.time_to_first_token_seconds, 0)
        self.assertGreaterEqual(answer.usage.total_seconds, answer.usage.time_to_first_token_seconds)

    def test_tokens_come_one_by_one(self):
        answer = self.api.answer(request("Tell me a story about a fox.", max_tokens=60))
        self.assertEqual(len(answer.ids), 60)
        # Tokens may share a message while one is being written, but not all of them.
        self.assertGreater(len(answer.messages), 5)

    def test_unary_equals_stream(self):
        for fields in ({}, {"max_tokens": 7}, {"stop_strings": ["fox"]}, {"greedy": False, "seed": 5}):
            with self.subTest(fields):
                r = request("Tell me a story about a fox.", **fields)
                stream, whole = self.api.answer(r), self.api.unary(r)
                self.assertEqual(len(whole.outputs), 1)
                self.assertEqual(whole.outputs[0].text, stream.text)
                self.assertEqual(list(whole.outputs[0].token_ids), stream.ids)
                self.assertEqual(whole.outputs[0].finish, stream.finish)

    def test_references_alone_and_sixteen_at_once(self):
        cases = harness.goldens()
        requests = [request(case["prompt"], raw=True, parse_special=True,
                            max_tokens=len(case["greedy_ids"])) for case in cases]
        alone = [self.api.answer(r).ids for r in requests]
        compared = 0
        for case, ids in zip(cases, alone):
            if case["min_margin"] > 0.05:
                compared += 1
                self.assertEqual(ids, case["greedy_ids"], case["prompt"])
        self.assertGreater(compared, 20)
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            together = list(pool.map(lambda r: self.api.answer(r).ids, requests))
        self.assertEqual(together, alone)

    def test_same_seed_same_tokens_under_load(self):
        seeded = request("Tell me a story about a fox.", greedy=False, temperature=1.5, seed=77,
                         max_tokens=60)
        alone = self.api.answer(seeded).ids
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            load = [pool.submit(self.api.answer, request("Write a short story.", greedy=False))
                    for _ in range(6)]
            under_load = self.api.answer(seeded).ids
            for other in load:
                other.result()
        self.assertEqual(under_load, alone)

    def test_without_seed_answers_differ(self):
        r = request("Tell me a story about a fox.", greedy=False, temperature=1.5, top_k=0, top_p=1.0,
                    max_tokens=60)
        self.assertNotEqual(self.api.answer(r).ids, self.api.answer(r).ids)

    def test_finish_reasons(self):
        story = "Tell me a story about a fox."
        full = self.api.answer(request(story, max_tokens=40))
        self.assertEqual((full.reason, len(full.ids)), ("length", 40))
        one = self.api.answer(request(story, max_tokens=1))
        self.assertEqual((one.reason, one.ids), ("length", full.ids[:1]))
        by_id = self.api.answer(request(story, stop_token_ids=[full.ids[5]]))
        self.assertEqual((by_id.reason, by_id.finish.stop_token_id), ("stop_token", full.ids[5]))
        self.assertLessEqual(len(by_id.ids), 6)

    def test_stop_strings(self):
        story = "Tell me a story about a fox."
        whole = self.api.answer(request(story, max_tokens=40)).text
        stop = whole[20:29]  # crosses token borders
        before = whole[:whole.index(stop)]
        cut = self.api.answer(request(story, stop_strings=["no such text", stop]))
        self.assertEqual((cut.text, cut.reason), (before, "stop_string"))
        self.assertEqual(cut.finish.stop_string, stop)
        kept = self.api.answer(request(story, stop_strings=[stop], include_stop_string=True))
        self.assertEqual((kept.text, kept.reason), (before + stop, "stop_string"))
        # A stop string that begins and never ends must come out whole.
        self.assertEqual(self.api.answer(request(story, max_tokens=40, stop_strings=[whole + "!"])).text,
                         whole)

    def test_min_tokens_and_ignore_eos(self):
        question = "What is the capital of France?"
        longer = self.api.answer(request(question, min_tokens=20, max_tokens=30))
        self.assertGreaterEqual(len(longer.ids), 20)
        on = self.api.answer(request(question, ignore_eos=True, max_tokens=30))
        self.assertEqual((on.reason, len(on.ids)), ("length", 30))

    def test_multibyte_text_is_never_cut(self):
        # Random tokens of every kind: many are pieces of characters.
        answer = self.api.answer(request("été 你好 😀", raw=True, greedy=False, temperature=100.0, top_k=0,
                                         top_p=1.0, seed=3, max_tokens=400, ignore_eos=True))
        for message in answer.messages:
            message.text.encode("utf-8")  # whole characters: it parsed as a proto string
        detokenized = self.api.inference("Detokenize", pb.DetokenizeRequest(ids=answer.ids),
                                         pb.DetokenizeResponse).text
        self.assertEqual(answer.text, detokenized)

    def test_output_fields(self):
        r = request("What is the capital of France?", omit_text=True)
        self.assertEqual(self.api.answer(r).text, "")
        self.assertTrue(self.api.answer(r).ids)
        r = request("What is the capital of France?", omit_token_ids=True)
        self.assertEqual(self.api.answer(r).ids, [])
        self.assertEqual(self.api.answer(r).text, "The capital of France is Paris.")

    def test_tokenize_and_back(self):
        text = "Hello, wörld! 你好 <|im_start|>"
        for special in (False, True):
            ids = self.api.tokenize(text, special)
            back = self.api.inference("Detokenize", pb.DetokenizeRequest(ids=ids), pb.DetokenizeResponse)
            self.assertEqual(back.text, text)
        self.assertLess(len(self.api.tokenize(text, True)), len(self.api.tokenize(text, False)))
        chat = pb.TokenizeRequest()
        chat.chat.messages.add(role="user", content="Hi")
        rendered = self.api.inference("Tokenize", chat, pb.TokenizeResponse)
        self.assertEqual(rendered.rendered_text, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
        self.assertEqual(b"".join(rendered.pieces).decode(), rendered.rendered_text)

    def test_model_and_server_info(self):
        model = self.api.model()
        self.assertEqual((model.architecture, model.vocab_size, model.num_layers), ("qwen3_5", 3264, 8))
        self.assertEqual(sorted(model.eos_token_ids), [3176, 3178])
        self.assertTrue(model.has_tokenizer and model.has_chat_template)
        self.assertAlmostEqual(model.default_sampling.temperature, 0.7, places=5)
        server = self.api.server()
        self.assertEqual((server.backend, server.max_sequences), ("cpu", 16))
        self.assertEqual((server.running, server.kv_pages_used), (0, 0))
        self.assertGreater(server.weight_bytes, 10_000_000)

    def test_kernel_profile(self):
        self.api.answer(harness.endless(max_tokens=300))
        profile = self.api.control("GetKernelProfile", pb.GetKernelProfileRequest(batch_size=1),
                                   pb.KernelProfile)
        self.assertEqual(profile.batch_size, 1)
        self.assertGreater(profile.steps, 0)
        kernels = {k.kernel: k for k in profile.kernels}
        self.assertIn("norm_lm_head", kernels)
        self.assertIn("linear_attention", kernels)
        spent = sum(k.seconds_per_step for k in profile.kernels)
        self.assertLessEqual(spent, profile.step_seconds * 1.05)
        times = [k.seconds_per_step for k in profile.kernels]
        self.assertEqual(times, sorted(times, reverse=True))


if __name__ == "__main__":
    unittest.main()
