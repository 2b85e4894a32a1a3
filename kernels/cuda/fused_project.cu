// The fused plan's projections with a norm in front: plain, with SiLU or with argmax behind.
#include "kernels/cuda/bulk_copy.cuh"
#include "kernels/cuda/math.cuh"
#include "kernels/cuda/projection.cuh"
#include "kernels/cuda/sample_key.cuh"

namespace qwend::cuda {
namespace {

constexpr int kMaxTeams = 12;     // and warps
constexpr int kSharingWarps = 8;  // more than these only where each has a tile of its own
constexpr int kMaxSlots = 16;
// Shared memory of a block, so that the kernels before and behind have room beside it.
constexpr int64_t kSharedBudget = 200 << 10;

// What becomes of a sum.
enum class Form {
  kStore,  // out = sum + bias
  kSilu,   // out = silu(sum of segment 0) * sum of segment 1
  kHead,   // its best allowed id; the logit itself where a row wants it
};

// Bytes behind a weight row in shared memory, so that neighbours fall into other banks. The head
// has time enough for the conflicts, and gains more from copying tiles whole.
template <Form F>
constexpr int kRowPad = F == Form::kHead ? 0 : 64;

// Where a tile lies: its segment, and its first row there.
struct TilePlace {
  int segment;
  int row;
};
template <Form F>
__device__ __forceinline__ TilePlace Locate(const ProjectArguments& a, int tile) {
  int i = 0;
  if constexpr (F == Form::kStore) {
    while (i + 1 < a.count && tile >= a.segments[i + 1].first_tile) ++i;
  }
  constexpr int kOutputs = F == Form::kSilu ? kTileRows / 2 : kTileRows;
  return {i, (tile - a.segments[i].first_tile) * kOutputs};
}

// One warp asks for the block's tiles [begin, end), those beyond the slots as their places are
// given back. One warp and not all, since more requests at once only lengthen the queues in which
// the kernel before waits for its activations. SiLU's tiles hold four gate and four up rows.
template <Form F>
__device__ __forceinline__ void CopyTiles(const ProjectArguments& a, char* slots, uint64_t* full,
                                          uint64_t* empty, int begin, int end, int lane,
                                          uint64_t policy) {
  // The head's tiles as a whole, others row by row, for the padding behind each.
  constexpr int kCopies = F == Form::kHead ? 1 : kTileRows, kCopyRows = kTileRows / kCopies;
  const uint32_t row_bytes = a.k * 2, stride = row_bytes + kRowPad<F>;
  for (int i = begin; i < end; ++i) {
    const int tile = blockIdx.x + i * gridDim.x;
    if (tile >= a.tiles) return;
    const int slot = i % a.slots;
    const TilePlace place = Locate<F>(a, tile);
    const bool up = F == Form::kSilu && lane >= kTileRows / 2;
    const Segment& s = a.segments[up ? 1 : place.segment];
    const int row = place.row + (F == Form::kSilu ? lane % (kTileRows / 2) : lane * kCopyRows);
    const int rows = lane < kCopies ? min(kCopyRows, max(s.n - row, 0)) : 0;
    const uint32_t bytes = rows * row_bytes;
    const uint32_t all = __reduce_add_sync(kFullMask, bytes);
    if (lane == 0) {
      if (i >= a.slots) WaitBarrier(empty + slot, (i / a.slots - 1) & 1);
      ArriveExpecting(full + slot, all);
    }
    __syncwarp();
    if (rows > 0) {
      BulkCopy(slots + (static_cast<int64_t>(slot) * kTileRows + lane * kCopyRows) * stride,
               s.weight + static_cast<int64_t>(row) * a.k, bytes, full + slot, policy);
    }
  }
}

// What the form makes of a tile's sums; lane (row lane / 4 of the tile, row lane % 4 of the round).
template <Form F>
__device__ __forceinline__ void Finish(const ProjectArguments& a, const Segment& s, int row,
                                       int token, bool live, float value, int lane) {
  if constexpr (F == Form::kHead) {
    SampleKey key = kNoKey;
    if (live) {
      const SamplingRow& sampling = a.sampling[token];
      if (sampling.temperature != 0.0f || sampling.keep_logits != 0) s.out.At(token)[row] = value;
      key = KeyOf(value, row, row < a.vocab_limit && !Banned(sampling, row));
    }
#pragma unroll
    for (int offset = 4; offset < kWarp; offset *= 2)
      key = max(key, __shfl_xor_sync(kFullMask, key, offset));
    if (live && lane < 4) atomicMax(a.best + token, key);
    return;
  }
  if constexpr (F == Form::kSilu) {
    const float up = __shfl_xor_sync(kFullMask, value, kWarp / 2);
    live = live && lane < kWarp / 2;
    value = Silu(value) * up;
  }
  if (!live) return;
  if (s.bias) value += s.bias[row];
  s.out.At(token)[row] = value;
}

// Block (every gridDim.x-th tile of 8 weight rows; a pass of rows of x). A team of warps shares a
// tile's K; its tiles stream through slots of shared memory that are its own, the first of them
// asked for before the kernel before has ended. Tensor cores multiply a tile with x in bf16 halves,
// two columns a row of x, so that up to four rows cost what one costs. The norm needs no pass of
// its own: its sum of squares scales the sums at the end. Bytes: the weights once a pass. Bound:
// memory bandwidth. Order of one sum: pieces of K in four chains, halves of x, warps: the same for
// any number of rows.
template <Form F>
__global__ void __launch_bounds__(512, 2)
    ProjectKernel(const __grid_constant__ ProjectArguments a) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint4 columns[];  // [K / 32][rows of the pass][high, low][4]
  __shared__ uint64_t full[kMaxSlots], empty[kMaxSlots];
  __shared__ float parts[2][kMaxTeams][kRoundRows][kTileRows];
  __shared__ float squares[kMaxPassRows][kMaxK / kSquareK];

  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp - 1;
  const int team = warp / a.team_warps, member = warp % a.team_warps;
  const int t0 = blockIdx.y * a.pass_rows, rows = min(a.pass_rows, a.rows - t0);
  const int k_blocks = CeilDiv(a.k, kBlockK);
  const int64_t row_stride = a.k * 2 + kRowPad<F>, slot_stride = kTileRows * row_stride;
  char* slots = reinterpret_cast<char*>(columns + k_blocks * a.pass_rows * 8);

