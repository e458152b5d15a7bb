// Epilogues of the forward products and of up_backward: the tile's rows belong to one expert and leave as rows.
//   UpEpilogue     z = acc + b_up (stored when asked), a = sa * act(sz * z) with sz = s for score_on = input, sa = s for inside
//   StoreEpilogue  rows = acc, or acc + b, acc + s b (inside), s (acc + b) (output); rows += acc where asked
//   LogitsEpilogue logits = acc + bias, in fp32 or 16 bits
#pragma once

#include "cuda/epilogue.h"
#include "cuda/sm90/arguments.h"
#include "cuda/sm90/staging.h"
#include "cuda/sm90/traits.h"

namespace intarsia::cuda::sm90 {

/// Coordinates of a piece of rows in a ragged map.
struct RowPlace : RaggedRow {
  int column;
  __device__ RowPlace(const Tile& tile, int row0, int column_) : RaggedRow(tile.first_row, tile.rows, row0), column(column_) {}
  __device__ void store(const CUtensorMap& map, std::uint32_t source) const {
    ptx::store_box(map, source, column, row, fold, last);
  }
  __device__ void add(const CUtensorMap& map, std::uint32_t source) const {
    ptx::add_box(map, source, column, row, fold, last);
  }
};

/// Scores of a thread's two rows, `row` and 8 below; 0 past the expert's end.
__device__ __forceinline__ void load_scores(const ScoreOfRow<float>& scores, const Tile& tile, int row, float (&score)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) score[i] = row + 8 * i < tile.rows ? scores(tile.first_row + row + 8 * i) : 0.0f;
}

/// kPlain: no bias and no score, the common case, without the registers that they take.
template <class Op, class Act, bool kPlain>
class UpEpilogue {
  static constexpr bool kGated = Act::kGated;
  static constexpr int kPieces = kGated ? 3 : 2;  // tiles of 64 columns: (gate, up) or x, and a
  static constexpr bool kOneRound = Op::kConfig.store_tiles >= kPieces;
  static constexpr int kColumns = kGated ? Op::kTileN / 2 : Op::kTileN;  // columns of a per tile

 public:
  static constexpr int kStagingBytes = Op::kConfig.store_tiles * kStoreTileBytes;
  static constexpr int kBarriers = 0;

  __device__ UpEpilogue(const GemmArguments<typename Op::Element>& a, std::uint32_t staging, std::uint32_t, ConsumerThread me)
      : a_(a), me_(me), act_{}, whole_(staging, me), halves_(staging, me) {
    if constexpr (requires { act_.kind; }) act_.kind = a.activation;
  }
  __device__ void begin(const Tile&, int) {}

  __device__ void run(const Tile& tile, int row0, typename Op::Accumulators& acc) {
    using Element = typename Op::Element;
    static_for<Op::kBlocksM*(kColumns / 64)>([&](auto piece) {
      constexpr int m = decltype(piece)::value / (kColumns / 64), c = decltype(piece)::value % (kColumns / 64);
      float* g = &acc[m][c * 32];
      float* u = kGated ? &acc[m][Op::kTileN / 4 + c * 32] : nullptr;
      const int first = row0 + m * 64, column = tile.n * kColumns + c * 64;
      const bool inside = first < tile.rows && column < a_.n_size;
      const RowPlace place(tile, first, column);
      if (!kPlain && a_.bias.data) add_bias(tile.expert, column, g, u);

      std::uint32_t pairs[16];
      std::uint32_t free = 0;
      if constexpr (kOneRound) free = whole_.acquire();
      if (a_.store_z) {
        if constexpr (!kOneRound) free = halves_.acquire();
        pack_columns<Element>(g, pairs);
        put_tile(free, me_, pairs);
        if constexpr (kGated) {
          pack_columns<Element>(u, pairs);
          put_tile(free + kStoreTileBytes, me_, pairs);
        }
        if constexpr (!kOneRound) halves_.publish([&] { store_z(inside, place, free); });
      }
      activate(tile, first, g, u);
      if constexpr (!kOneRound) free = halves_.acquire();
      const std::uint32_t a_tile = kOneRound ? free + (kPieces - 1) * kStoreTileBytes : free;
      pack_columns<Element>(g, pairs);
      put_tile(a_tile, me_, pairs);
      const auto store = [&] {
        if (kOneRound && a_.store_z) store_z(inside, place, free);
        if (inside) place.store(a_.store[2], a_tile);
      };
      if constexpr (kOneRound) whole_.publish(store);
      else halves_.publish(store);
    });
  }

 private:
  __device__ void store_z(bool inside, const RowPlace& place, std::uint32_t tile) const {
    if (!inside) return;
    place.store(a_.store[0], tile);
    if constexpr (kGated) place.store(a_.store[1], tile + kStoreTileBytes);
  }

