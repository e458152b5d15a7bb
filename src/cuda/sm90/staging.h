// From accumulators to global memory: a warpgroup packs 64 x 64 pieces of its tile into swizzled staging tiles, which one
// thread hands to TMA. 64 columns of a thread's fragment (addresses.h) are 32 floats, 16 packed pairs.
#pragma once

#include <cstdint>
#include <utility>

#include "cuda/epilogue.h"
#include "cuda/sm90/addresses.h"
#include "cuda/sm90/config.h"
#include "cuda/sm90/ptx.h"

namespace intarsia::cuda::sm90 {

/// body(integral_constant<int, 0>) ... body(integral_constant<int, kCount - 1>): unrolling that cannot fail. A failed `#pragma
/// unroll` over accumulators would put them into local memory.
template <int kCount, class Body>
__device__ __forceinline__ void static_for(Body&& body) {
  [&]<int... kI>(std::integer_sequence<int, kI...>) {
    (body(std::integral_constant<int, kI>{}), ...);
  }(std::make_integer_sequence<int, kCount>{});
}

/// Who a consumer thread is.
struct ConsumerThread {
  int warpgroup, warp, lane;  ///< warp within the warpgroup
  __device__ bool leads() const { return warp == 0 && lane == 0; }
  /// First of the two rows (the other is 8 below) this thread holds of 64.
  __device__ int row() const { return row_of(warp, lane); }
  __device__ void sync() const { ptx::named_sync(6 + warpgroup, 128); }
};

/// Writes 64 columns of packed pairs as rows of a staging tile.
__device__ __forceinline__ void put_tile(std::uint32_t tile, const ConsumerThread& me, const std::uint32_t (&pairs)[16]) {
#pragma unroll
  for (int j = 0; j < 4; ++j)
    ptx::store_matrix(store_place(tile, me.warp, me.lane, j), pairs[4 * j], pairs[4 * j + 1], pairs[4 * j + 2],
                      pairs[4 * j + 3]);
}
/// The same, transposed: row n of the staging tile is column n of the piece.
__device__ __forceinline__ void put_tile_transposed(std::uint32_t tile, const ConsumerThread& me,
                                                    const std::uint32_t (&pairs)[16]) {
#pragma unroll
  for (int j = 0; j < 4; ++j)
    ptx::store_matrix_transposed(store_place_transposed(tile, me.warp, me.lane, j), pairs[4 * j], pairs[4 * j + 1],
                                 pairs[4 * j + 2], pairs[4 * j + 3]);
}

/// 32 floats of a fragment as 16 pairs.
template <class Element>
__device__ __forceinline__ void pack_columns(const float* f, std::uint32_t (&pairs)[16]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) pairs[i] = pack<Element>(f[2 * i], f[2 * i + 1]);
}

/// The staging tiles of one warpgroup, used in rounds of `kPerRound`: a round may be written when the stores that read its
/// tiles `kRounds` rounds ago have read them.
template <int kTiles, int kPerRound>
class Staging {
 public:
  static constexpr int kRounds = kTiles / kPerRound;
  static_assert(kRounds >= 1);

  __device__ Staging(std::uint32_t base, ConsumerThread me) : base_(base), me_(me) {}

  /// Address of the round's first tile, free to be written.
  __device__ std::uint32_t acquire() {
    const std::uint32_t tile = base_ + round_ * (kPerRound * kStoreTileBytes);
    round_ = round_ + 1 == kRounds ? 0 : round_ + 1;
    if (me_.leads()) ptx::wait_stores_read<kRounds - 1>();
    me_.sync();
    return tile;
  }
  /// All threads have written: `store` runs in the leading thread.
  template <class Store>
  __device__ void publish(Store&& store) {
    ptx::fence_async_proxy();
    me_.sync();
    if (me_.leads()) {
      store();
      ptx::commit_stores();
    }
  }

 private:
  std::uint32_t base_;
  const ConsumerThread me_;
  int round_ = 0;
};

}  // namespace intarsia::cuda::sm90