  if (warp == warps) {
    const uint64_t policy = EvictFirstPolicy();
    if (lane == 0) {
      for (int slot = 0; slot < a.slots; ++slot) {
        InitBarrier(full + slot, 1);
        InitBarrier(empty + slot, a.team_warps);
      }
      FenceBarrierInit();
    }
    __syncwarp();
    CopyTiles<F>(a, slots, full, empty, 0, a.slots, lane, policy);
    __syncthreads();
    CopyTiles<F>(a, slots, full, empty, a.slots, a.tiles, lane, policy);
    return;
  }
  __syncthreads();
  WaitForPrevious();
  StageX<true>(a, columns, squares, t0, rows, warps);
  NamedBarrier(1, warps * kWarp);
  // Of the rows of the first round, which most steps have no more than.
  const auto inverse_rms = [&](int t) {
    float square = 0.0f;
    for (int i = 0; i < CeilDiv(a.k, kSquareK); ++i) square += squares[t][i];
    return rsqrtf(square / static_cast<float>(a.k) + a.norm_eps);
  };
  const float first_scale = lane % 4 < rows ? inverse_rms(lane % 4) : 0.0f;

  const int quad = lane % 4, group = lane / 4;
  const int share = CeilDiv(k_blocks, a.team_warps);
  const int first_block = member * share, end_block = min(first_block + share, k_blocks);
  int turn = 0;
  for (int i = team; blockIdx.x + i * gridDim.x < a.tiles; i += a.teams) {
    const int slot = i % a.slots;
    const TilePlace place = Locate<F>(a, blockIdx.x + i * gridDim.x);
    const Segment& s = a.segments[place.segment];
    const char* weights = slots + slot * slot_stride + group * row_stride + quad * 16;
    WaitBarrier(full + slot, (i / a.slots) & 1);
    for (int round = 0; round < rows; round += kRoundRows, turn ^= 1) {
      const int column_row = round + group / 2;
      const uint4* x = columns + column_row * 8 + (group % 2) * 4 + quad;
      const bool has_x = column_row < rows;
      float sums[4][4] = {};
      const auto multiply = [&](int block, float(&even)[4], float(&odd)[4]) {
        // Beyond K a row holds its padding, and x zeros.
        const uint4 w = block * kBlockK + quad * 8 < a.k
                            ? *reinterpret_cast<const uint4*>(weights + block * 64)
                            : make_uint4(0, 0, 0, 0);
        const uint4 c = has_x ? x[block * rows * 8] : make_uint4(0, 0, 0, 0);
        MultiplyBlock(even, odd, w, c);
      };
      int block = first_block;
#pragma unroll 4
      for (; block + 1 < end_block; block += 2) {
        multiply(block, sums[0], sums[1]);
        multiply(block + 1, sums[2], sums[3]);
      }
      if (block < end_block) multiply(block, sums[0], sums[1]);
      const float high = (sums[0][0] + sums[1][0]) + (sums[2][0] + sums[3][0]);
      const float low = (sums[0][1] + sums[1][1]) + (sums[2][1] + sums[3][1]);
      float value = high + low;
      if (a.team_warps > 1) {
        parts[turn][warp][quad][group] = value;
        NamedBarrier(2 + team, a.team_warps * kWarp);
      }
      if (round + kRoundRows >= rows) {
        __syncwarp();
        if (lane == 0) Arrive(empty + slot);
      }
      if (member != 0) continue;
      if (a.team_warps > 1) {
        value = 0.0f;
        for (int w = 0; w < a.team_warps; ++w) value += parts[turn][warp + w][quad][group];
      }
      const int t = round + quad;
      value *= round == 0 ? first_scale : t < rows ? inverse_rms(t) : 0.0f;
      const int outputs = F == Form::kSilu ? kTileRows / 2 : kTileRows;
      const int row = place.row + group % outputs;
      Finish<F>(a, s, row, t0 + t, t < rows && row < s.n, value, lane);
    }
  }
#endif
}

// How a block's warps and shared memory are dealt out. Warps by the weights' shape alone, since the
// order of sums follows from them; slots by what the rows of x leave.
template <Form F>
void LaunchProject(ProjectArguments a, const LaunchContext& ctx) {
  constexpr int kOutputs = F == Form::kSilu ? kTileRows / 2 : kTileRows;
  static const bool shares = ShareProcessor(ProjectKernel<F>, kSharedLimit);
  static_cast<void>(shares);
  for (int i = 0; i < (F == Form::kSilu ? 1 : a.count); ++i) {
    a.segments[i].first_tile = a.tiles;
    a.tiles += CeilDiv(a.segments[i].n, kOutputs);
  }
  const int blocks = std::min(a.tiles, ctx.sm_count), tiles_each = CeilDiv(a.tiles, blocks);
  const int64_t slot_bytes = int64_t{kTileRows} * (a.k * 2 + kRowPad<F>);
  const auto slots_beside = [&](int64_t x_bytes) {
    const int64_t fit = std::max((kSharedBudget - x_bytes) / slot_bytes, int64_t{1});
    return static_cast<int>(std::min<int64_t>({fit, tiles_each, kMaxSlots}));
  };
  const int teams = std::min(slots_beside(RowBytes(a)), kMaxTeams);
  a.team_warps = std::max(1, std::min(CeilDiv(a.k, kBlockK * 8), kSharingWarps / teams));
  a.pass_rows = PassRows(a, slot_bytes);
  a.slots = slots_beside(a.pass_rows * RowBytes(a));
  a.teams = std::min(teams, a.slots);
  // A slot that is used again stays with its team.
  if (a.slots < tiles_each) a.slots = a.slots / a.teams * a.teams;
  Launch(ctx, ProjectKernel<F>, dim3(blocks, CeilDiv(a.rows, a.pass_rows)),
         dim3((a.teams * a.team_warps + 1) * kWarp),
         a.pass_rows * RowBytes(a) + a.slots * slot_bytes, a);
}

bool Fits(const ops::RmsNorm& n) {
  return n.x.dtype == DType::kF32 && n.weight.dtype == DType::kF32 && Aligned(n.x) &&
         reinterpret_cast<uintptr_t>(n.weight.data) % 16 == 0;
}

ProjectArguments NormArguments(const ops::RmsNorm& norm) {
  ProjectArguments a = MakeArguments(norm.x);
  a.norm_weight = norm.weight.As<const float>();
  a.norm_offset = norm.weight_offset;
  a.norm_eps = norm.eps;
  return a;
}

}  // namespace

