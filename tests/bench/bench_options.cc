#include "tests/bench/bench_options.h"

#include <optional>
#include <utility>

#include "absl/flags/flag.h"
#include "absl/flags/reflection.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "engine/loader/weights.h"
#include "engine/memory_plan.h"

ABSL_FLAG(std::string, synthetic, "qwen3.5-0.8b",
          "random weights of this shape: qwen3.5-0.8b, qwen3-0.6b or article-0.8b");
ABSL_FLAG(std::string, model, "", "a model folder, instead of --synthetic");
ABSL_FLAG(std::string, backend, "cpu", "cpu or cuda");
ABSL_FLAG(int, device, 0, "which CUDA device");
ABSL_FLAG(int, threads, 0, "threads of the CPU backend; 0: one per core");
ABSL_FLAG(
    std::string, decode_plan, "auto",
    "auto, explicit, fused or persistent; auto takes that of the last two with less time a row "
    "over all batch sizes up to the largest of --batch");
ABSL_FLAG(int, prompt_tokens, 512, "tokens of the timed prefill");
ABSL_FLAG(int, decode_tokens, 64, "tokens decoded by each sequence in each repeat");
ABSL_FLAG(int, repeats, 5, "timed prefills, and timed blocks of decode_tokens");
ABSL_FLAG(int, context, 0, "positions in the cache when decoding begins; 0: prompt_tokens");
ABSL_FLAG(std::vector<std::string>, batch, {"1"}, "sequences decoded together; several by commas");
ABSL_FLAG(
    std::string, sweep, "",
    "splitk: time every projection of --synthetic in 1 to 32 parts along K, and nothing else");
ABSL_FLAG(bool, json, false, "print one JSON object instead of tables");

namespace qwend::bench {
namespace {

constexpr const char* kFlags[] = {
    "synthetic",     "model",   "backend", "device", "threads", "decode_plan", "prompt_tokens",
    "decode_tokens", "repeats", "context", "batch",  "sweep",   "json"};

absl::CommandLineFlag* FindFlag(absl::string_view name) {
  for (const char* known : kFlags) {
    if (name == known) return absl::FindCommandLineFlag(name);
  }
  return nullptr;
}

// Sets the flags that `args` give; true when help is asked for.
absl::StatusOr<bool> SetFlags(const std::vector<std::string>& args) {
  bool help = false;
  for (size_t i = 0; i < args.size(); ++i) {
    absl::string_view arg = args[i];
    if (!absl::StartsWith(arg, "--")) {
      return absl::InvalidArgumentError(
          absl::StrCat("unexpected argument \"", arg, "\"; options look like --name=value"));
    }
    arg.remove_prefix(2);
    const size_t equals = arg.find('=');
    const absl::string_view name = arg.substr(0, equals);
    std::optional<std::string> value;
    if (equals != absl::string_view::npos) value = std::string(arg.substr(equals + 1));
    if (name == "help" && !value) {
      help = true;
      continue;
    }
    absl::CommandLineFlag* flag = FindFlag(name);
    if (flag == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("unknown flag --", name, "; --help lists them"));
    }
    if (!value && flag->IsOfType<bool>()) value = "true";
    if (!value && i + 1 < args.size()) value = args[++i];
    if (!value) return absl::InvalidArgumentError(absl::StrCat("--", name, " needs a value"));
    std::string error;
    if (!flag->ParseFrom(*value, &error)) {
      return absl::InvalidArgumentError(
          absl::StrCat("--", name, " cannot be \"", *value, "\": ", flag->Help()));
    }
  }
  return help;
}

absl::Status CheckRange(const char* name, int value, int min, int max) {
  if (value >= min && value <= max) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--", name, " is ", value, "; it must be between ", min, " and ", max));
}

absl::StatusOr<DecodePlan> ParsePlan(const std::string& name) {
  if (name == "auto") return DecodePlan::kAuto;
  if (name == "explicit") return DecodePlan::kExplicit;
  if (name == "fused") return DecodePlan::kFused;
  if (name == "persistent") return DecodePlan::kPersistent;
  return absl::InvalidArgumentError(absl::StrCat(
      "--decode_plan is \"", name, "\"; it must be auto, explicit, fused or persistent"));
}

}  // namespace

absl::StatusOr<BenchOptions> ParseBenchOptions(const std::vector<std::string>& args) {
  absl::StatusOr<bool> help = SetFlags(args);
  if (!help.ok()) return help.status();
  BenchOptions options;
  options.help = *help;
  options.synthetic = absl::GetFlag(FLAGS_synthetic);
  options.model = absl::GetFlag(FLAGS_model);
  options.backend = absl::GetFlag(FLAGS_backend);
  if (options.backend != "cpu" && options.backend != "cuda") {
    return absl::InvalidArgumentError(
        absl::StrCat("--backend is \"", options.backend, "\"; it must be cpu or cuda"));
  }
  absl::StatusOr<DecodePlan> plan = ParsePlan(absl::GetFlag(FLAGS_decode_plan));
  if (!plan.ok()) return plan.status();
  options.decode_plan = *plan;
  if (absl::Status status = SyntheticSpec(options.synthetic).status(); !status.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("--synthetic: ", status.message()));
  }
  options.device = absl::GetFlag(FLAGS_device);
  options.threads = absl::GetFlag(FLAGS_threads);
  options.prompt_tokens = absl::GetFlag(FLAGS_prompt_tokens);
  options.decode_tokens = absl::GetFlag(FLAGS_decode_tokens);
  options.repeats = absl::GetFlag(FLAGS_repeats);
  options.context = absl::GetFlag(FLAGS_context);
  options.json = absl::GetFlag(FLAGS_json);
  options.sweep = absl::GetFlag(FLAGS_sweep);
  if (!options.sweep.empty() && options.sweep != "splitk") {
    return absl::InvalidArgumentError(
        absl::StrCat("--sweep is \"", options.sweep, "\"; it must be splitk"));
  }
  if (!options.sweep.empty() && (options.json || !options.model.empty())) {
    return absl::InvalidArgumentError(
        "--sweep times the shapes of --synthetic and prints a table; leave out --json and --model");
  }
  constexpr int kMaxTokens = 1 << 20;
  for (const absl::Status& status :
       {CheckRange("device", options.device, 0, 1024),
        CheckRange("threads", options.threads, 0, 1024),
        CheckRange("prompt_tokens", options.prompt_tokens, 1, kMaxTokens),
        CheckRange("decode_tokens", options.decode_tokens, 1, kMaxTokens),
        CheckRange("repeats", options.repeats, 1, 1000),
        CheckRange("context", options.context, 0, kMaxTokens)}) {
    if (!status.ok()) return status;
  }
  options.batches.clear();
  for (const std::string& text : absl::GetFlag(FLAGS_batch)) {
    int batch = 0;
    if (!absl::SimpleAtoi(text, &batch) || batch < 1 || batch > 64) {
      return absl::InvalidArgumentError(
          absl::StrCat("--batch has \"", text, "\"; each must be between 1 and 64"));
    }
    options.batches.push_back(batch);
  }
  if (options.batches.empty()) {
    return absl::InvalidArgumentError("--batch is empty; give at least one size");
  }
  return options;
}

std::string BenchHelp() {
  std::string help = "qwend-bench: decode and prefill speed of one model, without a network.\n\n";
  for (const char* name : kFlags) {
    const absl::CommandLineFlag* flag = absl::FindCommandLineFlag(name);
    absl::StrAppend(&help, "  --", name, "  ", flag->Help(), " (default: \"", flag->DefaultValue(),
                    "\")\n");
  }
  return help;
}

}  // namespace qwend::bench