  /// g <- a
  __device__ void activate(const Tile& tile, int first, float* g, const float* u) const {
    const ScorePlacement on = kPlain || a_.scores.values == nullptr ? ScorePlacement::output : a_.score_on;
    float score[2] = {1, 1};
    if (on != ScorePlacement::output) load_scores(a_.scores, tile, first + me_.row(), score);
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const FastFloat up = kGated ? FastFloat(u[i]) : FastFloat(0.0f);
      g[i] = activated(act_, FastFloat(g[i]), up, FastFloat(score[half_of(i)]), on).v;
    }
  }

  __device__ void add_bias(int expert, int column, float* g, float* u) const {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int j = column + column_of(i, me_.lane);
      if (j >= a_.n_size) continue;
      g[i] += a_.bias.template at<float>(expert, j);
      if constexpr (kGated) u[i] += a_.bias.template at<float>(expert, a_.n_size + j);
    }
  }

  const GemmArguments<typename Op::Element>& a_;
  const ConsumerThread me_;
  Act act_;
  Staging<kOneRound ? Op::kConfig.store_tiles : kPieces, kPieces> whole_;
  Staging<2, 2> halves_;
};

template <class Op, bool kPlain>
class StoreEpilogue {
 public:
  static constexpr int kStagingBytes = Op::kConfig.store_tiles * kStoreTileBytes;
  static constexpr int kBarriers = 0;

  __device__ StoreEpilogue(const GemmArguments<typename Op::Element>& a, std::uint32_t staging, std::uint32_t,
                           ConsumerThread me)
      : a_(a), me_(me), staging_(staging, me) {}
  __device__ void begin(const Tile&, int) {}

  __device__ void run(const Tile& tile, int row0, typename Op::Accumulators& acc) {
    constexpr int kPieces = Op::kTileN / 64;
    static_for<Op::kBlocksM * kPieces>([&](auto piece) {
      constexpr int m = decltype(piece)::value / kPieces, c = decltype(piece)::value % kPieces;
      const int first = row0 + m * 64, column = tile.n * Op::kTileN + c * 64;
      float* f = &acc[m][c * 32];
      if (!kPlain && (a_.bias.data || a_.scores.values)) apply(tile, first, column, f);
      std::uint32_t pairs[16];
      pack_columns<typename Op::Element>(f, pairs);
      const std::uint32_t free = staging_.acquire();
      put_tile(free, me_, pairs);
      staging_.publish([&] {
        if (first >= tile.rows || column >= a_.n_size) return;
        const RowPlace place(tile, first, column);
        if (a_.accumulate) place.add(a_.store[0], free);
        else place.store(a_.store[0], free);
      });
    });
  }

 private:
  __device__ void apply(const Tile& tile, int first, int column, float* f) const {
    float score[2] = {1, 1};
    if (a_.score_on != ScorePlacement::input) load_scores(a_.scores, tile, first + me_.row(), score);
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int j = column + column_of(i, me_.lane);
      const float bias = j < a_.n_size ? a_.bias.template at<float>(tile.expert, j) : 0.0f, s = score[half_of(i)];
      f[i] = a_.score_on == ScorePlacement::inside ? f[i] + s * bias : s * (f[i] + bias);
    }
  }

  const GemmArguments<typename Op::Element>& a_;
  const ConsumerThread me_;
  Staging<Op::kConfig.store_tiles, 1> staging_;
};

/// Straight from registers: the four threads of a row write 32 bytes of it, a whole sector, and any E and alignment will do.
template <class Op>
class LogitsEpilogue {
 public:
  static constexpr int kStagingBytes = 0;
  static constexpr int kBarriers = 0;

  __device__ LogitsEpilogue(const GemmArguments<typename Op::Element>& a, std::uint32_t, std::uint32_t, ConsumerThread me)
      : a_(a), me_(me) {}
  __device__ void begin(const Tile&, int) {}

  __device__ void run(const Tile& tile, int row0, typename Op::Accumulators& acc) const {
    static_for<Op::kBlocksM*(Op::kTileN / 8)>([&](auto block) {
      constexpr int m = decltype(block)::value / (Op::kTileN / 8), c = decltype(block)::value % (Op::kTileN / 8);
      const int column = tile.n * Op::kTileN + c * 8 + 2 * (me_.lane % 4);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = row0 + m * 64 + me_.row() + 8 * i;
        if (row < tile.rows) put(row, column, acc[m][c * 4 + 2 * i], acc[m][c * 4 + 2 * i + 1]);
      }
    });
  }

 private:
  __device__ void put(int row, int column, float low, float high) const {
    using Element = typename Op::Element;
    const PlainRows& to = a_.logits;
    if (column >= a_.n_size) return;
    if (a_.bias.data) low += a_.bias.template at<float>(0, column);
    const bool both = column + 1 < a_.n_size;
    if (both && a_.bias.data) high += a_.bias.template at<float>(0, column + 1);
    const std::int64_t i = row * to.step + column;
    const bool pair = both && i % 2 == 0;
    if (to.is_float) {
      float* p = static_cast<float*>(to.data) + i;
      if (pair) return store_pair(p, low, high);
      p[0] = low;
      if (both) p[1] = high;
    } else {
      Element* p = static_cast<Element*>(to.data) + i;
      if (pair) return store_pair(p, low, high);
      p[0] = Element(low);
      if (both) p[1] = Element(high);
    }
  }

  const GemmArguments<typename Op::Element>& a_;
  const ConsumerThread me_;
};

}  // namespace intarsia::cuda::sm90
