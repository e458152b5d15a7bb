// Epilogue of the weight gradients: the tile (m = H, n = I or gate and up panels) leaves as rows of an expert's matrix,
// straight or transposed, in 16 bits or fp32. fp32 accumulation adds by TMA; 16-bit accumulation reads what is there, adds in
// fp32 and rounds once.
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
    const int row = me_.row(), quad = me_.lane % 4;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      if constexpr (!kTransposed) {
        const int chunk = b * 2 + (quad >> 1), inside = (quad & 1) * 8;
        ptx::store_shared(swizzled(tile, row, chunk) + inside, f[4 * b], f[4 * b + 1]);
        ptx::store_shared(swizzled(tile, row + 8, chunk) + inside, f[4 * b + 2], f[4 * b + 3]);
      } else {
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          const int n = b * 8 + 2 * quad + (x & 1), r = row + 8 * (x >> 1);
          ptx::store_shared(swizzled(tile + (r >> 5) * 4096, n, (r & 31) >> 2) + (r & 3) * 4, f[4 * b + x]);
        }
      }
    }
  }

  __device__ void put(const CUtensorMap& map, std::uint32_t source, int inner, int outer, int expert) const {
    const int in_block = outer % a_.store_block, block = outer / a_.store_block;
    if (kFloat && a_.accumulate) ptx::add_box(map, source, inner, in_block, block, expert);
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
