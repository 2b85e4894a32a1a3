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
  for (int i = threadIdx.x; i < B * kCachedPages; i += kStepThreads) {
    const int b = i / kCachedPages, last = a.positions[b];
    const int page = rank * CeilDiv(last + 1, kRanks) / kPageTokens + i % kCachedPages;
    shared.page_rows[b][i % kCachedPages] =
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

  __device__ __forceinline__ void GateUp() {
    block.AwaitStream();
    if (share.units == 0) return;
    const int box_rows = block.a.shape.mlp_box_rows, box_shift = BoxShift(box_rows);
    block.template MultiplyStream<kTilesAtOnce>(
        2 * columns, box_shift, [] {},
        [&](const float* parts, int, int) {
          const int b = threadIdx.x % B;
          const float factor = shared.norm_factor[b];
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
          block.SendOutgoing(shared.slice, block.rank * columns, columns, &shared.slice_ready);
        });
    block.Await(&shared.slice_ready, block.slice_parity, B * share.units * kBoxK * 4);
  }
  __device__ __forceinline__ void Down() {
    if (share.units == 0) return block.PublishNothing();
    block.template MultiplySlice<2>(share.units, [](int, int) { return 1.0f; });
  }
};

// The block's tiles of the vocabulary: logits where a row wants them, and each row's best key.
template <int B>
__device__ __forceinline__ void Head(StepBlock<B>& block) {
  const StepArguments& a = block.a;
  const int first_tile = a.first_head_tile[blockIdx.x];
  const int tiles = a.first_head_tile[blockIdx.x + 1] - first_tile;
  const int b = threadIdx.x % B;
  const SamplingRow& sampling = a.sampling[b];
  const bool wanted = sampling.temperature != 0.0f || sampling.keep_logits != 0;
  SampleKey best = kNoKey;
  block.AwaitStream();
  block.template MultiplyStream<kTilesAtOnce / 2>(
      tiles * kTile, BoxShift(kTile), [] {},
      [&](const float* parts, int first, int count) {
        const float factor = block.shared.norm_factor[b];
#pragma unroll 1
        for (int i = threadIdx.x; i < count * B; i += kStepThreads) {
          const int id = first_tile * kTile + first + i / B;
          if (id >= a.shape.vocab) continue;
          const float logit = block.SumParts(parts, i) * factor;
          if (wanted) a.logits.At(b)[id] = logit;
          best = max(best, KeyOf(logit, id, id < a.shape.vocab_limit && !Banned(sampling, id)));
        }
      });
#pragma unroll
  for (int offset = kWarp / 2; offset >= B; offset /= 2)
    best = max(best, __shfl_xor_sync(kFullMask, best, offset));
  if (block.lane < B) block.shared.keys[b][block.warp] = best;
  block.Sync();
  if (threadIdx.x >= B) return;
#pragma unroll 1
  for (int w = 0; w < kStepWarps; ++w) best = max(best, block.shared.keys[b][w]);
  atomicMax(a.best + b, best);
}

// D: head_dim of the attention layers. DK: the linear layers' head size, 0 for a model without any.
template <int B, int D, int DK>
struct Step {
  const StepArguments& a;
  StepBlock<B>& block;
  AttentionMixer<B, D> attention{block, a.shares[0][block.cluster]};
  LinearMixer<B, DK == 0 ? 64 : DK, DK == 0 ? 64 : DK> linear{block, a.shares[1][block.cluster]};
  int stamps = 0;

  __device__ __forceinline__ void Stamp() {
    if (a.times != nullptr && blockIdx.x == 0 && threadIdx.x == 0)
      a.times[stamps] = NanosecondClock();
    ++stamps;
  }

  template <typename Mixer>
  __device__ __forceinline__ void Mix(Mixer& mixer, const StepLayer& layer) {
    mixer.Project(layer);
    Stamp();
    mixer.Mix(layer);
    Stamp();
    mixer.Output();
    mixer.Finish();
  }
  // Asks for what a layer reads besides weights, states and cache.
  __device__ __forceinline__ void Fetch(const StepLayer& layer) const {
    if (DK != 0 && layer.linear) {
      linear.Fetch(layer);
    } else {
      attention.Fetch(layer);
    }
  }

