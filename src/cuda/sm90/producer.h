// The producer warpgroup: fills the operand pipeline. All 128 threads gather the left operand by cp.async, or one thread loads
// it by TMA; the right operand always comes by TMA, issued first because its latency is the longer one.
//
// A stage is full when the TMA bytes have landed and, with a gather, when every producer thread's copies have (1 + 128
// arrivals). Shared-memory tiles are 128-byte swizzled: K-major byte(row, k) = row * 128 + ((k / 8 ^ row % 8) * 16) + k % 8 *
// 2; MN-major: a panel of 64 columns is 64 k rows of 128 bytes, byte(k, column) the same with k for row.
#pragma once

#include "cuda/sm90/addresses.h"
#include "cuda/sm90/arguments.h"
#include "cuda/sm90/ptx.h"
#include "cuda/sm90/traits.h"

namespace intarsia::cuda::sm90 {

/// A position in the operand pipeline.
template <int kStages>
struct PipelineState {
  std::uint32_t stage = 0, phase = 0;
  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
  __device__ void advance(int steps) {
    stage += steps;
    phase ^= (stage / kStages) & 1;
    stage %= kStages;
  }
};

/// Shared-memory addresses of one CTA.
struct SharedAddresses {
  std::uint32_t left, right, staging, full, empty, extra;
};

template <class Op>
__device__ int k_blocks(const GemmArguments<typename Op::Element>& a, const Tile& tile) {
  if constexpr (Op::kWeightGradient) return (tile.rows + kTileK - 1) / kTileK;
  return Op::kPartsOfK * ((a.k_size + kTileK - 1) / kTileK);
}

template <class Op>
class Producer {
 public:
  __device__ Producer(const GemmArguments<typename Op::Element>& arguments, const SharedAddresses shared, int thread, int rank)
      : a_(arguments), s_(shared), thread_(thread), warp_(thread / 32), rank_(rank), elected_(ptx::elect_one()) {}

  __device__ void run(Scheduler<Op::kTileM, Op::kCluster, Op::kWeightGradient> scheduler) {
    if constexpr (Op::kLeft == Left::gathered_rows) gather_rows(scheduler);
    if constexpr (Op::kLeft == Left::gathered_along_k) gather_along_k(scheduler);
    if constexpr (Op::kLeft == Left::rows) {
      if (warp_ != 0) return;
      load_rows(scheduler);
    }
    for (int i = 0; i < Op::kStages; ++i) {  // never leave with copies or a peer's arrivals outstanding
      ptx::barrier_wait(s_.empty + state_.stage * 8, state_.phase ^ 1);
      state_.advance();
    }
  }

 private:
  __device__ std::uint32_t full() const { return s_.full + state_.stage * 8; }
  __device__ void wait_empty() const { ptx::barrier_wait(s_.empty + state_.stage * 8, state_.phase ^ 1); }

  // ---- the right operand

  /// One box, to this CTA or to both of the pair.
  template <class... Coordinates>
  __device__ void load(const Tile& tile, std::uint32_t target, const CUtensorMap& map, Coordinates... c) const {
    if (Op::kCluster > 1 && tile.multicast) ptx::load_box_multicast(target, map, full(), (1 << Op::kCluster) - 1, c...);
    else ptx::load_box(target, map, full(), c...);
  }

  /// The k of block kb within its part of k, and the part.
  __device__ int k_of(int kb, int& part) const {
    part = 0;
    if constexpr (Op::kPartsOfK > 1) {
      const int blocks_of_part = (a_.k_size + kTileK - 1) / kTileK;
      part = (kb >= blocks_of_part ? 1 : 0) + (Op::kPartsOfK > 2 && kb >= 2 * blocks_of_part ? 1 : 0);
      kb -= part * blocks_of_part;
    }
    return kb * kTileK;
  }

  __device__ void load_rows_of(const Tile& tile, std::uint32_t target, const CUtensorMap& map, int inner, int row) const {
    if constexpr (Op::kBlocked) load(tile, target, map, inner, row % a_.right_block, row / a_.right_block, tile.expert);
    else load(tile, target, map, inner, row, 0, tile.expert);
  }

