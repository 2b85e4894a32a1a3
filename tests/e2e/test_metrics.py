"""/metrics: every name of SERVICE.md section 4, and sums that agree with what callers saw."""
import contextlib
import os
import re
import socket
import unittest
import urllib.error
import urllib.request

import grpc

import harness
from harness import endless, request, value, wait_until

# Names that must be there whatever has happened so far.
ALWAYS = """qwend_requests_total qwend_requests_running qwend_requests_waiting
qwend_kv_cache_usage_ratio qwend_sequences_max qwend_prompt_tokens_total qwend_cached_prompt_tokens_total
qwend_generation_tokens_total qwend_time_to_first_token_seconds_count qwend_time_to_first_token_seconds_bucket
qwend_inter_token_latency_seconds_count qwend_request_duration_seconds_count qwend_queue_time_seconds_count
qwend_prefill_time_seconds_count qwend_preemptions_total qwend_prefix_cache_hits_total
qwend_prefix_cache_queries_total qwend_memory_bytes qwend_build_info qwend_cache_config_info""".split()
# And those that need some decoding first.
AFTER_DECODING = """qwend_decode_step_seconds_count qwend_kernel_seconds_total qwend_kernel_calls_total
qwend_kernel_bytes_total qwend_kernel_bandwidth_ratio qwend_graph_replays_total
qwend_graph_captures_total""".split()
REASONS = "eos stop_string stop_token length aborted cancelled deadline rejected error".split()


def names(samples):
    return {name for name, _ in samples}