  __device__ __forceinline__ void Run(const StepLayer* layers) {
    Stamp();
    linear.Locate();
    block.FetchNorm(layers[0].mixer_norm);
    Fetch(layers[0]);
    CommitFetches();
    block.Embed();
    Stamp();
    // Every layer's two halves end with a hop; one loop over halves, so that its code is there
    // once.
#pragma unroll 1
    for (int half = 0; half < 2 * a.shape.layers; ++half) {
      const StepLayer& layer = layers[half / 2];
      if (half % 2 == 0) {
        block.FetchNorm(layer.mlp_norm);
        if (DK != 0 && layer.linear) {
          Mix(linear, layer);
        } else {
          Mix(attention, layer);
        }
      } else {
        const bool last = half == 2 * a.shape.layers - 1;
        block.FetchNorm(last ? a.final_norm : layers[half / 2 + 1].mixer_norm);
        Mlp<B> mlp{block, a.shares[layer.linear ? 1 : 0][block.cluster]};
        mlp.GateUp();
        Stamp();
        mlp.Down();
        if (!last) {
          block.Sync();  // the slice has been read
          Fetch(layers[half / 2 + 1]);
        }
      }
      CommitFetches();
      block.Hop();
      Stamp();
    }
    Head(block);
    Stamp();
    if (blockIdx.x == 0 && threadIdx.x == 0) ++*a.turn;
  }
};

// Where the dynamic shared memory's parts begin, from an address that is a multiple of 1024.
template <int B>
constexpr int kStepRingBytes = kRingSlots<B>* kSlotStride;
template <int B>
constexpr int kStepSharedBytes = (sizeof(StepShared<B>) + 15) / 16 * 16;

constexpr int kStepBlock = kStepThreads + kWarp;

template <int B, int D, int DK>
__global__ void __launch_bounds__(kStepBlock, 1)
    PersistentStepKernel(const __grid_constant__ StepArguments a) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ char raw[];
  char* ring = raw + (1024 - SharedAddress(raw) % 1024) % 1024;
  auto& shared = *reinterpret_cast<StepShared<B>*>(ring + kStepRingBytes<B>);
  auto* layers = reinterpret_cast<StepLayer*>(ring + kStepRingBytes<B> + kStepSharedBytes<B>);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kRingSlots<B>; ++i) {
      InitBarrier(shared.full + i, 1);
      InitBarrier(shared.empty + i, kStepWarps);
    }
    for (uint64_t* b :
         {&shared.stream_ready, &shared.slice_ready, &shared.mixer_ready, &shared.merge_ready,
          &shared.inputs_ready, &shared.gates_full, &shared.gates_empty}) {
      InitBarrier(b, 1);
    }
    FenceBarrierInit();
  }
  __syncthreads();
  if (threadIdx.x >= kStepThreads) {
    ArriveAtCluster();
    Copier<B, D, DK>{a, shared, ring, layers}.Run();
    __syncwarp();
    AwaitCluster();
  } else {
    ArriveAtCluster();
    const int words = a.shape.layers * static_cast<int>(sizeof(StepLayer) / 8);
#pragma unroll 1
    for (int i = threadIdx.x; i < words; i += kStepThreads)
      reinterpret_cast<uint64_t*>(layers)[i] = reinterpret_cast<const uint64_t*>(a.layers)[i];
    TakeInputs<B>(a, shared, static_cast<int>(ClusterRank()));
    NamedBarrier(kConsumerBarrier, kStepThreads);
    if (threadIdx.x == 0) Arrive(&shared.inputs_ready);
    AwaitCluster();
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
cudaLaunchConfig_t Configuration(const StepArguments& a, cudaLaunchAttribute (&attributes)[2],
                                 cudaStream_t stream) {
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {kRanks, 1, 1};
  attributes[1].id = cudaLaunchAttributeCooperative;
  attributes[1].val.cooperative = 1;
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
    cudaLaunchAttribute attributes[2];
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
void LaunchStepOf(const StepArguments& a, cudaStream_t stream) {
  WithKernel<B>(a.shape, [&](auto kernel) {
    cudaLaunchAttribute attributes[2];
    const cudaLaunchConfig_t config = Configuration<B>(a, attributes, stream);
    Check(cudaLaunchKernelEx(&config, kernel, a), "launching the persistent kernel");
  });
}

}  // namespace qwend::cuda
