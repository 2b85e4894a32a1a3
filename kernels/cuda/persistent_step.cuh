// The persistent plan: a decode step as one kernel, for B rows. One warp of each block streams what
// the block reads, in order, through a ring of slots in shared memory and waits for no phase; eight
// warps multiply and mix. Inside a cluster activations go from shared memory to shared memory;
// between clusters, twice a layer, as words of memory that count who has added to them, so that no
// barrier spans the grid.
#pragma once

#include <algorithm>

#include "kernels/cuda/persistent_attention.cuh"
#include "kernels/cuda/persistent_copy.cuh"
#include "kernels/cuda/persistent_linear.cuh"
#include "kernels/cuda/sample_key.cuh"

namespace qwend::cuda {

// What the kernel is told of its rows, where every warp finds it.
template <int B>
__device__ __forceinline__ void TakeInputs(const StepArguments& a, StepShared<B>& shared,
                                           int rank) {
#pragma unroll 1
  for (int i = threadIdx.x; i < B; i += kStepThreads) {
    shared.position[i] = a.positions[i];
    shared.slot[i] = a.state_slot[i];
    shared.part[i] = PartOf(a.positions[i], rank);
  }
  const int half = a.shape.rotary_half;
  const int kv_head = a.shares[0][blockIdx.x / kRanks].first_head / a.shape.group;
#pragma unroll 1
  for (int i = threadIdx.x; i < B * half; i += kStepThreads) {
    const int b = i / half;
    const int64_t angle = static_cast<int64_t>(a.positions[b]) * half + i % half;
    shared.cos[b][i % half] = a.rope_cos[angle];
    shared.sin[b][i % half] = a.rope_sin[angle];
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < B * kCachedPages<B>; i += kStepThreads) {
    const int b = i / kCachedPages<B>, last = a.positions[b];
    const int page = rank * CeilDiv(last + 1, kRanks) / kPageTokens + i % kCachedPages<B>;
    shared.page_rows[b][i % kCachedPages<B>] =
        page * kPageTokens <= last ? PageRow(a, b, kv_head, page) : 0;
  }
}

// The MLP: gate and up box by box in turn, their product to every rank, then down.
template <int B>
struct Mlp {
  StepBlock<B>& block;
  const ClusterShare& share;
  StepShared<B>& shared = block.shared;
  const int columns = share.units * kBoxK / kRanks;  // this rank's

  __device__ __forceinline__ void TakeProducts(const float* parts) const {
    const int b = threadIdx.x % B;
    const float factor = shared.norm_factor[b];
    const int box_rows = block.a.shape.mlp_box_rows, box_shift = BoxShift(box_rows);
#pragma unroll 1
    for (int i = threadIdx.x; i < columns * B; i += kStepThreads) {
      const int column = i / B,
                row = (column >> box_shift) * 2 * box_rows + (column & (box_rows - 1));
      const float gate = block.SumParts(parts, row * B + b) * factor,
                  up = block.SumParts(parts, (row + box_rows) * B + b) * factor;
      const Halves v(__fmul_rn(QuickSilu(gate), up));
      shared.outgoing[2 * b][column] = v.high;
      shared.outgoing[2 * b + 1][column] = v.low;
    }
    block.Sync();
    block.SendOutgoing(shared.slice, block.rank * columns, columns, &shared.ready[kSliceReady]);
  }
  __device__ __forceinline__ void Mix() {
    if (share.units > 0) block.Await(kSliceReady, B * share.units * kBoxK * 4);
  }
};

// The block's tiles of the vocabulary: logits where a row wants them, and each row's best key.
template <int B>
struct Head {
  StepBlock<B>& block;
  const StepArguments& a = block.a;
  SampleKey best = kNoKey;
  int first_tile = 0, tiles = 0;

