// The one kernel of the six operations: for each expert, C (m, n) = left (m, k) right (k, n) with mma.sync m16n8k16, fp32 sums.
// 256 threads, a tile of 128 x 128 in steps of 32 k, four stages of cp.async, two CTAs an SM; a warp makes 64 x 32 of the tile.
// Tiles are handed out by TileWalk. A tile's sum runs over k in one fixed order, so a result never depends on the machine.
#pragma once

#include "cuda/epilogue.h"
#include "cuda/sm80/operands.h"

namespace intarsia::cuda::sm80 {

/// A tile of one expert's product, and the extents of that product.
struct Tile {
  int m, n;  ///< tile indices
  int rows, columns, k;
};

/// What one launch is told. Row operations: m is the expert's rows. Weight gradients: k is.
template <class T_, class Left_, class Right_, class Epilogue_>
struct Problem {
  using T = T_;
  using Left = Left_;
  using Right = Right_;
  using Epilogue = Epilogue_;
  static constexpr bool kWeightGradient = Left::kMnMajor;
  static constexpr bool kGateUp = Epilogue::kGateUp;
  static constexpr bool kGateUpPairs = kGateUp && Right::kPairs;  // neighbours in the right operand's tile, else halves of it
  static constexpr bool kGateUpHalves = kGateUp && !Right::kPairs;
  static constexpr bool kPairsAlongK = !kGateUp && Right::kPairs;   // k runs over gates and ups in turn
  static constexpr int kTileColumns = kGateUp ? kTile / 2 : kTile;  // of one half with kGateUp
  static constexpr int kGroup = 8;                                  // m tiles that sweep n together: their rows stay in the L2

  ExpertRows rows;
  Left left;
  Right right;
  Epilogue epilogue;
  int m_size = 0;           ///< weight gradients
  int n_size = 0;           ///< columns, of one half with kGateUp
  int k_size = 0;           ///< row operations
  bool skip_empty = false;  ///< weight gradients that add leave experts without rows alone

  static constexpr __host__ __device__ int tiles_of(int size, int tile) { return (size + tile - 1) / tile; }
  __host__ __device__ int n_tiles() const { return tiles_of(n_size, kTileColumns); }
  __host__ __device__ int m_tiles(int count) const { return tiles_of(kWeightGradient ? m_size : count, kTile); }
  __host__ __device__ int tiles(int count) const { return skip_empty && count == 0 ? 0 : m_tiles(count) * n_tiles(); }

  __device__ Tile tile(int count, int inside) const {
    const int group = inside / (kGroup * n_tiles()), first = group * kGroup;
    const int height = min(kGroup, m_tiles(count) - first), place = inside - first * n_tiles();
    return {first + place % height, place / height, kWeightGradient ? m_size : count, n_size, kWeightGradient ? count : k_size};
  }
};

using Accumulators = float[4][4][4];  // 16 rows, 8 columns, fragment; kGateUpHalves: column blocks 0, 1 gate and 2, 3 up

/// First column of a warp's block of 8 in the tile of the right operand.
template <bool kHalves>
__device__ int right_column(int warp_n, int block) {
  return kHalves ? block / 2 * (kTile / 2) + warp_n * 16 + block % 2 * 8 : warp_n * 32 + block * 8;
}

/// What a warp makes of the tile: rows warp_m * 64 .., columns right_column(warp_n, block).
template <class Problem>
struct WarpTile {
  int lane, warp_m, warp_n;
  std::uint32_t left, right;  // bytes of the first fragments
  __device__ explicit WarpTile(int thread)
      : lane(thread % 32),
        warp_m(thread / 32 % 2),
        warp_n(thread / 64),
        left(left_byte<Problem::Left::kMnMajor>(warp_m * 64, lane)),
        right(kOperandBytes + (Problem::kPairsAlongK ? right_pairs_byte(right_column<false>(warp_n, 0), lane)
                                                     : right_byte<Problem::Right::kMnMajor>(
                                                           right_column<Problem::kGateUpHalves>(warp_n, 0), lane))) {}

  __device__ int row(int block, int half) const { return warp_m * 64 + block * 16 + half * 8 + lane / 4; }
  /// First of two columns of the result, in its half with kGateUp.
  __device__ int column(int block) const {
    if constexpr (Problem::kGateUpPairs) return warp_n * 16 + block * 8 + lane % 2 * 4 + lane / 2 % 2 * 2;  // see take_pair
    return right_column<Problem::kGateUpHalves>(warp_n, block) + lane % 4 * 2;
  }
};

template <class Problem>
__device__ __forceinline__ void multiply_step(std::uint32_t stage, int step, const std::uint32_t (&b)[4][2],
                                              const WarpTile<Problem>& warp, Accumulators& c) {
  constexpr bool kLeft = Problem::Left::kMnMajor;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    std::uint32_t a[4];
    load_matrices<kLeft>(fragment_address<kLeft>(stage + warp.left, i, step), a);
#pragma unroll
    for (int j = 0; j < 4; ++j) multiply<typename Problem::T>(c[i][j], a, b[j][0], b[j][1]);
  }
}