  /// Half of the tile's rows (K-major), or half of its k when a pair of CTAs shares it (MN-major).
  __device__ void load_right_part(const Tile& tile, int kb, int part) const {
    const std::uint32_t target = s_.right + state_.stage * Op::kRightBytes;
    int k_half;
    const int k = k_of(kb, k_half);
    if constexpr (!Op::kRightMnMajor) {
      constexpr int kRows = Op::kTileN / 2;
      constexpr bool kStacked = Op::kHalves == Halves::stacked;
      const int row = kStacked ? tile.n * kRows : tile.n * Op::kTileN + part * kRows;
      load_rows_of(tile, target + part * kRows * 128, a_.right[kStacked ? part : k_half], k, row);
    } else {
      constexpr int kPanels = Op::kTileN / 64, kRows = kTileK / Op::kCluster;
#pragma unroll 1
      for (int p = 0; p < kPanels; ++p) {
        int half = k_half, panel = tile.n * kPanels + p;
        if constexpr (Op::kHalves == Halves::stacked) {
          half = p >= kPanels / 2 ? 1 : 0;
          panel = tile.n * (kPanels / 2) + p % (kPanels / 2);
        }
        if constexpr (Op::kHalves == Halves::along_n) {
          const int panels_of_half = (a_.n_size + 63) / 64;
          half = panel >= panels_of_half && panel < 2 * panels_of_half ? 1 : 0;
          panel -= half * panels_of_half;  // past the last one the box lies outside the tensor: zeros
        }
        const std::uint32_t place = target + p * kPanelBytes + part * kRows * 128;
        if constexpr (Op::kRight == Right::ragged_panels) {
          const RaggedRow first(tile.first_row, tile.rows, k + part * kRows);
          load(tile, place, a_.right[half], panel * 64, first.row, first.fold, first.last);
        } else load_rows_of(tile, place, a_.right[half], panel * 64, k + part * kRows);
      }
    }
  }

  __device__ void load_right(const Tile& tile, int kb) const {
    constexpr int kParts = !Op::kRightMnMajor || Op::kCluster > 1 ? 2 : 1;
    const bool shared = Op::kCluster > 1 && tile.multicast;
#pragma unroll 1  // one thread runs this, and registers are what the producer is short of
    for (int part = shared ? rank_ : 0; part < (shared ? rank_ + 1 : kParts); ++part) load_right_part(tile, kb, part);
  }

  // ---- the left operand. A copy takes few instructions and no shuffle: more of them slow the tensor cores down by a tenth.