  __device__ __forceinline__ void Locate() {
    first_tile = a.first_head_tile[blockIdx.x];
    tiles = a.first_head_tile[blockIdx.x + 1] - first_tile;
  }
  __device__ __forceinline__ void TakeProducts(const float* parts, int first, int count) {
    const int b = threadIdx.x % B;
    const SamplingRow& sampling = a.sampling[b];
    const bool wanted = sampling.temperature != 0.0f || sampling.keep_logits != 0;
    const float factor = block.shared.norm_factor[b];
#pragma unroll 1
    for (int i = threadIdx.x; i < count * B; i += kStepThreads) {
      const int id = first_tile * kTile + first + i / B;
      if (id >= a.shape.vocab) continue;
      const float logit = block.SumParts(parts, i) * factor;
      if (wanted) a.logits.At(b)[id] = logit;
      best = max(best, KeyOf(logit, id, id < a.shape.vocab_limit && !Banned(sampling, id)));
    }
  }
  __device__ __forceinline__ void PutBest() {
#pragma unroll
    for (int offset = kWarp / 2; offset >= B; offset /= 2)
      best = max(best, __shfl_xor_sync(kFullMask, best, offset));
    if (block.lane < B) block.shared.keys[block.lane][block.warp] = best;
    block.Sync();
    if (threadIdx.x >= B) return;
#pragma unroll 1
    for (int w = 0; w < kStepWarps; ++w) best = max(best, block.shared.keys[threadIdx.x][w]);
    atomicMax(a.best + threadIdx.x, best);
  }
};

// Every layer's two halves multiply the stream, mix, multiply back and end with a hop; the head is
// one more product of the stream. They share one loop, so that the code of the products is there
// once: what does not fit in the instruction cache is slow.
// D: head_dim of the attention layers. DK: the linear layers' head size, 0 for a model without any.
template <int B, int D, int DK>
struct Step {
  enum class Half { kAttention, kLinear, kMlp, kHead };
  static constexpr int kLinearDim = DK == 0 ? 64 : DK;

  const StepArguments& a;
  StepBlock<B>& block;
  AttentionMixer<B, D> attention{block, a.shares[0][block.cluster]};
  LinearMixer<B, kLinearDim, kLinearDim> linear{block, a.shares[1][block.cluster]};
  Head<B> head{block};
  int stamps = 0;

  __device__ __forceinline__ void Stamp() {
    if (a.times != nullptr && blockIdx.x == 0 && threadIdx.x == 0)
      a.times[stamps] = NanosecondClock();
    ++stamps;
  }

  // Asks for what a layer reads besides weights, states and cache.
  __device__ __forceinline__ void Fetch(const StepLayer& layer) const {
    if (DK != 0 && layer.linear) {
      linear.Fetch(layer);
    } else {
      attention.Fetch(layer);
    }
  }

  // What a half multiplies with the stream: so many rows, in boxes.
  struct Projection {
    int rows, box_shift;
  };
  __device__ __forceinline__ Projection ProjectionOf(Half half, const Mlp<B>& mlp) const {
    if (half == Half::kHead) return {head.tiles * kTile, BoxShift(kTile)};
    if (half == Half::kMlp) return {2 * mlp.columns, BoxShift(a.shape.mlp_box_rows)};
    if (DK != 0 && half == Half::kLinear) return {linear.rows, BoxShift(BoxRows(kLinearDim))};
    return {attention.rows, BoxShift(BoxRows(D))};
  }
  // And with the slice: columns of the output matrix, 64 at once.
  __device__ __forceinline__ int SliceBlocks(Half half, const Mlp<B>& mlp) const {
    if (half == Half::kMlp) return mlp.share.units;
    if (DK != 0 && half == Half::kLinear) return linear.value_heads * kLinearDim / kBoxK;
    return attention.share.heads * D / kBoxK;
  }

  using StreamProduct = typename StepBlock<B>::StreamProduct;
  __device__ __forceinline__ void MultiplyStream(Half half, StreamProduct& product,
                                                 const StepLayer& layer, const Mlp<B>& mlp) {
    if (product.rows == 0) return;
    if (DK != 0 && half == Half::kLinear) linear.MultiplyGates();
    const int at_once = half == Half::kHead ? kTilesAtOnce / 2 : kTilesAtOnce;
    block.MultiplyStream(product, at_once, [&](const float* parts, int first, int count) {
      if (half == Half::kHead) head.TakeProducts(parts, first, count);
    });
    // But for the head all tiles are multiplied at once. (Here, where weights have left the
    // registers.)
    static_assert(2 * kMaxSliceK / kRanks <= kTilesAtOnce * kTile);
    const float* parts = block.shared.parts;
    if (half == Half::kMlp) {
      mlp.TakeProducts(parts);
    } else if (DK != 0 && half == Half::kLinear) {
      linear.TakeProducts(layer, parts, product.rows);
    } else if (half == Half::kAttention) {
      attention.TakeProducts(layer, parts, product.rows);
    }
  }

