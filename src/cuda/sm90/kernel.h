// The GEMM kernel of sm_90a: a persistent CTA of two consumer warpgroups and one of producers, for all six operations.
//   D[m, n] = sum_k left[m, k] right[n, k], fp32 in registers; operands pass through a ring of kStages stages of 64 k.
// Cooperative: both consumers work on one tile, half of its rows each. Ping-pong: they take tiles in turn, so that one's
// epilogue hides behind the other's main loop. See docs/kernels.md.
#pragma once

#include "cuda/sm90/producer.h"
#include "cuda/sm90/staging.h"
#include "cuda/sm90/wgmma.h"

namespace intarsia::cuda::sm90 {

template <class Op>
class Consumer {
 public:
  __device__ Consumer(const SharedAddresses shared, ConsumerThread me) : s_(shared), me_(me) {}

  /// acc = the tile's product over `blocks` k blocks; `left_offset` picks this warpgroup's rows of the left tile. What the
  /// epilogue still has of the tile before, it writes while products run.
  template <class Epilogue>
  __device__ void multiply(typename Op::Accumulators& acc, int blocks, std::uint32_t left_offset, Epilogue& epilogue,
                           const Tile& tile, int row0) {
    const std::uint64_t left = tile_descriptor(s_.left + left_offset, Op::kLeftMnMajor ? kPanelBytes : 0);
    const std::uint64_t right = tile_descriptor(s_.right, Op::kRightMnMajor ? kPanelBytes : 0);
    for (int kb = 0; kb < blocks; ++kb) {
      start(acc, left, right, kb > 0);
      if (kb == 0) continue;
      if (epilogue.pending()) epilogue.between();
      finish_before_last();
    }
    epilogue.products_issued(tile, row0);
    ptx::wgmma_wait<0>();
    pin(acc);
    if (blocks > 0) release(last_);
    if (Op::kWeightGradient && blocks == 0) clear(acc);
  }

  /// A warpgroup without valid rows lets the stages pass.
  __device__ void drain(int blocks) {
    for (int kb = 0; kb < blocks; ++kb) {
      ptx::barrier_wait(s_.full + state_.stage * 8, state_.phase);
      __syncwarp();
      release(state_.stage);
      state_.advance();
    }
  }

  /// The other warpgroup takes these stages (ping-pong).
  __device__ void skip(int blocks) { state_.advance(blocks); }

 private:
  /// Starts the products of the next stage, which are added to acc, or replace it.
  __device__ void start(typename Op::Accumulators& acc, std::uint64_t left0, std::uint64_t right0, bool add) {
    ptx::barrier_wait(s_.full + state_.stage * 8, state_.phase);
    pin(acc);
    ptx::wgmma_fence();
    const std::uint64_t left = left0 + state_.stage * (Op::kLeftBytes / 16),
                        right = right0 + state_.stage * (Op::kRightBytes / 16);
#pragma unroll
    for (int k = 0; k < kTileK / 16; ++k)
#pragma unroll
      for (int m = 0; m < Op::kBlocksM; ++m)
        wgmma<typename Op::Element, Op::kTileN, Op::kLeftMnMajor, Op::kRightMnMajor>(
            acc[m], left + k * kDescriptorStep<Op::kLeftMnMajor> + m * (kPanelBytes / 16),
            right + k * kDescriptorStep<Op::kRightMnMajor>, add || k > 0);
    ptx::wgmma_commit();
    pin(acc);
    before_last_ = last_;
    last_ = state_.stage;
    state_.advance();
  }
  /// Waits for the products before those that were started last: their stage is free.
  __device__ void finish_before_last() const {
    ptx::wgmma_wait<1>();
    release(before_last_);
  }
  /// Keeps the compiler from moving accumulators across the asynchronous products.
  __device__ static void pin(typename Op::Accumulators& acc) {
#pragma unroll
    for (int m = 0; m < Op::kBlocksM; ++m)
#pragma unroll
      for (int i = 0; i < Op::kTileN / 2; ++i) asm volatile("" : "+f"(acc[m][i])::"memory");
  }
  __device__ static void clear(typename Op::Accumulators& acc) {
#pragma unroll
    for (int m = 0; m < Op::kBlocksM; ++m)
#pragma unroll
      for (int i = 0; i < Op::kTileN / 2; ++i) acc[m][i] = 0.0f;
  }
  __device__ void release(std::uint32_t stage) const {
    if constexpr (Op::kCluster == 1) {
      if (me_.lane == 0) ptx::barrier_arrive(s_.empty + stage * 8);
    } else {  // both CTAs of the pair may fill this stage of both
      if (me_.lane < Op::kCluster) ptx::barrier_arrive_remote(s_.empty + stage * 8, me_.lane);
    }
  }

