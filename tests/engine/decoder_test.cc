// The operators of a step as text, compared with tests/golden/steps/*.txt, and what the lists
// promise. QWEND_UPDATE_GOLDEN=1 writes the texts anew.
#include "engine/models/decoder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include "tests/engine/test_model.h"

namespace qwend {
namespace {

using testing::HasSubstr;
using testing::UnorderedElementsAreArray;

// A model laid out over addresses that nobody reads.
class PaperModel {
 public:
  PaperModel(const std::string& checkpoint, DecodePlan plan)
      : spec(LoadModelConfig(GoldenDir(checkpoint))->spec), plan_(plan), sizes_(Plan(), Info()) {
    for (const WeightSlot& slot : WeightSlots(spec, weights)) {
      const bool vector = slot.parts[0].shape.size() == 1;
      *slot.view = vector ? cursor_.Tensor(DType::kF32, {slot.rows()})
                          : cursor_.Tensor(slot.packed ? spec.weight_type : DType::kF32,
                                           {slot.rows(), slot.cols()});
      if (slot.packed) slot.view->layout = Layout::kCpuPanels;
    }
    if (spec.tied_embeddings) weights.lm_head = weights.embedding;
    caches_ = LayOutKv(spec, sizes_, cursor_);
    LayOutStates(spec, sizes_, cursor_, caches_);
    activations_ = LayOutActivations(spec, sizes_, cursor_);
    workspace_ = LayOutWorkspace(spec, sizes_, cursor_);
  }

  OpList Decode(int rows) {
    const StepInputs inputs = LayOutInputs(sizes_, rows, rows, workspace_.inputs);
    OpList list;
    AppendLayers(Context(), inputs, StepPhase::kDecode, plan_, list);
    AppendHead(Context(), inputs.sampling, inputs.token_ids, 0, rows,
               plan_ == DecodePlan::kFused ? HeadForm::kFused : HeadForm::kPlain, list);
    return list;
  }

  OpList Prefill(int rows) {
    const StepInputs inputs = LayOutInputs(sizes_, rows, 1, workspace_.inputs);
    OpList list("prefill_");
    AppendLayers(Context(), inputs, StepPhase::kPrefill, plan_, list);
    AppendHead(Context(), inputs.sampling, workspace_.tokens, rows - 1, 1, HeadForm::kPlain, list);
    return list;
  }

  ModelSpec spec;
  ModelWeights weights;

 private:
  MemoryPlan Plan() const {
    MemoryPlan plan;
    plan.decode_plan = plan_;
    plan.max_sequences = 4;
    plan.max_context_tokens = 256;
    plan.prefill_chunk_tokens = 64;
    plan.kv_pages = 16;
    return plan;
  }
  BackendInfo Info() const {
    BackendInfo info;
    info.split_k = {{.rows = spec.hidden, .cols = spec.intermediate, .parts = 2}};  // down_proj
    return info;
  }
  DecoderContext Context() {
    return {spec, weights, caches_, activations_, workspace_, sizes_.split_k, spec.vocab_size};
  }