/// `between` runs after the first of the stage's two products, whose time it takes nothing of.
template <class Problem, class Between>
__device__ __forceinline__ void multiply_stage(std::uint32_t stage, const WarpTile<Problem>& warp, Accumulators& c,
                                               Between&& between) {
  constexpr bool kRight = Problem::Right::kMnMajor, kHalves = Problem::kGateUpHalves;
  if constexpr (Problem::kPairsAlongK) {
    std::uint32_t gate[4][2], up[4][2];
#pragma unroll
    for (int j = 0; j < 4; ++j) load_right_pairs(stage + warp.right, j, gate[j], up[j]);
    multiply_step(stage, 0, gate, warp, c);
    between();
    multiply_step(stage, 1, up, warp, c);
  } else {
#pragma unroll
    for (int step = 0; step < kTileK / 16; ++step) {
      std::uint32_t b[4][2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        std::uint32_t two[4];
        load_matrices<kRight>(
            fragment_address<kRight>(stage + warp.right, kHalves ? 0 : j, step) + (kHalves ? j * kHalfTile<kRight> : 0), two);
        b[2 * j][0] = two[0], b[2 * j][1] = two[1], b[2 * j + 1][0] = two[2], b[2 * j + 1][1] = two[3];
      }
      multiply_step(stage, step, b, warp, c);
      if (step == 0) between();
    }
  }
}

/// The operand pipeline: a ring of stages that runs on from tile to tile, so that no tile waits for the former one's readers.
template <class Problem>
__device__ __forceinline__ void multiply_tile(const Problem& p, const Expert& expert, const Tile& tile, std::uint32_t shared,
                                              int& stage, Accumulators& c) {
  const int thread = thread_index();
  const WarpTile<Problem> warp(thread);
  typename Problem::Left::State left(thread);
  typename Problem::Right::State right(thread);
  p.left.start(left, expert, tile.m * kTile);
  p.right.start(right, expert, tile.n * Problem::kTileColumns);
  const int steps = (tile.k + kTileK - 1) / kTileK;
  const auto copy = [&](int step, int to) {
    if (step < steps) {
      p.left.copy(left, step * kTileK, shared + to * kStageBytes);
      p.right.copy(right, step * kTileK, shared + to * kStageBytes + kOperandBytes);
    }
    commit_copies();
  };
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) copy(i, (stage + i) % kStages);
  for (int step = 0; step < steps; ++step) {
    wait_copies<kStages - 2>();
    __syncthreads();  // everybody's copies of this stage are there, and everybody has left the one that is filled next
    multiply_stage<Problem>(shared + stage * kStageBytes, warp, c,
                            [&] { copy(step + kStages - 1, (stage + kStages - 1) % kStages); });
    stage = (stage + 1) % kStages;
  }
}

/// Sums of ds over a tile's columns, in a fixed order: the four lanes of a row, then the four warps side by side.
template <class Problem>
struct RowDots {
  float (*parts)[4] = reinterpret_cast<float (*)[4]>(dynamic_shared() + kStages * kStageBytes);  // (128 rows, 4 warps)

  /// All lanes of a warp together.
  __device__ void add(const WarpTile<Problem>& warp, int row, float dot) const {
    dot += __shfl_xor_sync(0xffffffffu, dot, 1);
    dot += __shfl_xor_sync(0xffffffffu, dot, 2);
    if (warp.lane % 4 == 0) parts[row][warp.warp_n] = dot;
  }
  /// All threads together.
  __device__ void store(const Problem& p, const Expert& expert, const Tile& tile) const {
    __syncthreads();
    const int r = static_cast<int>(threadIdx.x), row = tile.m * kTile + r;
    if (p.epilogue.row_dots != nullptr && r < kTile && row < tile.rows)
      p.epilogue.row_dots[static_cast<std::int64_t>(tile.n) * p.epilogue.capacity + expert.begin + row] =
          parts[r][0] + parts[r][1] + parts[r][2] + parts[r][3];
  }
};

