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

/// A number that a generic lambda can take and use as a constant.
template <int kValue>
struct Constant {
  static constexpr int value = kValue;
  __device__ constexpr operator int() const { return kValue; }
};

/// body(Constant<0>) ... body(Constant<kCount - 1>): unrolling that cannot fail. A failed `#pragma unroll` over accumulators
/// would put them into local memory.
template <int kCount, class Body>
__device__ __forceinline__ void static_for(Body&& body) {
  [&]<int... kI>(std::integer_sequence<int, kI...>) { (body(Constant<kI>{}), ...); }(std::make_integer_sequence<int, kCount>{});
}

/// What is made of `bits` is made after the instructions before this line: work ahead of its turn would cost registers.
__device__ __forceinline__ void keep_here(std::uint32_t& bits) { asm volatile("" : "+r"(bits)); }

/// Who a consumer thread is.
struct ConsumerThread {
  int warpgroup, warp, lane;  ///< warp within the warpgroup
  __device__ bool leads() const { return warp == 0 && lane == 0; }
  /// First of the two rows (the other is 8 below) this thread holds of 64.
  __device__ int row() const { return row_of(warp, lane); }
  __device__ void sync() const { ptx::named_sync(6 + warpgroup, 128); }
};

/// Writes columns 16j to 16j + 15, packed in 4 pairs, as rows of a staging tile.
__device__ __forceinline__ void put_quarter(std::uint32_t tile, const ConsumerThread& me, int j, const std::uint32_t* pairs) {
  ptx::store_matrix(store_place(tile, me.warp, me.lane, j), pairs[0], pairs[1], pairs[2], pairs[3]);
}
/// The same for 64 columns, 16 pairs.
__device__ __forceinline__ void put_tile(std::uint32_t tile, const ConsumerThread& me, const std::uint32_t (&pairs)[16]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) put_quarter(tile, me, j, &pairs[4 * j]);
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

/// The staging tiles of one warpgroup, among the CTA's kBytes, used in rounds of `kPerRound`: a round may be written when the
/// stores that read its tiles `kRounds` rounds ago have read them.
template <int kTiles, int kPerRound>
class Staging {
 public:
  static constexpr int kRounds = kTiles / kPerRound, kTileBytes = kTiles * kStoreTileBytes;
  static constexpr int kBytes = kConsumers * kTileBytes;  ///< of the CTA
  static_assert(kRounds >= 1);

  /// `base`: of the CTA's staging.
  __device__ Staging(std::uint32_t base, ConsumerThread me) : base_(base + me.warpgroup * kTileBytes), me_(me) {}

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

/// An epilogue that writes its tile at once: nothing is left for the next tile's products.
struct NothingPending {
  __device__ static constexpr bool pending() { return false; }
  __device__ void between() {}
  __device__ void finish() {}
};

/// An epilogue that loads nothing of its own.
struct NothingAhead {
  template <class Tile>
  __device__ void start(const Tile&) {}
  template <class Tile>
  __device__ void begin(const Tile&, int) {}
  template <class Tile>
  __device__ void products_issued(const Tile&, int) {}
  template <class Tile>
  __device__ void pass(const Tile&, const Tile&, bool) {}
  __device__ void skip() {}
};

/// A warpgroup's part of a tile on its way to memory, as packed pieces of 64 x 64. Cooperative kernels keep the packed pieces
/// in registers and write them while the next tile's products run, so that the tensor cores wait for the packing alone; in
/// ping-pong kernels the other warpgroup keeps them busy, and the pieces are written at once.
template <class Op, bool kTransposed>
class TileStores {
  static constexpr int kColumnPieces = Op::kTileN / 64, kPieces = Op::kBlocksM * kColumnPieces,
                       kRound = Op::kConfig.store_round, kSteps = kPieces / kRound;
  static constexpr bool kDeferred = !Op::kPingPong;
  static_assert(kPieces % kRound == 0);
  using Tiles = Staging<Op::kConfig.store_tiles, kRound>;

 public:
  static constexpr int kBytes = Tiles::kBytes;  ///< of the CTA's staging

  __device__ TileStores(std::uint32_t base, ConsumerThread me) : me_(me), staging_(base, me) {}

  /// pack(m, c, pairs) makes the pairs of one piece; store(m, c, address) hands a written piece to TMA, in the leading thread.
  template <class Pack, class Store>
  __device__ void take(Pack&& pack, Store&& store) {
    if constexpr (kDeferred) {
      static_for<kPieces>([&](auto piece) { pack(piece / kColumnPieces, piece % kColumnPieces, pairs_[piece]); });
      step_ = 0;
    } else {
      static_for<kSteps>([&](auto step) {
        std::uint32_t pairs[kRound][16];
        static_for<kRound>([&](auto i) {
          constexpr int kPiece = step * kRound + i;
          pack(kPiece / kColumnPieces, kPiece % kColumnPieces, pairs[i]);
        });
        write(step * kRound, pairs, store);
      });
    }
  }

  /// Writes the next few of the pending pieces.
  template <class Store>
  __device__ void between(Store&& store) {
    if constexpr (kDeferred) {
      const int now = step_;
      static_for<kSteps>([&](auto step) {
        if (now == step)
          write(step * kRound, reinterpret_cast<const std::uint32_t (&)[kRound][16]>(pairs_[step * kRound]), store);
      });
      step_ = now + 1;
    }
  }
  __device__ bool pending() const { return kDeferred && step_ < kSteps; }
  template <class Store>
  __device__ void finish(Store&& store) {
    while (pending()) between(store);
  }

 private:
  template <class Store>
  __device__ void write(int first, const std::uint32_t (&pairs)[kRound][16], Store&& store) {
    const std::uint32_t tile = staging_.acquire();
#pragma unroll
    for (int i = 0; i < kRound; ++i) {
      if constexpr (kTransposed) put_tile_transposed(tile + i * kStoreTileBytes, me_, pairs[i]);
      else put_tile(tile + i * kStoreTileBytes, me_, pairs[i]);
    }
    staging_.publish([&] {
#pragma unroll
      for (int i = 0; i < kRound; ++i)
        store((first + i) / kColumnPieces, (first + i) % kColumnPieces, tile + i * kStoreTileBytes);
    });
  }

  const ConsumerThread me_;
  Tiles staging_;
  std::uint32_t pairs_[kDeferred ? kPieces : 1][16];
  int step_ = kSteps;
};

}  // namespace intarsia::cuda::sm90
