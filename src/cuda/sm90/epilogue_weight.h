// Epilogue of the weight gradients: the tile (m = H, n = I or gate and up panels) leaves as rows of an expert's matrix,
// straight or transposed, in 16 bits or fp32. Accumulation adds by TMA, in the gradient's own dtype.
#pragma once

#include "cuda/sm90/epilogue_rows.h"

namespace intarsia::cuda::sm90 {

template <class Op, bool kFloat, bool kTransposed>
class WeightEpilogue {
 public:
  static constexpr int kStagingBytes = Op::kConfig.store_tiles * kStoreTileBytes;
  static constexpr int kBarriers = 0;

  __device__ WeightEpilogue(const GemmArguments<typename Op::Element>& a, std::uint32_t staging, std::uint32_t,
                            ConsumerThread me)
      : a_(a), me_(me), staging_(staging, me) {}
  __device__ void begin(const Tile&, int) {}

  __device__ void run(const Tile& tile, int row0, typename Op::Accumulators& acc) {
    if (a_.accumulate && tile.rows == 0) return;
    constexpr int kWidth = kFloat ? 32 : 64, kPieces = Op::kTileN / kWidth;
    static_for<Op::kBlocksM * kPieces>([&](auto piece) {
      constexpr int m = decltype(piece)::value / kPieces, c = decltype(piece)::value % kPieces;
      float* f = &acc[m][c * kWidth / 2];
      const int panels_of_half = (a_.n_size + 63) / 64;
      const int panel = tile.n * (Op::kTileN / 64) + c * kWidth / 64;
      const int half = Op::kHalves == Halves::along_n && panel >= panels_of_half ? 1 : 0;
      const int column = (panel - half * panels_of_half) * 64 + c * kWidth % 64, row = row0 + m * 64;
      const bool inside =
          panel < (Op::kHalves == Halves::along_n ? 2 : 1) * panels_of_half && column < a_.n_size && row < a_.hidden;
#pragma unroll
      for (int i = 0; i < kWidth / 2; ++i) f[i] *= a_.grad_scale;
      const std::uint32_t free = staging_.acquire();
      if constexpr (kFloat) put_floats(free, f);
      else put_pairs(free, f);
      staging_.publish([&] {
        if (inside) store(a_.store[half], free, tile.expert, row, column);
      });
    });
  }

 private:
  __device__ void put_pairs(std::uint32_t tile, const float* f) const {
    std::uint32_t pairs[16];
    pack_columns<typename Op::Element>(f, pairs);
    if constexpr (kTransposed) put_tile_transposed(tile, me_, pairs);
    else put_tile(tile, me_, pairs);
  }

  /// 32 columns of floats: 64 rows of 128 bytes, or transposed two tiles of 32 rows with 32 of the piece's rows each.
  __device__ void put_floats(std::uint32_t tile, const float* f) const {
#pragma unroll
    for (int i = 0; i < 16; i += kTransposed ? 1 : 2) {
      const int row = me_.row() + 8 * half_of(i), column = column_of(i, me_.lane);
      if constexpr (kTransposed) ptx::store_shared(float_place_transposed(tile, row, column), f[i]);
      else ptx::store_shared(float_place(tile, row, column), f[i], f[i + 1]);
    }
  }

  __device__ void put(const CUtensorMap& map, std::uint32_t source, int inner, int outer, int expert) const {
    const int in_block = outer % a_.store_block, block = outer / a_.store_block;
    if (a_.accumulate) ptx::add_box(map, source, inner, in_block, block, expert);
    else ptx::store_box(map, source, inner, in_block, block, expert);
  }

  __device__ void store(const CUtensorMap& map, std::uint32_t tile, int expert, int row, int column) const {
    if constexpr (!kTransposed) {
      put(map, tile, column, row, expert);
    } else if constexpr (!kFloat) {
      put(map, tile, row, column, expert);
    } else {
      put(map, tile, row, column, expert);
      if (row + 32 < a_.hidden) put(map, tile + 4096, row + 32, column, expert);
    }
  }

  const GemmArguments<typename Op::Element>& a_;
  const ConsumerThread me_;
  Staging<Op::kConfig.store_tiles, 1> staging_;
};

}  // namespace intarsia::cuda::sm90