  __device__ __forceinline__ void MultiplySlice(Half half, int blocks) {
    if (blocks == 0) return block.PublishNothing();
    block.template MultiplySlice<DK == 64 ? 1 : 2>(
        blocks, DK != 0 && half == Half::kLinear, [&](int row, int k_block) {
          return block.shared.linear.head_factor[row][k_block * kBoxK / kLinearDim];
        });
  }

  __device__ __forceinline__ void Run(const StepLayer* layers) {
    Stamp();
    linear.Locate();
    block.FetchNorm(layers[0].mixer_norm);
    Fetch(layers[0]);
    CommitFetches();
    const int halves = 2 * a.shape.layers;
#pragma unroll 1
    for (;;) {
      const int i = block.at_half + 1;
      const StepLayer& layer = layers[min(i / 2, a.shape.layers - 1)];
      const Half half = i == halves               ? Half::kHead
                        : i % 2 != 0              ? Half::kMlp
                        : DK != 0 && layer.linear ? Half::kLinear
                                                  : Half::kAttention;
      Mlp<B> mlp{block, a.shares[layer.linear ? 1 : 0][block.cluster]};
      if (half == Half::kHead) head.Locate();
      const Projection projection = ProjectionOf(half, mlp);
      StreamProduct product;
      block.Hop([&] { block.BeginStream(product, projection.rows, projection.box_shift); });
      Stamp();
      if (half != Half::kHead)
        block.FetchNorm(half != Half::kMlp ? layer.mlp_norm
                        : i == halves - 1  ? a.final_norm
                                           : layers[i / 2 + 1].mixer_norm);
      block.AwaitStream();
      MultiplyStream(half, product, layer, mlp);
      if (half == Half::kHead) break;
      if (half == Half::kMlp) {
        mlp.Mix();
      } else {
        Stamp();
        if (DK != 0 && half == Half::kLinear) {
          linear.Mix(layer);
        } else {
          attention.Mix(layer);
        }
      }
      Stamp();
      MultiplySlice(half, SliceBlocks(half, mlp));
      if (DK != 0 && half == Half::kLinear) linear.GiveBack();
      if (half == Half::kMlp && i < halves - 1) {
        block.Sync();  // the slice has been read
        Fetch(layers[i / 2 + 1]);
      }
      CommitFetches();
    }
    head.PutBest();
    Stamp();
    if (blockIdx.x == 0 && threadIdx.x == 0) ++*a.turn;
  }
};

// Where the dynamic shared memory's parts begin, from an address that is a multiple of 1024.
template <int B>
constexpr int kStepRingBytes = kRingSlots<B>* SlotStride(B);
template <int B>
constexpr int kStepSharedBytes = (sizeof(StepShared<B>) + 15) / 16 * 16;

template <int B, int D, int DK>
__global__ void __launch_bounds__(kStepBlock, 1)
    PersistentStepKernel(const __grid_constant__ StepArguments a) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();  // the sampler may take its place and wait there
  extern __shared__ char raw[];
  char* ring = raw + (1024 - SharedAddress(raw) % 1024) % 1024;
  auto& shared = *reinterpret_cast<StepShared<B>*>(ring + kStepRingBytes<B>);
  auto* layers = reinterpret_cast<StepLayer*>(ring + kStepRingBytes<B> + kStepSharedBytes<B>);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kRingSlots<B>; ++i) {
      InitBarrier(shared.full + i, 1);
      InitBarrier(shared.empty + i, kStepWarps * kArrivers);
    }
    for (uint64_t& signal : shared.ready) InitBarrier(&signal, 1);
    InitBarrier(&shared.gates_full, 1);
    shared.slots_asked = 0;
    InitBarrier(&shared.gates_empty, (kTakeTurns<B> ? 1 : kGroups) * kArrivers);
    for (int& items : shared.states_done) items = 0;
    FenceBarrierInit();
  }
  // Everybody's barriers are there. (Arriving here and waiting later would let the copies begin at
  // once, but racecheck does not come through such a kernel.)
  ArriveAtCluster();
  AwaitCluster();
  if (threadIdx.x >= kStepThreads) {
    Copier<B, D, DK>{a, shared, ring, layers}.Run();
    __syncwarp();
  } else {
    const int words = a.shape.layers * static_cast<int>(sizeof(StepLayer) / 8);
#pragma unroll 1
    for (int i = threadIdx.x; i < words; i += kStepThreads)
      reinterpret_cast<uint64_t*>(layers)[i] = reinterpret_cast<const uint64_t*>(a.layers)[i];
    cudaGridDependencySynchronize();  // for the step's inputs
    TakeInputs<B>(a, shared, static_cast<int>(ClusterRank()));
    ArriveAtBarrier(kInputsBarrier, kStepBlock);
    NamedBarrier(kConsumerBarrier, kStepThreads);
    StepBlock<B> block(a, shared, ring);
    Step<B, D, DK>{a, block}.Run(layers);
    __syncwarp();
  }
  // Nobody leaves while a neighbour may still send.
  ArriveAtCluster();
  AwaitCluster();
