// Every CUDA operator against the CPU backend: real shapes and hostile ones, strided inputs,
// poisoned outputs, fresh random input on every run (the seed is printed; QWEND_TEST_SEED repeats
// one).
#include "tests/gpu/twin.h"

namespace qwend::gpu {
namespace {

class CudaOps : public TwinTest {
 protected:
  // Sequences with the given numbers of rows and start positions, their pages dealt out in a
  // shuffled order.
  struct Step {
    Handle query_start, row_sequence, positions, block_table, state_slot, slots, lengths;
    int rows = 0, sequences = 0, pages = 0;
    StepSequences On(const Twin::Side& v) const {
      return {v(query_start), v(row_sequence), v(positions), v(block_table), v(state_slot)};
    }
  };
  Step MakeStep(const std::vector<int>& counts, const std::vector<int>& starts) {
    Step s;
    s.sequences = static_cast<int>(counts.size());
    std::vector<int32_t> query_start{0}, row_sequence, positions, lengths, state_slot;
    int max_pages = 1;
    for (int i = 0; i < s.sequences; ++i) {
      for (int j = 0; j < counts[i]; ++j) {
        row_sequence.push_back(i);
        positions.push_back(starts[i] + j);
        lengths.push_back(starts[i] + j + 1);
      }
      query_start.push_back(query_start.back() + counts[i]);
      max_pages = std::max(max_pages, (starts[i] + counts[i] + kPageTokens - 1) / kPageTokens);
      state_slot.push_back(s.sequences - 1 - i);
    }
    s.rows = query_start.back();
    s.pages = s.sequences * max_pages;
    std::vector<int32_t> table(s.pages);
    for (int i = 0; i < s.pages; ++i) table[i] = i;
    std::shuffle(table.begin(), table.end(), twin_->random());
    std::vector<int32_t> slots;
    for (int r = 0; r < s.rows; ++r) {
      slots.push_back(table[row_sequence[r] * max_pages + positions[r] / kPageTokens] *
                          kPageTokens +
                      positions[r] % kPageTokens);
    }
    s.query_start = twin_->Ints(query_start, {s.sequences + 1});
    s.row_sequence = twin_->Ints(row_sequence, {s.rows});
    s.positions = twin_->Ints(positions, {s.rows});
    s.block_table = twin_->Ints(table, {s.sequences, max_pages});
    s.state_slot = twin_->Ints(state_slot, {s.sequences});
    s.slots = twin_->Ints(slots, {s.rows});
    s.lengths = twin_->Ints(lengths, {s.rows});
    return s;
  }
};

TEST_F(CudaOps, Gemv) {
  struct Case {
    int rows, n, k, splits;
    DType weight;
    bool bias;
  };
  const Case cases[] = {
      {1, 1, 1, 1, DType::kBF16, false},        {3, 5, 17, 1, DType::kBF16, true},
      {1, 96, 112, 1, DType::kBF16, false},     {1, 1024, 3584, 1, DType::kBF16, false},
      {1, 1024, 3584, 4, DType::kBF16, false},  {1, 6144, 1024, 1, DType::kBF16, false},
      {2, 2048, 1024, 2, DType::kBF16, true},   {4, 896, 4864, 1, DType::kBF16, true},
      {7, 1024, 2048, 2, DType::kBF16, false},  {8, 3584, 1024, 1, DType::kBF16, false},
      {13, 512, 896, 1, DType::kBF16, false},   {33, 1024, 896, 3, DType::kBF16, false},
      {64, 300, 304, 1, DType::kBF16, true},    {65, 1024, 896, 1, DType::kBF16, true},
      {200, 515, 200, 1, DType::kBF16, false},  {512, 1024, 1024, 1, DType::kBF16, false},
      {1, 20000, 1024, 1, DType::kBF16, false}, {1, 700, 264, 1, DType::kF32, true},
      {5, 700, 264, 1, DType::kF16, false},     {1, 1024, 1000, 32, DType::kBF16, false}};
  for (const Case& c : cases) {
    Twin& t = *twin_;
    const Handle x = t.Random(DType::kF32, {c.rows, c.k}),
                 w = t.Weight(c.weight, c.n, c.k, 1.0f / std::sqrt(float(c.k)));
    const Handle bias = c.bias ? t.Random(DType::kBF16, {c.n}) : Handle{};
    const Handle out = t.Poisoned(DType::kF32, {c.rows, c.n});
    const Handle partials =
        c.splits > 1 ? t.Poisoned(DType::kF32, {c.splits, c.rows, c.n}) : Handle{};
    t.Run([&](const Twin::Side& v) {
      return ops::Gemv{.out = v(out),
                       .x = v(x),
                       .weight = v(w),
                       .bias = v(bias),
                       .partials = v(partials),
                       .splits = c.splits};
    });
    if (c.splits > 1) {
      t.Run([&](const Twin::Side& v) {
        return ops::SplitKReduce{.out = v(out), .partials = v(partials), .bias = v(bias)};
      });
    }
    const std::string what = "rows " + std::to_string(c.rows) + " n " + std::to_string(c.n) +
                             " k " + std::to_string(c.k) + " splits " + std::to_string(c.splits);
    // Above 64 rows the tensor cores take x rounded to bf16.
    t.ExpectClose(out, c.rows > 64 ? 4e-3 : 2e-6, what);
  }
}

TEST_F(CudaOps, GemvRowBitsDoNotDependOnTheBatch) {
  for (const auto& [n, k] : {std::pair{1024, 3584}, {3584, 1024}, {20000, 896}}) {
    Twin& t = *twin_;
    const Handle w = t.Weight(DType::kBF16, n, k, 0.03f), all = t.Random(DType::kF32, {64, k});
    const Handle out = t.Poisoned(DType::kF32, {64, n}), one = t.Poisoned(DType::kF32, {1, n});
    std::vector<float> batch;
    for (int rows : {64, 9, 8, 5, 2}) {
      const Handle x = t.Cut(all, [&](const TensorView& v) { return v.Slice(0, 64 - rows, rows); });
      const Handle o = t.Cut(out, [&](const TensorView& v) { return v.Slice(0, 64 - rows, rows); });
      t.Run([&](const Twin::Side& v) { return ops::Gemv{.out = v(o), .x = v(x), .weight = v(w)}; });
      const Handle last = t.Cut(all, [&](const TensorView& v) { return v.Slice(0, 63, 1); });
      t.Run([&](const Twin::Side& v) {
        return ops::Gemv{.out = v(one), .x = v(last), .weight = v(w)};
      });
      batch = t.Cuda(out);
      EXPECT_EQ(std::vector<float>(batch.end() - n, batch.end()), t.Cuda(one)) << rows << " rows";
    }
  }
}

TEST_F(CudaOps, EmbeddingLookup) {
  Twin& t = *twin_;
  const Handle table = t.Weight(DType::kBF16, 999, 112, 1.0f), ids = t.Ints({0, 998, 5, 5}, {4});
  const Handle out = t.Poisoned(DType::kF32, {4, 112});
  t.Run([&](const Twin::Side& v) {
    return ops::EmbeddingLookup{.out = v(out), .table = v(table), .token_ids = v(ids)};
  });
  t.ExpectEqual(out, "embedding");
}

TEST_F(CudaOps, Norms) {
  for (int hidden : {1, 96, 896, 1024, 5120}) {
    for (int splits : {1, 3}) {
      Twin& t = *twin_;
      const Handle x = t.Random(DType::kF32, {5, hidden}), w = t.Random(DType::kBF16, {hidden});
      const Handle out = t.Poisoned(DType::kF32, {5, hidden}),
                   sums = t.Poisoned(DType::kF32, {5, splits});
      t.Run([&](const Twin::Side& v) {
        return ops::RmsNorm{.out = v(out),
                            .x = v(x),
                            .weight = v(w),
                            .partial_sums = v(splits > 1 ? sums : Handle{}),
                            .eps = 1e-6f,
                            .weight_offset = 1.0f,
                            .splits = splits};
      });
      t.ExpectClose(out, 1e-6, "rms_norm " + std::to_string(hidden));
    }
    Twin& t = *twin_;
    const Handle a = t.Random(DType::kF32, {3, hidden}), b = t.Random(DType::kF32, {3, hidden});
    const Handle w = t.Random(DType::kF32, {hidden}), out = t.Poisoned(DType::kF32, {3, hidden});
    t.Run([&](const Twin::Side& v) {
      return ops::RmsNormResidualFused{
          .out = v(out), .sum = v(a), .a = v(a), .b = v(b), .weight = v(w), .eps = 1e-5f};
    });
    t.ExpectClose(out, 1e-6, "rms_norm_residual_fused");
    t.ExpectEqual(a, "its sum");
  }
}

TEST_F(CudaOps, HeadNormsGatesAndRope) {
  for (const auto& [heads, kv_heads, dim, half] :
       {std::tuple{8, 2, 256, 32}, {8, 4, 128, 64}, {3, 1, 16, 8}, {14, 2, 64, 32}}) {
    Twin& t = *twin_;
    const int rows = 7;
    const Handle fused = t.Random(DType::kF32, {rows, heads * 2 * dim}),
                 k = t.Random(DType::kF32, {rows, kv_heads, dim});
    const auto split = [&](int begin) {
      return [&, begin](const TensorView& v) {
        return v.SplitLast(heads, 2 * dim).Slice(2, begin, dim);
      };
    };
    const Handle q = t.Cut(fused, split(0)), gate = t.Cut(fused, split(dim));
    const Handle qw = t.Random(DType::kBF16, {dim}), kw = t.Random(DType::kBF16, {dim});
    t.Run([&](const Twin::Side& v) {
      return ops::QkNorm{
          .q = v(q), .k = v(k), .q_weight = v(qw), .k_weight = v(kw), .weight_offset = 1.0f};
    });
    t.ExpectClose(q, 1e-6, "qk_norm q");
    t.ExpectClose(k, 1e-6, "qk_norm k");
    std::vector<int32_t> positions{0, 5, 99, 3, 3, 17, 64};
    const Handle at = t.Ints(positions, {rows}), cos = t.Random(DType::kF32, {100, half}),
                 sin = t.Random(DType::kF32, {100, half});
    t.Run([&](const Twin::Side& v) {
      return ops::RopeEmbed{.q = v(q), .k = v(k), .cos = v(cos), .sin = v(sin), .positions = v(at)};
    });
    t.ExpectClose(fused, 1e-6, "rope_embed q, and the gate untouched");
    t.ExpectClose(k, 1e-6, "rope_embed k");
    const Handle x = t.Random(DType::kF32, {rows, heads, dim});
    t.Run([&](const Twin::Side& v) { return ops::OutputGate{.x = v(x), .gate = v(gate)}; });
    t.ExpectClose(x, 1e-6, "output_gate");
  }
}

TEST_F(CudaOps, Elementwise) {
  for (int cols : {1, 255, 3584}) {
    Twin& t = *twin_;
    const Handle a = t.Random(DType::kF32, {3, cols}, 4.0f), b = t.Random(DType::kF32, {3, cols}),
                 out = t.Poisoned(DType::kF32, {3, cols});
    t.Run(
        [&](const Twin::Side& v) { return ops::SiluMul{.out = v(out), .gate = v(a), .up = v(b)}; });
    t.ExpectClose(out, 1e-6, "silu_mul");
    t.Run([&](const Twin::Side& v) { return ops::ResidualAdd{.out = v(a), .a = v(a), .b = v(b)}; });
    t.ExpectEqual(a, "residual_add");
  }
}

TEST_F(CudaOps, PagedAttention) {
  struct Case {
    int heads, kv_heads, dim;
    std::vector<int> counts, starts;
  };
  const Case cases[] = {{8, 2, 256, {1, 1, 1}, {0, 63, 1023}},
                        {8, 4, 128, {1}, {200}},
                        {6, 2, 16, {1, 1}, {64, 7}},
                        {14, 2, 64, {150}, {0}},
                        {8, 2, 256, {70}, {37}},
                        {4, 1, 32, {5, 1, 33}, {0, 128, 60}},
                        {16, 8, 128, {300}, {64}}};
  for (const Case& c : cases) {
    Twin& t = *twin_;
    const Step s = MakeStep(c.counts, c.starts);
    const Handle k_pages = t.Pages(s.pages, c.kv_heads, c.dim),
                 v_pages = t.Pages(s.pages, c.kv_heads, c.dim);
    const Handle q = t.Random(DType::kF32, {s.rows, c.heads, c.dim}),
                 k = t.Random(DType::kF32, {s.rows, c.kv_heads, c.dim});
    const Handle val = t.Random(DType::kF32, {s.rows, c.kv_heads, c.dim});
    const Handle slots = t.Poisoned(DType::kI32, {s.rows}),
                 lengths = t.Poisoned(DType::kI32, {s.rows});
    t.Run([&](const Twin::Side& v) {
      return ops::CacheMask{.slots = v(slots), .lengths = v(lengths), .sequences = s.On(v)};
    });
    t.ExpectEqual(slots, "cache_mask slots");
    t.ExpectEqual(lengths, "cache_mask lengths");
    EXPECT_EQ(t.Cuda(slots), t.Cpu(s.slots));
    t.Run([&](const Twin::Side& v) {
      return ops::KvCacheUpdate{
          .k = v(k), .v = v(val), .k_pages = v(k_pages), .v_pages = v(v_pages), .slots = v(slots)};
    });
    t.ExpectEqual(k_pages, "kv_cache_update k");
    t.ExpectEqual(v_pages, "kv_cache_update v");
    const float scale = 1.0f / std::sqrt(float(c.dim));
    const Handle fused = t.Poisoned(DType::kF32, {s.rows, c.heads, c.dim});
    t.Run([&](const Twin::Side& v) {
      return ops::Attention{.out = v(fused),
                            .q = v(q),
                            .k_pages = v(k_pages),
                            .v_pages = v(v_pages),
                            .lengths = v(lengths),
                            .sequences = s.On(v),
                            .scale = scale};
    });
    t.ExpectClose(fused, 2e-6, "attention dim " + std::to_string(c.dim));
    if (s.rows != s.sequences) continue;
    const int width = 1100;
    const Handle scores =
        t.Floats(std::vector<float>(s.rows * c.heads * width, 0.0f), {s.rows, c.heads, width});
    const Handle out = t.Poisoned(DType::kF32, {s.rows, c.heads, c.dim});
    t.Run([&](const Twin::Side& v) {
      return ops::QkDot{.scores = v(scores),
                        .q = v(q),
                        .k_pages = v(k_pages),
                        .lengths = v(lengths),
                        .sequences = s.On(v),
                        .scale = scale};
    });
    t.ExpectClose(scores, 2e-6, "qk_dot");
    t.Run([&](const Twin::Side& v) {
      return ops::SoftmaxMask{.scores = v(scores), .lengths = v(lengths)};
    });
    t.ExpectClose(scores, 4e-6, "softmax_mask");
    t.Run([&](const Twin::Side& v) {
      return ops::PvDot{.out = v(out),
                        .probs = v(scores),
                        .v_pages = v(v_pages),
                        .lengths = v(lengths),
                        .sequences = s.On(v)};
    });
    t.ExpectClose(out, 4e-6, "pv_dot");
  }
}

TEST_F(CudaOps, LinearAttention) {
  struct Case {
    int key_heads, value_heads, key_dim, value_dim;
    std::vector<int> counts;
  };
  const Case cases[] = {{16, 16, 128, 128, {1, 1}},
                        {2, 4, 32, 32, {37, 1, 2}},
                        {2, 6, 64, 64, {3}},
                        {16, 16, 128, 128, {130}},
                        {1, 2, 128, 24, {5}}};
  for (const Case& c : cases) {
    Twin& t = *twin_;
    const Step s = MakeStep(c.counts, std::vector<int>(c.counts.size(), 0));
    const int key_width = c.key_heads * c.key_dim, value_width = c.value_heads * c.value_dim,
              channels = 2 * key_width + value_width;
    const Handle x = t.Random(DType::kF32, {s.rows, channels}),
                 w = t.Random(DType::kBF16, {channels, 4}, 0.4f);
    const Handle tail = t.Random(DType::kF32, {s.sequences, 3, channels}),
                 conv = t.Poisoned(DType::kF32, {s.rows, channels});
    t.Run([&](const Twin::Side& v) {
      return ops::CausalConv1d{
          .out = v(conv), .x = v(x), .weight = v(w), .state = v(tail), .sequences = s.On(v)};
    });
    t.ExpectClose(conv, 1e-6, "causal_conv1d");
    t.ExpectEqual(tail, "its state");

    const Handle a = t.Random(DType::kF32, {s.rows, c.value_heads}, 8.0f),
                 b = t.Random(DType::kF32, {s.rows, c.value_heads});
    const Handle a_log = t.Random(DType::kF32, {c.value_heads}),
                 dt = t.Random(DType::kBF16, {c.value_heads});
    const Handle beta = t.Poisoned(DType::kF32, {s.rows, c.value_heads}),
                 decay = t.Poisoned(DType::kF32, {s.rows, c.value_heads});
    t.Run([&](const Twin::Side& v) {
      return ops::DeltaGates{.beta = v(beta),
                             .log_decay = v(decay),
                             .a = v(a),
                             .b = v(b),
                             .a_log = v(a_log),
                             .dt_bias = v(dt)};
    });
    t.ExpectClose(beta, 1e-6, "delta_gates beta");
    t.ExpectClose(decay, 1e-6, "delta_gates log_decay");

    const auto columns = [&](int begin, int heads, int dim) {
      return
          [=](const TensorView& v) { return v.Slice(1, begin, heads * dim).SplitLast(heads, dim); };
    };
    const Handle q = t.Cut(conv, columns(0, c.key_heads, c.key_dim)),
                 k = t.Cut(conv, columns(key_width, c.key_heads, c.key_dim));
    const Handle val = t.Cut(conv, columns(2 * key_width, c.value_heads, c.value_dim));
    const Handle state =
        t.Random(DType::kF32, {s.sequences, c.value_heads, c.key_dim, c.value_dim}, 0.3f);
    const Handle out = t.Poisoned(DType::kF32, {s.rows, c.value_heads, c.value_dim});
    t.Run([&](const Twin::Side& v) {
      return ops::GatedDeltaRule{.out = v(out),
                                 .q = v(q),
                                 .k = v(k),
                                 .v = v(val),
                                 .beta = v(beta),
                                 .log_decay = v(decay),
                                 .state = v(state),
                                 .sequences = s.On(v),
                                 .scale = 1.0f / std::sqrt(float(c.key_dim))};
    });
    t.ExpectClose(out, 1e-5, "gated_delta_rule");
    t.ExpectClose(state, 1e-5, "its state");

    const Handle z = t.Random(DType::kF32, {s.rows, c.value_heads, c.value_dim}),
                 nw = t.Random(DType::kF32, {c.value_dim});
    const Handle normed = t.Poisoned(DType::kF32, {s.rows, c.value_heads, c.value_dim});
    t.Run([&](const Twin::Side& v) {
      return ops::GatedRmsNorm{.out = v(normed), .x = v(out), .z = v(z), .weight = v(nw)};
    });
    t.ExpectClose(normed, 1e-5, "gated_rms_norm");
  }
}

TEST_F(CudaOps, SamplerGreedyBanAndPoison) {
  for (int vocab : {1, 509, 151936, 248320}) {
    Twin& t = *twin_;
    const int rows = 5, limit = vocab > 600 ? vocab - 243 : vocab;
    std::normal_distribution<float> normal;
    std::vector<float> values(static_cast<size_t>(rows) * vocab);
    for (float& v : values) v = normal(t.random());
    std::vector<SamplingRow> params(rows);
    const auto row = [&](int r) { return values.data() + static_cast<size_t>(r) * vocab; };
    row(0)[vocab - 1] = 1e30f;  // beyond the limit where there is one
    row(1)[vocab / 2] = row(1)[vocab / 3] = 50.0f;
    row(2)[vocab / 2] = std::nanf("");
    row(3)[vocab / 4] = 60.0f;
    params[3].num_banned = 1;
    params[3].banned[0] = vocab / 4;
    row(4)[vocab - 1] = INFINITY;
    const Handle logits = t.Floats(values, {rows, vocab});
    const Handle p = t.Bytes(params.data(), {rows, static_cast<int64_t>(sizeof(SamplingRow))}),
                 tokens = t.Poisoned(DType::kI32, {rows});
    t.Run([&](const Twin::Side& v) {
      return ops::TokenSampler{
          .tokens = v(tokens), .logits = v(logits), .rows = v(p), .vocab_limit = limit};
    });
    t.ExpectEqual(tokens, "tokens of " + std::to_string(vocab));
    EXPECT_EQ(t.Cuda(tokens)[1], vocab / 3) << "the lower id of a tie";
    EXPECT_EQ(t.Cuda(tokens)[2], kInvalidToken);
    EXPECT_EQ(t.Cuda(tokens)[4], kInvalidToken);
  }
}

// The frequencies of many draws against the probabilities that temperature, top_k, top_p and min_p
// leave.
TEST_F(CudaOps, SamplerFollowsTheDistribution) {
  const std::vector<float> logits = {2.0f, 1.0f, 0.5f, 0.0f, -1.0f, -2.0f, 1.5f, -INFINITY};
  struct Case {
    int top_k;
    float top_p, min_p;
    std::vector<int> kept;
  };
  for (const Case& c : {Case{0, 1.0f, 0.0f, {0, 1, 2, 3, 4, 5, 6}}, Case{3, 1.0f, 0.0f, {0, 6, 1}},
                        Case{0, 0.6f, 0.0f, {0, 6}}, Case{0, 1.0f, 0.3f, {0, 6, 1}}}) {
    Twin& t = *twin_;
    const int rows = 4096, vocab = static_cast<int>(logits.size());
    std::vector<float> values;
    std::vector<SamplingRow> params(rows);
    for (int r = 0; r < rows; ++r) {
      values.insert(values.end(), logits.begin(), logits.end());
      params[r] = {.temperature = 1.0f,
                   .top_p = c.top_p,
                   .min_p = c.min_p,
                   .top_k = c.top_k,
                   .seed = 42,
                   .position = r};
    }
    const Handle l = t.Floats(values, {rows, vocab}),
                 p = t.Bytes(params.data(), {rows, static_cast<int64_t>(sizeof(SamplingRow))});
    const Handle tokens = t.Poisoned(DType::kI32, {rows});
    const auto make = [&](const Twin::Side& v) {
      return ops::TokenSampler{
          .tokens = v(tokens), .logits = v(l), .rows = v(p), .vocab_limit = vocab};
    };
    t.Run(make);
    const std::vector<float> first = t.Cuda(tokens);
    t.Run(make);
    EXPECT_EQ(first, t.Cuda(tokens)) << "the same seeds and positions";
    double total = 0;
    for (int id : c.kept) total += std::exp(logits[id]);
    std::vector<int> counts(vocab);
    for (float token : first) ++counts[static_cast<int>(token)];
    int kept_draws = 0;
    for (int id : c.kept) {
      const double expected = rows * std::exp(logits[id]) / total;
      EXPECT_NEAR(counts[id], expected, 5 * std::sqrt(expected) + 1)
          << "id " << id << " top_k " << c.top_k;
      kept_draws += counts[id];
    }
    EXPECT_EQ(kept_draws, rows) << "a token that the limits exclude was drawn";
  }
}

}  // namespace
}  // namespace qwend::gpu
