#!/usr/bin/env python3
"""The layering check itself must catch what it is there for."""
import os
import tempfile
import unittest

import check


class CheckTest(unittest.TestCase):
    def errors(self, path, text):
        with tempfile.TemporaryDirectory() as root:
            full = os.path.join(root, path)
            os.makedirs(os.path.dirname(full))
            with open(full, "w", encoding="utf-8") as f:
                f.write(text)
            return check.check_tree(root)[0]

    def assert_breaks(self, path, text, line):
        errors = self.errors(path, text)
        self.assertEqual(len(errors), 1, errors)
        self.assertTrue(errors[0].startswith(f"{path}:{line}:"), errors[0])

    def test_breaks(self):
        for path, text, line in [
            ("kernels/ops.cc", '#include <vector>\n#include "absl/status/status.h"\n', 2),
            ("kernels/cpu/norm.cc", '#include "engine/engine.h"\n', 1),
            ("kernels/norm.cc", '#include "hwy/highway.h"\n', 1),
            ("kernels/cpu/norm.cc", "#include <cuda_runtime.h>\n", 1),
            ("engine/scheduler.cc", '#include "kernels/cpu/thread_pool.h"\n', 1),
            ("engine/engine.cc", '\n#include "grpcpp/grpcpp.h"\n', 2),
            ("engine/engine.cc", '#include "qwend/v1/inference.pb.h"\n', 1),
            ("engine/engine.cc", "#  include <cuda.h>\n", 1),
            ("server/main.cc", '#include "engine/scheduler.h"\n', 1),
            ("server/main.cc", '#include "kernels/ops.h"\n', 1),
            ("client/main.cc", '#include "engine/request.h"\n', 1),
            ("client/main.cc", '#include "nlohmann/json.hpp"\n', 1),
            ("engine/loader/config.cc", 'if (family == "qwen3") {}\n', 1),
            ("server/main.cc", 'Log("Llama");\n', 1),
            ("kernels/long.h", "\n" * 501, 501),
        ]:
            with self.subTest(path=path, text=text[:40]):
                self.assert_breaks(path, text, line)

    def test_allowed(self):
        for path, text in [
            ("kernels/cuda/norm.cu", '#include <cuda_runtime.h>\n#include "kernels/cuda/launch.cuh"\n'),
            ("kernels/cpu/gemv.cc", '#include <sys/mman.h>\n#include "hwy/highway.h"\n'),
            ("engine/loader/config.cc", '// qwen3 differs\n#include "kernels/ops.h"\nint a; /* llama\n*/\n'),
            ("engine/models/decoder.cc", 'if (family == "qwen3") {}\n'),
            ("server/main.cc", '#include "engine/tokenizer/tokenizer.h"\n#include "grpcpp/grpcpp.h"\n'),
            ("tests/engine/x.cc", '#include "engine/scheduler.h"\nauto a = "llama";\n'),
            ("client/main.cc", '#include "qwend/v1/inference.grpc.pb.h"\nauto a = "qwend";\n'),
            ("kernels/long.h", "\n" * 450),
        ]:
            with self.subTest(path=path, text=text[:40]):
                self.assertEqual(self.errors(path, text), [])


if __name__ == "__main__":
    unittest.main()