  /// A thread copies its chunk of kRows rows.
  __device__ void gather_rows(Scheduler<Op::kTileM, Op::kCluster, Op::kWeightGradient>& scheduler) {
    constexpr int kStep = GatheringThread::kStep, kRows = Op::kTileM / kStep;
    const GatheringThread mine(thread_);
    const std::uint32_t place = mine.place();
    const auto* base = reinterpret_cast<const uint4*>(a_.gathered.data) + mine.chunk;
    Tile tile, following;
    int tokens[kRows];
    const auto load_tokens = [&](const Tile& t) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int row = t.m * Op::kTileM + mine.first + i * kStep;
        tokens[i] = row < t.rows && t.n < a_.schedule.n_tiles ? a_.gathered.listed(t.first_row + row) : -1;
      }
    };
    bool more = scheduler.next(following);
    if (more) load_tokens(following);
    const int blocks = (a_.k_size + kTileK - 1) / kTileK;
    const auto step = in_chunks(a_.gathered.row_step);
    while (more) {
      tile = following;
      std::uint32_t source[kRows];  // of a row in units of 16 bytes: half the registers of a pointer
      std::uint32_t missing = 0;    // rows without a token: zeros, so that nothing of theirs is read
#pragma unroll
      for (int i = 0; i < kRows; ++i) {  // looked at here, a tile after they were asked for
        const int token = a_.gathered.existing(tokens[i]);
        source[i] = static_cast<std::uint32_t>(token < 0 ? 0 : token) * step;
        if (token < 0) missing |= 1u << i;
      }
      more = scheduler.next(following);
      if (more) load_tokens(following);  // a tile ahead: two dependent loads hide behind this tile's k loop
      for (int kb = 0; kb < blocks; ++kb) {
        wait_empty();
        if (elected_ && warp_ == kb % 4) {  // the warps take turns: none is held up at every stage
          ptx::barrier_expect(full(), Op::kRightBytes);
          load_right(tile, kb);
        }
        const std::uint32_t target = s_.left + state_.stage * Op::kLeftBytes + place;
        const uint4* from = base + kb * (kTileK / 8);
        const bool outside = kb * kTileK + mine.chunk * 8 >= a_.k_size;
        if (missing == 0 && !outside) {
#pragma unroll
          for (int i = 0; i < kRows; ++i) ptx::copy16(target + i * (kStep * 128), from + source[i]);
        } else {
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            const bool zero = outside || (missing >> i & 1);
            ptx::copy16_or_zero(target + i * (kStep * 128),
                                zero ? reinterpret_cast<const uint4*>(a_.gathered.data) : from + source[i], zero ? 0 : 16);
          }
        }
        ptx::copies_arrive(full());
        state_.advance();
      }
    }
  }

  /// A thread copies its chunk of kTokens k in every panel.
  __device__ void gather_along_k(Scheduler<Op::kTileM, Op::kCluster, Op::kWeightGradient>& scheduler) {
    constexpr int kStep = GatheringThread::kStep, kTokens = kTileK / kStep, kPanels = Op::kTileM / 64;
    const GatheringThread mine(thread_);
    const std::uint32_t place = mine.place();
    const auto step = in_chunks(a_.gathered.row_step);
    int next[kTokens];
    const auto load_tokens = [&](const Tile& t, int kb) {
#pragma unroll
      for (int i = 0; i < kTokens; ++i) {
        const int k = kb * kTileK + mine.first + i * kStep;
        next[i] = k < t.rows ? a_.gathered.listed(t.first_row + k) : -1;
      }
    };
    Tile tile, following;
    bool more = scheduler.next(following);
    if (more) load_tokens(following, 0);
    while (more) {
      tile = following;
      more = scheduler.next(following);
      const int column = tile.m * Op::kTileM + mine.chunk * 8;
      const auto* base = reinterpret_cast<const uint4*>(a_.gathered.data) + column / 8;
      const bool whole = (tile.m + 1) * Op::kTileM <= a_.hidden;
      const int blocks = k_blocks<Op>(a_, tile);
      if (blocks == 0 && more) load_tokens(following, 0);
      for (int kb = 0; kb < blocks; ++kb) {
        // Looked at here, a block after they were asked for: a look at the load would wait for it there, at every block.
        const uint4* source[kTokens];
        std::uint32_t missing = 0;
#pragma unroll
        for (int i = 0; i < kTokens; ++i) {
          const int token = a_.gathered.existing(next[i]);
          source[i] = base + static_cast<std::uint32_t>(token < 0 ? 0 : token) * step;  // in units of 16 bytes
          if (token < 0) missing |= 1u << i;
        }
        if (kb + 1 < blocks) load_tokens(tile, kb + 1);
        else if (more) load_tokens(following, 0);
        wait_empty();
        if (elected_ && warp_ == kb % 4) {  // the warps take turns: none is held up at every stage
          ptx::barrier_expect(full(), Op::kRightBytes);
          load_right(tile, kb);
        }
        const std::uint32_t target = s_.left + state_.stage * Op::kLeftBytes + place;
        if (whole && missing == 0) {
#pragma unroll
          for (int i = 0; i < kTokens; ++i)
#pragma unroll
            for (int panel = 0; panel < kPanels; ++panel)
              ptx::copy16(target + i * (kStep * 128) + panel * kPanelBytes, source[i] + panel * 8);
        } else {
#pragma unroll
          for (int i = 0; i < kTokens; ++i)
#pragma unroll
            for (int panel = 0; panel < kPanels; ++panel) {
              const bool zero = (missing >> i & 1) || column + panel * 64 >= a_.hidden;
              ptx::copy16_or_zero(target + i * (kStep * 128) + panel * kPanelBytes,
                                  zero ? reinterpret_cast<const uint4*>(a_.gathered.data) : source[i] + panel * 8,
                                  zero ? 0 : 16);
            }
        }
        ptx::copies_arrive(full());
        state_.advance();
      }
    }
  }

  __device__ void load_rows(Scheduler<Op::kTileM, Op::kCluster, Op::kWeightGradient>& scheduler) {
    Tile tile;
    while (scheduler.next(tile)) {
      const RaggedRow first(tile.first_row, tile.rows, tile.m * Op::kTileM);
      const int blocks = k_blocks<Op>(a_, tile);
      for (int kb = 0; kb < blocks; ++kb) {
        wait_empty();
        if (elected_) {
          int half;
          const int k = k_of(kb, half);
          ptx::barrier_expect(full(), Op::kStageBytes);
          ptx::load_box(s_.left + state_.stage * Op::kLeftBytes, a_.left[half], full(), k, first.row, first.fold, first.last);
          load_right(tile, kb);
        }
        state_.advance();
      }
    }
  }

  const GemmArguments<typename Op::Element>& a_;
  const SharedAddresses s_;
  const int thread_, warp_, rank_;
  const bool elected_;  // one lane of each warp
  PipelineState<Op::kStages> state_;
};

}  // namespace intarsia::cuda::sm90