#endif
}

template <int B>
int SharedBytes(const StepArguments& a) {
  static_assert(1024 + kStepRingBytes<B> + kStepSharedBytes<B> +
                    kMaxStepLayers * sizeof(StepLayer) <=
                227 << 10);
  return 1024 + kStepRingBytes<B> + kStepSharedBytes<B> +
         a.shape.layers * static_cast<int>(sizeof(StepLayer));
}

template <int B>
cudaLaunchConfig_t Configuration(const StepArguments& a, cudaLaunchAttribute (&attributes)[3],
                                 cudaStream_t stream) {
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {kRanks, 1, 1};
  attributes[1].id = cudaLaunchAttributeCooperative;
  attributes[1].val.cooperative = 1;
  attributes[2].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[2].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(std::max(a.shape.clusters, 1) * kRanks);
  config.blockDim = dim3(kStepBlock);
  config.dynamicSmemBytes = SharedBytes<B>(a);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  return config;
}

// The kernel for the model, to `use(kernel)`.
template <int B, typename Use>
auto WithKernel(const StepShape& shape, Use use) {
  if (shape.head_dim == 256) return use(PersistentStepKernel<B, 256, 128>);
  if (shape.head_dim == 64 && shape.key_dim == 64) return use(PersistentStepKernel<B, 64, 64>);
  if (shape.head_dim == 64) return use(PersistentStepKernel<B, 64, 0>);
  return use(PersistentStepKernel<B, 128, 0>);
}

template <int B>
int CountClustersOf(const StepArguments& a) {
  return WithKernel<B>(a.shape, [&](auto kernel) {
    cudaLaunchAttribute attributes[3];
    cudaLaunchConfig_t config = Configuration<B>(a, attributes, nullptr);
    config.numAttrs = 1;
    int clusters = 0;
    const bool can = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed,
                                          1) == cudaSuccess &&
                     cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          SharedBytes<B>(a)) == cudaSuccess &&
                     cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) == cudaSuccess;
    if (!can) {
      cudaGetLastError();
      return 0;
    }
    return clusters;
  });
}

template <int B>
void LaunchStepOf(const StepArguments& a, cudaStream_t stream, bool overlap) {
  WithKernel<B>(a.shape, [&](auto kernel) {
    cudaLaunchAttribute attributes[3];
    cudaLaunchConfig_t config = Configuration<B>(a, attributes, stream);
    config.numAttrs = overlap ? 3 : 2;
    Check(cudaLaunchKernelEx(&config, kernel, a), "launching the persistent kernel");
  });
}

}  // namespace qwend::cuda