void Run(const ops::NormProjections& op, const LaunchContext& ctx) {
  bool fits = Fits(op.norm);
  ProjectArguments a = NormArguments(op.norm);
  for (a.count = 0; a.count < op.count; ++a.count) {
    fits = fits && Fits(op.projections[a.count], ctx);
    a.segments[a.count] = MakeSegment(op.projections[a.count], op.projections[a.count].out);
  }
  if (!fits) return RunParts(op, ctx);
  LaunchProject<Form::kStore>(a, ctx);
}

void Run(const ops::NormGateUpSilu& op, const LaunchContext& ctx) {
  if (!Fits(op.norm) || !Fits(op.gate, ctx) || !Fits(op.up, ctx) || op.gate.bias || op.up.bias)
    return RunParts(op, ctx);
  ProjectArguments a = NormArguments(op.norm);
  a.segments[0] = MakeSegment(op.gate, op.act.out);
  a.segments[1] = MakeSegment(op.up, op.act.out);
  a.count = 2;
  LaunchProject<Form::kSilu>(a, ctx);
}

void Run(const ops::NormHead& op, const LaunchContext& ctx) {
  ProjectArguments a = NormArguments(op.norm);
  a.segments[0] = MakeSegment(op.head, op.head.out);
  a.count = 1;
  a.sampling = op.rows.As<const SamplingRow>();
  a.best = op.best.As<unsigned long long>();
  a.vocab_limit = op.vocab_limit;
  if (Fits(op.norm) && Fits(op.head, ctx) && !op.head.bias)
    return LaunchProject<Form::kHead>(a, ctx);
  RunParts(op, ctx);
  LaunchBestOfLogits(op, ctx);
}

}  // namespace qwend::cuda