  DecodePlan plan_;
  StepSizes sizes_;
  MemoryCursor cursor_{reinterpret_cast<void*>(uintptr_t{1} << 20)};
  std::vector<LayerCache> caches_;
  Activations activations_;
  Workspace workspace_;
};

void ExpectGoldenText(const OpList& list, const std::string& name) {
  const std::filesystem::path path = SourcePath("tests/golden/steps/" + name + ".txt");
  if (std::getenv("QWEND_UPDATE_GOLDEN") != nullptr) {
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << list.ToString();
  }
  std::ifstream file(path);
  ASSERT_TRUE(file.good()) << path << " is missing; make it with QWEND_UPDATE_GOLDEN=1";
  std::ostringstream want;
  want << file.rdbuf();
  EXPECT_EQ(list.ToString(), want.str()) << path;
}

TEST(Decoder, StepsReadAsTheyAlwaysDid) {
  for (const char* checkpoint : {"tiny-llama", "tiny-qwen35"}) {
    PaperModel fused(checkpoint, DecodePlan::kFused);
    PaperModel explicit_plan(checkpoint, DecodePlan::kExplicit);
    const std::string name = checkpoint;
    ExpectGoldenText(fused.Decode(2), name + ".decode-fused");
    ExpectGoldenText(explicit_plan.Decode(2), name + ".decode-explicit");
    ExpectGoldenText(fused.Prefill(5), name + ".prefill");
  }
}

std::map<std::string, int> Tags(const OpList& list) {
  std::map<std::string, int> tags;
  for (const OpCall& call : list.calls()) ++tags[call.tag];
  return tags;
}

TEST(Decoder, TheExplicitPlanIsTheOperatorMap) {
  const std::map<std::string, int> tags =
      Tags(PaperModel("tiny-llama", DecodePlan::kExplicit).Decode(1));
  const int layers = 3;
  EXPECT_EQ(
      tags,
      (std::map<std::string, int>{
          {"embedding_lookup", 1},      {"cache_mask", 1},           {"rms_norm", 2 * layers},
          {"q_proj_gemv", layers},      {"k_proj_gemv", layers},     {"v_proj_gemv", layers},
          {"rope_embed", layers},       {"kv_cache_update", layers}, {"qk_dot", layers},
          {"softmax_mask", layers},     {"pv_dot", layers},          {"attn_out_proj", layers},
          {"residual_add", 2 * layers}, {"gate_proj", layers},       {"up_proj", layers},
          {"silu_mul", layers},         {"down_proj", layers},       {"splitk_reduce", layers},
          {"final_rms_norm", 1},        {"lm_head_gemv", 1},         {"token_sampler", 1}}));
}

TEST(Decoder, HybridLayersHaveTheirOwnOperators) {
  const std::map<std::string, int> tags =
      Tags(PaperModel("tiny-qwen35", DecodePlan::kExplicit).Decode(1));
  for (const char* tag : {"in_proj_qkv", "in_proj_z", "in_proj_ba", "causal_conv1d", "delta_gates",
                          "gated_delta_rule", "gated_rms_norm", "linear_out_proj"}) {
    EXPECT_EQ(tags.count(tag) == 1 ? tags.at(tag) : 0, 3) << tag;
  }
  for (const char* tag : {"qk_norm", "output_gate", "attn_out_proj"}) {
    EXPECT_EQ(tags.count(tag) == 1 ? tags.at(tag) : 0, 1) << tag;
  }
}

TEST(Decoder, TheFusedPlanHasAtMostFourteenKernels) {
  const OpList list = PaperModel("tiny-llama", DecodePlan::kFused).Decode(1);
  std::set<size_t> kernels;
  for (const OpCall& call : list.calls()) kernels.insert(call.op.index());
  EXPECT_LE(kernels.size(), 14u);
  const std::map<std::string, int> tags = Tags(list);
  const int layers = 3;
  EXPECT_EQ(tags, (std::map<std::string, int>{{"embedding_lookup", 1},
                                              {"norm_qkv_proj", layers},
                                              {"attention", layers},
                                              {"attn_out_proj_residual", layers},
                                              {"norm_gate_up_silu", layers},
                                              {"down_proj_residual", layers},
                                              {"norm_lm_head", 1},
                                              {"token_sampler", 1}}));
}

TEST(Decoder, TheFusedPlanOfAHybridModel) {
  const std::map<std::string, int> tags =
      Tags(PaperModel("tiny-qwen35", DecodePlan::kFused).Decode(1));
  EXPECT_EQ(tags, (std::map<std::string, int>{{"embedding_lookup", 1},
                                              {"norm_in_proj", 3},
                                              {"linear_attention", 3},
                                              {"linear_out_proj_residual", 3},
                                              {"norm_qkv_proj", 1},
                                              {"attention", 1},
                                              {"attn_out_proj_residual", 1},
                                              {"norm_gate_up_silu", 4},
                                              {"down_proj_residual", 4},
                                              {"norm_lm_head", 1},
                                              {"token_sampler", 1}}));
}

TEST(Decoder, SplitKFollowsTheBackendsTable) {
  const OpList list = PaperModel("tiny-llama", DecodePlan::kExplicit).Decode(3);
  int split = 0;
  for (size_t i = 0; i < list.calls().size(); ++i) {
    const auto* gemv = std::get_if<ops::Gemv>(&list.calls()[i].op);
    if (gemv == nullptr || gemv->splits == 1) continue;
    ++split;
    EXPECT_EQ(list.calls()[i].tag, "down_proj");
    const auto& reduce = std::get<ops::SplitKReduce>(list.calls()[i + 1].op);
    EXPECT_EQ(reduce.partials.data, gemv->partials.data);
    EXPECT_EQ(reduce.out.data, gemv->out.data);
    EXPECT_EQ(list.calls()[i + 1].layer, list.calls()[i].layer);
  }
  EXPECT_EQ(split, 3);
}

TEST(Decoder, PrefillTagsAreTheDecodeTagsWithAPrefix) {
  PaperModel model("tiny-qwen35", DecodePlan::kExplicit);
  std::set<std::string> decode;
  for (const auto& [tag, n] : Tags(model.Decode(1))) decode.insert(tag);
  for (const char* tag : {"qk_dot", "softmax_mask", "pv_dot", "splitk_reduce"}) decode.erase(tag);
  decode.insert("attention");
  std::vector<std::string> want;
  for (const std::string& tag : decode) want.push_back("prefill_" + tag);
  std::vector<std::string> got;
  for (const auto& [tag, n] : Tags(model.Prefill(5))) got.push_back(tag);
  EXPECT_THAT(got, UnorderedElementsAreArray(want));
}

TEST(Decoder, AWrongWeightNamesTagAndLayer) {
  PaperModel model("tiny-llama", DecodePlan::kFused);
  model.weights.layers[2].down_proj.shape[1] -= 1;
  try {
    model.Decode(1);
    FAIL() << "a down_proj of the wrong width passed";
  } catch (const std::invalid_argument& e) {
    EXPECT_THAT(e.what(), HasSubstr("down_proj"));
    EXPECT_THAT(e.what(), HasSubstr("layer 2"));
  }
}

TEST(Decoder, InputsOfABucketDoNotOverlap) {
  MemoryPlan plan;
  plan.max_sequences = 3;
  plan.max_context_tokens = 1000;
  plan.prefill_chunk_tokens = 64;
  plan.kv_pages = 48;
  const StepSizes sizes(plan, BackendInfo{});
  EXPECT_THAT(sizes.buckets, testing::ElementsAre(1, 2, 4));
  EXPECT_EQ(sizes.max_pages, 16);
  EXPECT_EQ(sizes.dummy_page(), 48);
  EXPECT_EQ(sizes.dummy_slot(), 3);
  const StepInputs in = LayOutInputs(sizes, 4, 4, reinterpret_cast<void*>(uintptr_t{4096}));
  std::vector<std::pair<char*, char*>> ranges;
  for (const TensorView& v :
       {in.token_ids, in.sampling, in.sequences.query_start, in.sequences.row_sequence,
        in.sequences.positions, in.sequences.block_table, in.sequences.state_slot}) {
    ranges.push_back({v.As<char>(), v.As<char>() + v.bytes()});
  }
  for (size_t i = 1; i < ranges.size(); ++i) EXPECT_LE(ranges[i - 1].second, ranges[i].first);
  EXPECT_LE(ranges.back().second, reinterpret_cast<char*>(uintptr_t{4096}) + in.bytes);
}

}  // namespace
}  // namespace qwend
