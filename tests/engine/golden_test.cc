// Every family against transformers' numbers (tests/golden/make_golden.py): logits, hidden states,
// sub-module outputs, greedy tokens; and the demo model's answers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <functional>
#include <map>
#include <set>

#include "engine/op_outputs.h"
#include "nlohmann/json.hpp"
#include "tests/engine/test_model.h"

namespace qwend {
namespace {

constexpr double kTolerance = 2e-3;  // what the issue allows
constexpr double kExpected = 2e-5;   // what fp32 sums in another order cost

// Outputs of each operator of one prefill, in order of its occurrence: {layer, name} -> values. The
// name is the operator's tag, and for outputs with names of their own "tag.name".
class Outputs {
 public:
  explicit Outputs(Backend& backend) : backend_(backend) {}

  void operator()(const OpCall& call) {
    const std::string tag = call.tag.substr(std::string("prefill_").size());
    const auto put = [&](const std::string& name, const TensorView& v) {
      outputs_[{call.layer, name == "out" ? tag : tag + "." + name}].push_back(
          ReadFloats(backend_, v));
    };
    for (const OpOutput& output : OutputsOf(call.op)) {
      if (output.view.dtype == DType::kF32) put(output.name, output.view);
    }
    if (const auto* rope = std::get_if<ops::RopeEmbed>(&call.op)) put("cos", rope->cos);
  }

  // The n-th output of the tag in the layer; fails when there is none.
  const std::vector<float>& Get(int layer, const std::string& tag, size_t n = 0) const {
    static const std::vector<float> kNone;
    const auto it = outputs_.find({layer, tag});
    if (it == outputs_.end() || it->second.size() <= n) {
      ADD_FAILURE() << "no output " << n << " of " << tag << " in layer " << layer;
      return kNone;
    }
    return it->second[n];
  }

 private:
  Backend& backend_;
  std::map<std::pair<int, std::string>, std::vector<std::vector<float>>> outputs_;
};

// Columns [begin, begin + count) of rows of `width`.
std::vector<float> Columns(const std::vector<float>& rows, int64_t width, int64_t begin,
                           int64_t count) {
  std::vector<float> out;
  for (size_t at = 0; at < rows.size(); at += width) {
    out.insert(out.end(), rows.begin() + at + begin, rows.begin() + at + begin + count);
  }
  return out;
}

class GoldenTest : public testing::TestWithParam<const char*> {
 protected:
  GoldenTest()
      : golden_(GoldenDir(GetParam()) / "golden.safetensors"),
        model_(GoldenDir(GetParam()), {.plan = DecodePlan::kExplicit, .max_sequences = 64}) {}

  Outputs Observe(const std::string& prompt) {
    Outputs outputs(model_.backend());
    const TestSequence sequence = model_.Sequence(1);
    const std::vector<int32_t> ids = golden_.Get("ids." + prompt).ids;
    model_.runner().PrefillAllLogits(
        {.sequence = sequence.view(), .tokens = ids, .start_position = 0, .sampling = {}},
        std::ref(outputs));
    return outputs;
  }

  void ExpectClose(const std::vector<float>& got, const GoldenTensor& want, int64_t first_row,
                   const std::string& what) {
    ASSERT_EQ(got.size(), first_row * want.row_size() + want.values.size()) << what;
    for (int64_t r = 0; r < want.rows(); ++r) {
      const int64_t n = want.row_size();
      const double error =
          RelativeError(got.data() + (first_row + r) * n, want.values.data() + r * n, n);
      ASSERT_LT(error, kTolerance) << what << ", row " << r;
      worst_ = std::max(worst_, error);
    }
  }

  void TearDown() override {
    if (worst_ == 0) return;
    std::printf("    worst relative error %.2e\n", worst_);
    EXPECT_LT(worst_, kExpected);
  }