/// The values of one row in the two columns column(block): v, or gate, gate, up, up. All lanes of a warp together.
template <class Problem>
__device__ __forceinline__ void take_pair(const float (&c)[4][4], int block, int half, int lane,
                                          float (&v)[Problem::kGateUp ? 4 : 2]) {
  if constexpr (Problem::kGateUpPairs) {
    // A lane has (gate, up) of column l % 4 in each of two neighbouring blocks of 4 columns. Even lanes give away the second
    // and get the first of the lane above, odd lanes the other way round: then each has two columns side by side.
    const bool odd = lane % 2 != 0;
    const float *first = c[2 * block] + 2 * half, *second = c[2 * block + 1] + 2 * half;
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // gate, up
      const float got = __shfl_xor_sync(0xffffffffu, odd ? first[i] : second[i], 1);
      v[2 * i] = odd ? got : first[i];
      v[2 * i + 1] = odd ? second[i] : got;
    }
  } else {
    v[0] = c[block][2 * half];
    v[1] = c[block][2 * half + 1];
    if constexpr (Problem::kGateUpHalves) {
      v[2] = c[2 + block][2 * half];
      v[3] = c[2 + block][2 * half + 1];
    }
  }
}

/// The scores of a thread's eight rows: where they lie is asked for all of them before any is looked at.
template <class Problem>
__device__ __forceinline__ void load_scores(const Problem& p, const Expert& expert, const Tile& tile,
                                            const WarpTile<Problem>& warp, float (&scores)[8]) {
  int slots[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int r = tile.m * kTile + warp.row(i / 2, i % 2);
    slots[i] = r < tile.rows ? p.epilogue.score.listed(expert.begin + r) : -1;
  }
  p.epilogue.score.at(slots, scores);
}

/// In rounds of two blocks of columns of a row (all four would spill). A round's input is loaded while the one before is at
/// work.
template <class Problem>
__device__ __forceinline__ void finish_tile(const Problem& p, const Expert& expert, const Tile& tile, Accumulators& c) {
  using Epilogue = typename Problem::Epilogue;
  constexpr int kBlocks = Epilogue::kGateUp ? 2 : 4, kRounds = 8 * kBlocks / 2;
  const WarpTile<Problem> warp(thread_index());
  float scores[8] = {};
  if constexpr (Epilogue::kScores) load_scores(p, expert, tile, warp, scores);
  typename Epilogue::Column columns[kBlocks];
  bool inside[kBlocks];
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) {
    const int column = tile.n * Problem::kTileColumns + warp.column(j);
    inside[j] = column < tile.columns;
    columns[j] = p.epilogue.column(expert, min(column, tile.columns - 2));
  }
  typename Epilogue::Row row{}, next_row{};
  typename Epilogue::Input next[2] = {};
  bool here = false, next_here = false;
  const auto begin = [&](int round) {  // loads what the round will need
    const int first = round * 2 % kBlocks, i = round * 2 / kBlocks;
    if (first == 0) {
      const int r = tile.m * kTile + warp.row(i / 2, i % 2);
      next_here = r < tile.rows;
      if (next_here) next_row = p.epilogue.row(expert, r, scores[i]);
    }
#pragma unroll
    for (int j = 0; j < 2; ++j)
      if (next_here && inside[first + j]) next[j] = p.epilogue.load(next_row, columns[first + j]);
  };
  begin(0);
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int first = round * 2 % kBlocks, i = round * 2 / kBlocks;
    if (first == 0) row = next_row, here = next_here;
    const typename Epilogue::Input input[2] = {next[0], next[1]};
    if (round + 1 < kRounds) begin(round + 1);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float v[Problem::kGateUp ? 4 : 2];
      take_pair<Problem>(c[i / 2], first + j, i % 2, warp.lane, v);
      if (here && inside[first + j]) p.epilogue.pair(row, columns[first + j], input[j], v);
    }
    if constexpr (Epilogue::kRowDots)
      if (first + 2 == kBlocks) RowDots<Problem>().add(warp, warp.row(i / 2, i % 2), here ? row.ds : 0.0f);
  }
  if constexpr (Epilogue::kRowDots) RowDots<Problem>().store(p, expert, tile);
}

template <class Problem>
__global__ void __launch_bounds__(kThreads, 2) gemm(const __grid_constant__ Problem p) {
  const std::uint32_t shared = shared_address(dynamic_shared());
  TileWalk<Problem> walk(p);
  Expert expert;
  int inside, stage = 0;
  for (int number = static_cast<int>(blockIdx.x); walk.find(number, expert, inside); number += static_cast<int>(gridDim.x)) {
    Accumulators c = {};
    multiply_tile(p, expert, p.tile(expert.count, inside), shared, stage, c);
    finish_tile(p, expert, p.tile(expert.count, inside), c);
  }
}

}  // namespace intarsia::cuda::sm80
