// Tokenizer throughput on one thread, and load time.
//
//   build/bin/tokenizer_bench [--benchmark_filter=...]
//
// English is the GPL-3 text that Debian installs, or else a paragraph of ours repeated; each run
// encodes all of it in one call. The qwen3 rows need ../shared/tokenizers/qwen3.
#include <benchmark/benchmark.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>

#include "engine/tokenizer/text_stream.h"
#include "engine/tokenizer/tokenizer.h"

namespace qwend {
namespace {

constexpr char kParagraph[] =
    "A long-lived server owns one device, one arena that is laid out before the first request, and "
    "the captured graphs of a decode step. It accepts streams of requests, reads each prompt in "
    "chunks between the steps of the others, and replays a graph once per token. In 2024 nobody "
    "would have called that unusual; what is unusual is that the time of every kernel can be seen "
    "while it runs, and so explained, and so improved. \"Is it fast?\" isn't a question of taste: "
    "it's a number, e.g. 223.4 tokens/s, and the command that prints it.\n\n";

std::string English() {
  std::ifstream in("/usr/share/common-licenses/GPL-3", std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(in), {}};
  while (text.size() < 32 << 10) text += kParagraph;
  return text;
}

std::string Repeated(const std::string& part, size_t bytes) {
  std::string text;
  while (text.size() < bytes) text += part;
  return text;
}

const Tokenizer* Get(const std::string& name) {
  static std::unique_ptr<Tokenizer> demo, qwen3;
  auto& slot = name == "demo" ? demo : qwen3;
  if (slot == nullptr) {
    const std::filesystem::path source = QWEND_SOURCE_DIR;
    auto loaded = Tokenizer::Load(name == "demo" ? source / "models/demo"
                                                 : source / "../shared/tokenizers/qwen3");
    if (!loaded.ok()) return nullptr;
    slot = *std::move(loaded);
  }
  return slot.get();
}

void Encode(benchmark::State& state, const std::string& name, const std::string& text) {
  const Tokenizer* tokenizer = Get(name);
  if (tokenizer == nullptr) return state.SkipWithError("no such tokenizer here");
  size_t tokens = 0;
  for (auto _ : state) {
    tokens = tokenizer->Encode(text, /*parse_special=*/true)->size();
    benchmark::DoNotOptimize(tokens);
  }
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations() * text.size()));
  state.counters["bytes_per_token"] = static_cast<double>(text.size()) / tokens;
}

void Detokenize(benchmark::State& state, const std::string& name) {
  const Tokenizer* tokenizer = Get(name);
  if (tokenizer == nullptr) return state.SkipWithError("no such tokenizer here");
  const auto ids = *tokenizer->Encode(English(), /*parse_special=*/true);
  for (auto _ : state) {
    Detokenizer detokenizer(*tokenizer, /*skip_special_tokens=*/true);
    StopMatcher matcher({"User:", "\n\n\n\n", "<|im_end|>"}, /*include_stop_string=*/false);
    for (const int32_t id : ids) {
      benchmark::DoNotOptimize(matcher.Append(detokenizer.Append(id)).text.data());
    }
  }
  state.SetItemsProcessed(static_cast<int64_t>(state.iterations() * ids.size()));
}

void Load(benchmark::State& state, const std::string& folder) {
  const std::filesystem::path dir = std::filesystem::path(QWEND_SOURCE_DIR) / folder;
  for (auto _ : state) {
    const auto loaded = Tokenizer::Load(dir);
    if (!loaded.ok()) return state.SkipWithError(loaded.status().ToString().c_str());
  }
}

void Register() {
  for (const std::string name : {"qwen3", "demo"}) {
    const auto add = [&](const std::string& kind, const std::string& text) {
      benchmark::RegisterBenchmark(("encode/" + name + "/" + kind).c_str(), Encode, name, text)
          ->Unit(benchmark::kMillisecond);
    };
    add("english", English());
    add("chinese", Repeated("\u4eca\u5929\u5929\u6c14\u5f88\u597d\uff0c\u6211\u4eec\u53bb"
                            "\u516c\u56ed\u6563\u6b65\u3002",
                            100'000));
    add("code", Repeated("for (int i = 0; i < n; ++i) {\n    sum += x[i] * y[i];\n}\n", 100'000));
    add("one_word_300k", std::string(300'000, 'a'));
    add("spaces_300k", std::string(300'000, ' ') + "x");
    benchmark::RegisterBenchmark(("detokenize/" + name).c_str(), Detokenize, name);
  }
  benchmark::RegisterBenchmark("load/qwen3", Load, "../shared/tokenizers/qwen3")
      ->Unit(benchmark::kMillisecond);
  benchmark::RegisterBenchmark("load/demo", Load, "models/demo")->Unit(benchmark::kMillisecond);
}

}  // namespace
}  // namespace qwend

int main(int argc, char** argv) {
  qwend::Register();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
