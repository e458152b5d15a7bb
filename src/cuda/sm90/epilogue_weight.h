// Epilogues of the weight gradients: the tile (m = H, n = I or gate and up panels) leaves as rows of an expert's matrix,
// straight or transposed, in 16 bits or fp32. Accumulation adds by TMA, in the gradient's own dtype.
#pragma once

#include "cuda/sm90/epilogue_rows.h"

namespace intarsia::cuda::sm90 {

/// Where the pieces of a tile go: kWidth columns of 64 rows each.
template <class Op, int kWidth>
struct WeightPlace {
  const GemmArguments<typename Op::Element>& a;
  const Tile& tile;

  /// store(map, row, column) for piece c of the rows from `row` on, unless it lies outside.
  template <class Store>
  __device__ void visit(int row, int c, Store&& store) const {
    const int panels_of_half = (a.n_size + 63) / 64;
    const int panel = tile.n * (Op::kTileN / 64) + c * kWidth / 64;
    const int half = Op::kHalves == Halves::along_n && panel >= panels_of_half ? 1 : 0;
    const int column = (panel - half * panels_of_half) * 64 + c * kWidth % 64;
    if (panel < (Op::kHalves == Halves::along_n ? 2 : 1) * panels_of_half && column < a.n_size && row < a.hidden)
      store(a.store[half], row, column);
  }
  __device__ void put(const CUtensorMap& map, std::uint32_t source, int inner, int outer) const {
    const int in_block = outer % a.store_block, block = outer / a.store_block;
    if (a.accumulate) ptx::add_box(map, source, inner, in_block, block, tile.expert);
    else ptx::store_box(map, source, inner, in_block, block, tile.expert);
  }
};

template <class Op, bool kTransposed>
class WeightEpilogue : public NothingAhead {
 public:
  static constexpr int kStagingBytes = TileStores<Op, kTransposed>::kBytes;
  static constexpr int kBarriers = 0;

  __device__ WeightEpilogue(const GemmArguments<typename Op::Element>& a, std::uint32_t staging, std::uint32_t,
                            ConsumerThread me)
      : a_(a), stores_(staging, me) {}
  __device__ bool pending() const { return stores_.pending(); }
  __device__ void between() { stores_.between(*this); }
  __device__ void finish() { stores_.finish(*this); }

  __device__ void run(const Tile& tile, int row0, const typename Op::Accumulators& acc, const Tile&, bool) {
    if (a_.accumulate && tile.rows == 0) return;
    finish();
    tile_ = tile;
    row0_ = row0;
    stores_.take(
        [&](int m, int c, std::uint32_t (&pairs)[16]) {
          const float* f = &acc[m][c * 32];
#pragma unroll
          for (int i = 0; i < 16; ++i)
            pairs[i] = pack<typename Op::Element>(a_.grad_scale * f[2 * i], a_.grad_scale * f[2 * i + 1]);
        },
        *this);
  }

  /// Hands piece (m, c) of the tile to TMA.
  __device__ void operator()(int m, int c, std::uint32_t source) const {
    const WeightPlace<Op, 64> place{a_, tile_};
    place.visit(row0_ + m * 64, c, [&](const CUtensorMap& map, int row, int column) {
      place.put(map, source, kTransposed ? row : column, kTransposed ? column : row);
    });
  }

 private:
  const GemmArguments<typename Op::Element>& a_;
  TileStores<Op, kTransposed> stores_;
  Tile tile_{};  // that stores_ has
  int row0_ = 0;
};

/// fp32: 32 columns a piece, as 64 rows of 128 bytes, or transposed as two tiles of 32 rows with 32 of the piece's rows each.
template <class Op, bool kTransposed>
class FloatWeightEpilogue : public NothingPending, public NothingAhead {
 public:
  static constexpr int kStagingBytes = Staging<Op::kConfig.store_tiles, 1>::kBytes;
  static constexpr int kBarriers = 0;

  __device__ FloatWeightEpilogue(const GemmArguments<typename Op::Element>& a, std::uint32_t staging, std::uint32_t,
                                 ConsumerThread me)
      : a_(a), me_(me), staging_(staging, me) {}

  __device__ void run(const Tile& tile, int row0, const typename Op::Accumulators& acc, const Tile&, bool) {
    if (a_.accumulate && tile.rows == 0) return;
    constexpr int kPieces = Op::kTileN / 32;
    const WeightPlace<Op, 32> place{a_, tile};
    static_for<Op::kBlocksM * kPieces>([&](auto piece) {
      constexpr int m = piece / kPieces, c = piece % kPieces;
      const std::uint32_t source = staging_.acquire();
      put_floats(source, &acc[m][c * 16]);
      staging_.publish([&] {
        place.visit(row0 + m * 64, c, [&](const CUtensorMap& map, int row, int column) {
          place.put(map, source, kTransposed ? row : column, kTransposed ? column : row);
          if (kTransposed && row + 32 < a_.hidden) place.put(map, source + 4096, row + 32, column);
        });
      });
    });
  }

 private:
  __device__ void put_floats(std::uint32_t tile, const float* f) const {
#pragma unroll
    for (int i = 0; i < 16; i += kTransposed ? 1 : 2) {
      const int row = me_.row() + 8 * half_of(i), column = column_of(i, me_.lane);
      if constexpr (kTransposed) ptx::store_shared(float_place_transposed(tile, row, column), a_.grad_scale * f[i]);
      else ptx::store_shared(float_place(tile, row, column), a_.grad_scale * f[i], a_.grad_scale * f[i + 1]);
    }
  }

  const GemmArguments<typename Op::Element>& a_;
  const ConsumerThread me_;
  Staging<Op::kConfig.store_tiles, 1> staging_;
};

}  // namespace intarsia::cuda::sm90