  const SharedAddresses s_;
  const ConsumerThread me_;
  PipelineState<Op::kStages> state_;
  std::uint32_t last_ = 0, before_last_ = 0;  // stages whose products may be running
};

/// Bytes of dynamic shared memory: slack to align the tiles, the pipeline, the consumers' staging, the barriers.
template <class Op, class Epilogue>
constexpr int shared_bytes() {
  return 1024 + Op::kStages * Op::kStageBytes + Epilogue::kStagingBytes + 16 * Op::kStages + 8 * Epilogue::kBarriers;
}

/// The consumers' part. An Epilogue, one for each thread, knows of every tile of the CTA in order; the base classes in
/// staging.h do nothing:
///   start(first)                  before all tiles
///   begin(tile, row0)             before the main loop of a tile of this warpgroup, whose rows begin at row0
///   pending(), between()          work left over from the tile before, done in steps while the main loop's products run
///   products_issued(tile, row0)   while the last products run
///   run(tile, row0, acc, next, more)   the tile's sums are there; `next` is the CTA's next tile, if there is one more
///   pass(tile, next, more)        instead of begin and run, for a tile of which this warpgroup has no rows
///   skip()                        a tile of the other warpgroup (ping-pong)
///   finish()                      after all tiles
template <class Op, class Epilogue>
__device__ void consume(const GemmArguments<typename Op::Element>& a, const SharedAddresses shared, const ConsumerThread me,
                        Scheduler<Op::kTileM, Op::kCluster, Op::kWeightGradient> scheduler) {
  constexpr int kBarrierOfTurn = 2;
  Consumer<Op> consumer(shared, me);
  Epilogue epilogue(a, shared.staging, shared.extra, me);
  typename Op::Accumulators acc;
  const auto live = [&](const Tile& tile, int row0) {
    return Op::kWeightGradient || (row0 < tile.rows && tile.n < a.schedule.n_tiles);
  };

  if (Op::kPingPong && me.warpgroup == 0) ptx::named_arrive(kBarrierOfTurn, 256);
  int turn = 0;
  Tile tile, following;
  bool more = scheduler.next(following);
  if (more) epilogue.start(following);
  while (more) {
    tile = following;
    more = scheduler.next(following);  // a tile ahead: its two loads hide behind this main loop
    const int blocks = k_blocks<Op>(a, tile);
    if constexpr (!Op::kPingPong) {
      const int row0 = tile.m * Op::kTileM + me.warpgroup * 64 * Op::kBlocksM;
      if (live(tile, row0)) {
        epilogue.begin(tile, row0);
        consumer.multiply(acc, blocks, me.warpgroup * kPanelBytes * Op::kBlocksM, epilogue, tile, row0);
        epilogue.run(tile, row0, acc, following, more);
      } else {
        consumer.drain(blocks);
        epilogue.pass(tile, following, more);
      }
    } else {
      if (turn == me.warpgroup) {
        const int row0 = tile.m * Op::kTileM;
        const bool working = live(tile, row0);
        if (working) epilogue.begin(tile, row0);
        ptx::named_sync(kBarrierOfTurn + me.warpgroup, 256);
        if (working) consumer.multiply(acc, blocks, 0, epilogue, tile, row0);
        else consumer.drain(blocks);
        ptx::named_arrive(kBarrierOfTurn + (me.warpgroup ^ 1), 256);
        if (working) epilogue.run(tile, row0, acc, following, more);
        else epilogue.pass(tile, following, more);
      } else {
        consumer.skip(blocks);
        epilogue.skip();
      }
      turn ^= 1;
    }
  }
  epilogue.finish();
  if (me.leads()) ptx::wait_stores();
}

template <class Op, class Epilogue>
__global__ void __launch_bounds__(kThreads, 1) gemm_kernel(const __grid_constant__ GemmArguments<typename Op::Element> a) {
  extern __shared__ __align__(1024) std::uint8_t dynamic_shared[];
  SharedAddresses shared;
  shared.left = (ptx::shared_address(dynamic_shared) + 1023) & ~1023u;
  shared.right = shared.left + Op::kStages * Op::kLeftBytes;
  shared.staging = shared.right + Op::kStages * Op::kRightBytes;
  shared.full = shared.staging + Epilogue::kStagingBytes;
  shared.empty = shared.full + 8 * Op::kStages;
  shared.extra = shared.empty + 8 * Op::kStages;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int rank = Op::kCluster == 1 ? 0 : static_cast<int>(ptx::cluster_rank());

  ptx::let_successor_start();
  if (warp == 0 && ptx::elect_one()) {
    ptx::prefetch_map(a.right[0]);
    ptx::prefetch_map(a.store[0]);
    for (int i = 0; i < Op::kStages; ++i) {
      ptx::barrier_init(shared.full + 8 * i, Op::kGathered ? 1 + 128 : 1);
      ptx::barrier_init(shared.empty + 8 * i, (Op::kPingPong ? 4 : 4 * kConsumers) * Op::kCluster);
    }
    for (int i = 0; i < Epilogue::kBarriers; ++i) ptx::barrier_init(shared.extra + 8 * i, 1);
    ptx::fence_barrier_init();
  }
  __syncthreads();
  ptx::wait_for_predecessor();
  if constexpr (Op::kCluster > 1) ptx::cluster_sync();

  const Scheduler<Op::kTileM, Op::kCluster, Op::kWeightGradient> scheduler(a.schedule);
  if (warp >= 4 * kConsumers) {
    ptx::shrink_registers<Op::kProducerRegisters>();
    Producer<Op>(a, shared, threadIdx.x - 128 * kConsumers, rank).run(scheduler);
  } else {
    ptx::grow_registers<Op::kConsumerRegisters>();
    consume<Op, Epilogue>(a, shared, ConsumerThread{warp / 4, warp % 4, lane}, scheduler);
  }
  if constexpr (Op::kCluster > 1) {  // a peer may still arrive on this CTA's barriers
    __syncwarp();
    ptx::cluster_sync();
  }
}

}  // namespace intarsia::cuda::sm90