class MetricsTest(unittest.TestCase):
    def test_idle_connections_do_not_block_scrapes(self):
        with harness.Server() as server, contextlib.ExitStack() as stack:
            host, port = server.metrics_address.rsplit(":", 1)
            for i in range(6):
                idle = stack.enter_context(socket.create_connection((host, int(port)), timeout=5))
                if i % 2:
                    idle.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\n")
            self.assertEqual(set(ALWAYS) - names(server.metrics()), set())

    def test_names_sums_and_idle_gauges(self):
        with harness.Server("--max_sequences=2", "--max_queued=1", "--profile_every=4") as server, \
                server.api() as api:
            first = server.metrics()
            self.assertEqual(set(ALWAYS) - names(first), set())
            for name in ("qwend_generation_tokens_total", "qwend_prompt_tokens_total"):
                self.assertEqual(value(first, name), 0, "the warm-up counts as nobody's tokens")
            for reason in REASONS:
                self.assertEqual(value(first, "qwend_requests_total", finish_reason=reason), 0)

            story = "Tell me a story about a fox."
            done = [api.answer(request("What is the capital of France?")),
                    api.answer(request(story, max_tokens=20)),
                    api.answer(request(story, stop_strings=["fox"])),
                    api.answer(endless(max_tokens=200))]
            done.append(api.answer(request(story, stop_token_ids=[done[1].ids[3]])))
            self.assertEqual([a.reason for a in done], ["eos", "length", "stop_string", "length",
                                                        "stop_token"])
            with self.assertRaises(grpc.RpcError):
                api.answer(request("hi", top_k=-1))
            running = harness.Background(api.generate(endless(request_id="a")))
            during = server.metrics()
            self.assertEqual(value(during, "qwend_requests_running"), 1)
            self.assertGreater(value(during, "qwend_kv_cache_usage_ratio"), 0)
            api.abort("a")
            running.join()
            stopped = harness.Background(api.generate(endless()))
            stopped.cancel()
            with self.assertRaises(grpc.RpcError):
                api.answer(endless(), timeout=1.5)
            wait_until(lambda: api.server().running == 0, "idle")

            last = wait_until(lambda: (lambda m: m if value(m, "qwend_requests_running") == 0 else None)(
                server.metrics()), "gauges at rest")
            self.assertEqual(set(ALWAYS + AFTER_DECODING) - names(last), set())
            counts = {r: value(last, "qwend_requests_total", finish_reason=r) for r in REASONS}
            self.assertEqual(counts, {"eos": 1, "length": 2, "stop_string": 1, "stop_token": 1, "aborted": 1,
                                      "cancelled": 1, "deadline": 1, "rejected": 1, "error": 0})
            self.assertEqual(value(last, "qwend_requests_waiting"), 0)
            self.assertEqual(value(last, "qwend_kv_cache_usage_ratio"), 0)
            self.assertEqual(value(last, "qwend_sequences_max"), 2)
            seen = sum(a.usage.completion_tokens for a in done)
            self.assertGreaterEqual(value(last, "qwend_generation_tokens_total"), seen)
            self.assertGreaterEqual(value(last, "qwend_prompt_tokens_total"),
                                    sum(a.usage.prompt_tokens for a in done))
            for name, samples in last.items():
                if name[0].endswith("_total") and name in first:
                    self.assertGreaterEqual(samples, first[name], name)

            self.check_labels(last)
            self.check_kernels(last)
            self.check_deployed_names(last)

    def check_labels(self, samples):
        for (name, labels), _ in samples.items():
            if name.startswith("qwend_"):
                self.assertEqual(dict(labels).get("model"), "demo", name)
        for kind in ("weights", "kv", "states", "activations", "workspace"):
            self.assertGreater(value(samples, "qwend_memory_bytes", kind=kind), 0, kind)
        edges = {dict(labels)["le"] for (name, labels) in samples
                 if name == "qwend_inter_token_latency_seconds_bucket"}
        for edge in (0.0002, 0.0003, 0.0005, 0.0007, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075):
            self.assertIn(edge, {float(e) for e in edges})
        config = next(dict(labels) for (name, labels) in samples if name == "qwend_cache_config_info")
        self.assertEqual(config["block_size"], "64")
        self.assertGreater(int(config["num_gpu_blocks"]), 0)

    def check_kernels(self, samples):
        names = {"decode": ("down_proj_residual", "norm_lm_head", "token_sampler", "linear_attention"),
                 "prefill": ("down_proj", "lm_head_gemv", "token_sampler", "gated_delta_rule")}
        for phase, kernels in names.items():
            for kernel in kernels:
                for metric in ("qwend_kernel_seconds_total", "qwend_kernel_calls_total",
                               "qwend_kernel_bytes_total"):
                    self.assertGreater(value(samples, metric, kernel=kernel, phase=phase), 0, (metric, kernel))
        self.assertGreater(value(samples, "qwend_kernel_bandwidth_ratio", kernel="norm_lm_head"), 0)

    def check_deployed_names(self, samples):
        """The dashboard and the alerts name nothing that the server does not give."""
        used = set()
        for path in ("grafana/dashboards/qwend.json", "prometheus/alerts.yml"):
            with open(os.path.join(harness.ROOT, "deploy", path), encoding="utf-8") as f:
                used |= set(re.findall(r"\bqwend_\w+", f.read()))
        self.assertGreater(len(used), 20)
        self.assertEqual(used - names(samples), set())

    def test_aliases_only_when_asked_for(self):
        wanted = {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
                  "vllm:cache_config_info"}
        with harness.Server("--vllm_metric_aliases") as server:
            self.assertLessEqual(wanted, names(server.metrics()))
        with harness.Server() as server:
            self.assertEqual({n for n in names(server.metrics()) if n.startswith("vllm")}, set())

    def test_counters_add_up_exactly(self):
        with harness.Server() as server, server.api() as api:
            answers = [api.answer(request(f"What is {i} plus 25?")) for i in range(5)]
            m = server.metrics()
            self.assertEqual(value(m, "qwend_generation_tokens_total"),
                             sum(a.usage.completion_tokens for a in answers))
            self.assertEqual(value(m, "qwend_prompt_tokens_total"),
                             sum(a.usage.prompt_tokens for a in answers))
            for name in ("time_to_first_token", "request_duration", "queue_time", "prefill_time"):
                self.assertEqual(value(m, f"qwend_{name}_seconds_count"), 5, name)
            self.assertEqual(value(m, "qwend_inter_token_latency_seconds_count"),
                             sum(a.usage.completion_tokens - 1 for a in answers))
            # Each token after a request's first one is one decode step of batch one.
            self.assertEqual(value(m, "qwend_decode_step_seconds_count"),
                             sum(a.usage.completion_tokens - 1 for a in answers))
            with self.assertRaises(urllib.error.HTTPError):
                urllib.request.urlopen(f"http://{server.metrics_address}/nothing", timeout=10)


if __name__ == "__main__":
    unittest.main()