  GoldenFile golden_;
  TestModel model_;
  double worst_ = 0;
};

TEST_P(GoldenTest, LogitsAreTheReferences) {
  struct Case {
    const char* prompt;
    const char* logits;
  };
  for (const Case& c : {Case{"one", "logits.one"}, Case{"mid", "logits.mid_last16"},
                        Case{"long", "logits.long_last8"}}) {
    const std::vector<int32_t> ids = golden_.Get(std::string("ids.") + c.prompt).ids;
    const GoldenTensor want = golden_.Get(c.logits);
    const std::vector<float> got = model_.PrefillLogits(model_.Sequence(3), ids);
    ExpectClose(got, want, static_cast<int64_t>(ids.size()) - want.rows(), c.logits);
  }
}

TEST_P(GoldenTest, HiddenStatesAreTheReferences) {
  const Outputs outputs = Observe("mid");
  const GoldenTensor want = golden_.Get("hidden.mid");  // [layers + 1, T, hidden]
  const int layers = model_.spec().num_layers();
  ASSERT_EQ(want.rows(), layers + 1);
  for (int i = 0; i <= layers; ++i) {
    const int64_t n = want.row_size();
    const GoldenTensor at{
        .shape = {want.shape[1], want.shape[2]},
        .values = {want.values.begin() + i * n, want.values.begin() + (i + 1) * n},
        .ids = {}};
    const std::vector<float>& got = i == 0        ? outputs.Get(-1, "embedding_lookup")
                                    : i == layers ? outputs.Get(-1, "final_rms_norm")
                                                  : outputs.Get(i - 1, "residual_add", 1);
    ExpectClose(got, at, 0, "hidden state " + std::to_string(i));
  }
}

TEST_P(GoldenTest, SubModuleOutputsAreTheReferences) {
  const Outputs outputs = Observe("ops");
  const ModelSpec& spec = model_.spec();
  // What a name behind "act.model.layers.N." is here.
  const auto of_layer = [&](int layer, const std::string& name) -> std::vector<float> {
    static const std::map<std::string, std::pair<const char*, size_t>> kTags = {
        {"input_layernorm", {"rms_norm", 0}},
        {"post_attention_layernorm", {"rms_norm", 1}},
        {"mlp", {"down_proj", 0}},
        {"mlp.down_proj", {"down_proj", 0}},
        {"mlp.gate_proj", {"gate_proj", 0}},
        {"mlp.up_proj", {"up_proj", 0}},
        {"self_attn", {"attn_out_proj", 0}},
        {"self_attn.o_proj", {"attn_out_proj", 0}},
        {"self_attn.q_proj", {"q_proj_gemv", 0}},
        {"self_attn.k_proj", {"k_proj_gemv", 0}},
        {"self_attn.v_proj", {"v_proj_gemv", 0}},
        {"self_attn.q_norm", {"qk_norm.q", 0}},
        {"self_attn.k_norm", {"qk_norm.k", 0}},
        {"linear_attn", {"linear_out_proj", 0}},
        {"linear_attn.out_proj", {"linear_out_proj", 0}},
        {"linear_attn.in_proj_qkv", {"in_proj_qkv", 0}},
        {"linear_attn.in_proj_z", {"in_proj_z", 0}},
        {"linear_attn.norm", {"gated_rms_norm", 0}},
    };
    if (const auto it = kTags.find(name); it != kTags.end()) {
      return outputs.Get(layer, it->second.first, it->second.second);
    }
    const int heads = spec.linear_value_heads;
    if (name == "linear_attn.in_proj_b") {
      return Columns(outputs.Get(layer, "in_proj_ba"), 2 * heads, 0, heads);
    }
    if (name == "linear_attn.in_proj_a") {
      return Columns(outputs.Get(layer, "in_proj_ba"), 2 * heads, heads, heads);
    }
    if (name == "mlp.act_fn") {
      std::vector<float> gate = outputs.Get(layer, "gate_proj");
      for (float& x : gate) x = static_cast<float>(x / (1.0 + std::exp(-static_cast<double>(x))));
      return gate;
    }
    ADD_FAILURE() << "no operator stands for " << name;
    return {};
  };
  size_t compared = 0;
  for (const std::string& full : golden_.Names("act.")) {
    const GoldenTensor want = golden_.Get(full);
    std::string name = full.substr(4);
    std::vector<float> got;
    if (name == "lm_head") {
      got = outputs.Get(-1, "lm_head_gemv");
    } else if (name == "model.norm") {
      got = outputs.Get(-1, "final_rms_norm");
    } else if (name == "model.embed_tokens") {
      got = outputs.Get(-1, "embedding_lookup");
    } else if (name == "model.rotary_emb") {
      // The reference holds each cosine twice, for both halves of the rotated elements.
      int layer = 0;
      while (spec.layers[layer] != LayerKind::kFullAttention) ++layer;
      const std::vector<float>& table = outputs.Get(layer, "rope_embed.cos");
      const int64_t half = spec.rotary_dim / 2;
      for (int64_t p = 0; p < want.rows(); ++p) {
        for (int64_t i = 0; i < 2 * half; ++i) got.push_back(table[p * half + i % half]);
      }
    } else {
      const std::string prefix = "model.layers.";
      ASSERT_EQ(name.rfind(prefix, 0), 0u) << name;
      name = name.substr(prefix.size());
      const size_t dot = name.find('.');
      got = of_layer(std::stoi(name.substr(0, dot)), name.substr(dot + 1));
    }
    ExpectClose(got, want, 0, full);
    if (HasFatalFailure()) return;
    ++compared;
  }
  EXPECT_GE(compared, 30u);
}

TEST_P(GoldenTest, GreedyTokensAreTheReferences) {
  TestModel fused(GoldenDir(GetParam()), {.plan = DecodePlan::kFused});
  for (const std::string prompt : {"one", "mid", "long"}) {
    const std::vector<int32_t> ids = golden_.Get("ids." + prompt).ids;
    const std::vector<int32_t> want = golden_.Get("greedy." + prompt).ids;
    const std::vector<float> margins = golden_.Get("margin." + prompt).values;
    const int count = static_cast<int>(want.size());
    const std::vector<int32_t> got = fused.Greedy(fused.Sequence(2), ids, count);
    EXPECT_EQ(got, model_.Greedy(model_.Sequence(2), ids, count)) << "the plans differ";
    // Behind a step that the reference itself nearly decided otherwise, nothing can be compared.
    constexpr float kUndecided = 1e-3f;
    int compared = 0;
    for (; compared < count && margins[compared] > kUndecided; ++compared) {
      ASSERT_EQ(got[compared], want[compared]) << prompt << ", step " << compared;
    }
    EXPECT_GE(compared, 8) << prompt;
  }
}

INSTANTIATE_TEST_SUITE_P(Checkpoints, GoldenTest,
                         testing::Values("tiny-llama", "tiny-qwen2", "tiny-qwen3", "tiny-qwen35",
                                         "tiny-qwen35-realheads"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

// Every answer of the demo model whose margin leaves no doubt, each alone and sixteen at a time.
TEST(DemoModel, AnswersAreTheReferences) {
  struct Answer {
    std::vector<int32_t> prompt;
    std::vector<int32_t> want;
  };
  std::vector<Answer> answers;
  std::ifstream file(GoldenDir("demo-greedy.json"));
  for (const auto& item : nlohmann::json::parse(file)) {
    if (item["min_margin"].get<double>() <= 0.05) continue;
    answers.push_back({item["prompt_ids"], item["greedy_ids"]});
  }
  ASSERT_GE(answers.size(), 30u);
  TestModel model(SourcePath("models/demo"), {.max_sequences = 16});
  for (const Answer& answer : answers) {
    ASSERT_EQ(model.Greedy(model.Sequence(5), answer.prompt, static_cast<int>(answer.want.size())),
              answer.want);
  }
  // Continuous batching: as soon as one ends the next takes its slot.
  struct Running {
    const Answer* answer;
    std::vector<int32_t> tokens;
  };
  std::map<int, Running> running;  // by slot
  size_t next = 0;
  size_t finished = 0;
  while (finished < answers.size()) {
    for (int slot = 0; slot < 16 && next < answers.size(); ++slot) {
      if (running.count(slot) != 0) continue;
      const Answer& answer = answers[next++];
      running[slot] = {&answer, {model.Prefill(model.Sequence(slot), answer.prompt)}};
    }
    std::vector<TestSequence> sequences;
    std::vector<DecodeRow> rows;
    std::vector<int> slots;
    for (const auto& [slot, run] : running) {
      if (run.tokens.size() < run.answer->want.size()) slots.push_back(slot);
    }
    for (int slot : slots) sequences.push_back(model.Sequence(slot));
    for (size_t i = 0; i < slots.size(); ++i) {
      const Running& run = running[slots[i]];
      rows.push_back(
          {.sequence = sequences[i].view(),
           .token = run.tokens.back(),
           .position = static_cast<int>(run.answer->prompt.size() + run.tokens.size()) - 1,
           .sampling = {}});
    }
    if (!rows.empty()) {
      const std::span<const int32_t> tokens = model.runner().Decode(rows);
      for (size_t i = 0; i < slots.size(); ++i) running[slots[i]].tokens.push_back(tokens[i]);
    }
    for (auto it = running.begin(); it != running.end();) {
      if (it->second.tokens.size() < it->second.answer->want.size()) {
        ++it;
        continue;
      }
      ASSERT_EQ(it->second.tokens, it->second.answer->want);
      it = running.erase(it);
      ++finished;
    }
  }
}

}  // namespace
}  // namespace qwend
