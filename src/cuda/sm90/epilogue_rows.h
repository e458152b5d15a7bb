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

/// z is packed after the main loop and leaves while the next tile's products run; a is made from the packed z then, so that it
/// is the same whether z is kept, recomputed or neither. kPlain: no bias and no score, the common case, without the registers
/// that they take.
template <class Op, class Act, bool kPlain>
class UpEpilogue : public NothingAhead {
  static constexpr bool kGated = Act::kGated;
  static constexpr int kPieces = Op::kTileN / 64;                    // 64 columns of z: gates, then ups
  static constexpr int kActivated = kGated ? kPieces / 2 : kPieces;  // 64 columns of a
  static constexpr int kColumns = kActivated * 64;
  static_assert(Op::kBlocksM == 1 && !Op::kPingPong && Op::kConfig.store_tiles == 2);

 public:
  static constexpr int kStagingBytes = kConsumers * 2 * kStoreTileBytes;
  static constexpr int kBarriers = 0;

  __device__ UpEpilogue(const GemmArguments<typename Op::Element>& a, std::uint32_t staging, std::uint32_t, ConsumerThread me)
      : a_(a), me_(me), act_{}, staging_(staging, me) {
    if constexpr (requires { act_.kind; }) act_.kind = a.activation;
  }

  __device__ void run(const Tile& tile, int row0, const typename Op::Accumulators& acc, const Tile&, bool) {
    finish();
    tile_ = tile;
    row0_ = row0;
    static_for<kPieces>([&](auto piece) {
      const float* f = &acc[0][piece * 32];
      if (kPlain || !a_.bias.data) pack_columns<typename Op::Element>(f, z_[piece]);
      else pack_biased(piece, f, z_[piece]);
    });
    step_ = a_.store_z ? 0 : 1;
  }

  /// One step: z's pieces of 64 columns of a, or those of a.
  __device__ void between() {
    const int now = step_;
    static_for<2 * kActivated>([&](auto step) {
      constexpr Constant<step / 2> c;
      if (now != step) return;
      if constexpr (step % 2 == 1) write_a(c);
      else write_z(c);
    });
    step_ = now + (a_.store_z ? 1 : 2);
  }
  __device__ bool pending() const { return step_ < 2 * kActivated; }
  __device__ void finish() {
    while (pending()) between();
  }

 private:
  __device__ bool inside(int c) const { return row0_ < tile_.rows && column(c) < a_.n_size; }
  __device__ int column(int c) const { return tile_.n * kColumns + c * 64; }
  __device__ RowPlace place(int c) const { return RowPlace(tile_, row0_, column(c)); }

  template <int c>
  __device__ void write_z(Constant<c>) {
    const std::uint32_t tile = staging_.acquire();
    put_tile(tile, me_, z_[c]);
    if constexpr (kGated) put_tile(tile + kStoreTileBytes, me_, z_[kActivated + c]);
    staging_.publish([&] {
      if (!inside(c)) return;
      place(c).store(a_.store[0], tile);
      if constexpr (kGated) place(c).store(a_.store[1], tile + kStoreTileBytes);
    });
  }

  template <int c>
  __device__ void write_a(Constant<c>) {
    const std::uint32_t tile = staging_.acquire();
    const ScorePlacement on = kPlain || a_.scores.values == nullptr ? ScorePlacement::output : a_.score_on;
    float score[2] = {1, 1};
    if (on != ScorePlacement::output) load_scores(a_.scores, tile_, row0_ + me_.row(), score);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      std::uint32_t pairs[4];
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        keep_here(z_[c][4 * j + x]);
        if constexpr (kGated) keep_here(z_[kActivated + c][4 * j + x]);
        const float2 g = unpack<typename Op::Element>(z_[c][4 * j + x]);
        const float2 u = kGated ? unpack<typename Op::Element>(z_[kGated ? kActivated + c : 0][4 * j + x]) : float2{0, 0};
        const FastFloat s = score[x & 1];
        pairs[x] = pack<typename Op::Element>(activated(act_, FastFloat(g.x), FastFloat(u.x), s, on).v,
                                              activated(act_, FastFloat(g.y), FastFloat(u.y), s, on).v);
      }
      ptx::store_matrix(store_place(tile, me_.warp, me_.lane, j), pairs[0], pairs[1], pairs[2], pairs[3]);
    }
    staging_.publish([&] {
      if (inside(c)) place(c).store(a_.store[2], tile);
    });
  }

  __device__ void pack_biased(int piece, const float* f, std::uint32_t (&pairs)[16]) const {
    const int first = column(piece % kActivated), half = piece >= kActivated ? a_.n_size : 0;
    const auto biased = [&](int i) {
      const int j = first + column_of(i, me_.lane);
      return f[i] + (j < a_.n_size ? a_.bias.template at<float>(tile_.expert, half + j) : 0.0f);
    };
#pragma unroll
    for (int i = 0; i < 16; ++i) pairs[i] = pack<typename Op::Element>(biased(2 * i), biased(2 * i + 1));
  }

  const GemmArguments<typename Op::Element>& a_;
  const ConsumerThread me_;
  Act act_;
  Staging<2, 2> staging_;
  std::uint32_t z_[kPieces][16];
  Tile tile_{};  // that z_ is of
  int row0_ = 0, step_ = 2 * kActivated;
};

template <class Op, bool kPlain>
class StoreEpilogue : public NothingAhead {
 public:
  static constexpr int kStagingBytes = kConsumers * Op::kConfig.store_tiles * kStoreTileBytes;
  static constexpr int kBarriers = 0;

  __device__ StoreEpilogue(const GemmArguments<typename Op::Element>& a, std::uint32_t staging, std::uint32_t,
                           ConsumerThread me)
      : a_(a), me_(me), stores_(staging, me) {}
  __device__ bool pending() const { return stores_.pending(); }
  __device__ void between() { stores_.between(*this); }
  __device__ void finish() { stores_.finish(*this); }

  __device__ void run(const Tile& tile, int row0, const typename Op::Accumulators& acc, const Tile&, bool) {
    finish();
    tile_ = tile;
    row0_ = row0;
    stores_.take(
        [&](int m, int c, std::uint32_t (&pairs)[16]) {
          const float* f = &acc[m][c * 32];
          if (kPlain || (!a_.bias.data && !a_.scores.values)) pack_columns<typename Op::Element>(f, pairs);
          else pack_weighted(row0 + m * 64, tile.n * Op::kTileN + c * 64, f, pairs);
        },
        *this);
  }

  /// Hands piece (m, c) of the tile to TMA.
  __device__ void operator()(int m, int c, std::uint32_t source) const {
    const int row = row0_ + m * 64, column = tile_.n * Op::kTileN + c * 64;
    if (row >= tile_.rows || column >= a_.n_size) return;
    const RowPlace place(tile_, row, column);
    if (a_.accumulate) place.add(a_.store[0], source);
    else place.store(a_.store[0], source);
  }

 private:
  /// With the bias and the scores.
  __device__ void pack_weighted(int first, int column, const float* f, std::uint32_t (&pairs)[16]) const {
    float score[2] = {1, 1};
    if (a_.score_on != ScorePlacement::input) load_scores(a_.scores, tile_, first + me_.row(), score);
    const auto weighted = [&](int i) {
      const int j = column + column_of(i, me_.lane);
      const float bias = j < a_.n_size ? a_.bias.template at<float>(tile_.expert, j) : 0.0f, s = score[half_of(i)];
      return a_.score_on == ScorePlacement::inside ? f[i] + s * bias : s * (f[i] + bias);
    };
#pragma unroll
    for (int i = 0; i < 16; ++i) pairs[i] = pack<typename Op::Element>(weighted(2 * i), weighted(2 * i + 1));
  }

  const GemmArguments<typename Op::Element>& a_;
  const ConsumerThread me_;
  TileStores<Op, false> stores_;
  Tile tile_{};  // that stores_ has
  int row0_ = 0;
};

/// Straight from registers: the four threads of a row write 32 bytes of it (16 of 16-bit logits) at a time, and any E and
/// alignment will do. What differs from call to call is asked once, not for every column: ten thousand instructions in a row
/// are read from memory faster than they run only where they are in the instruction cache.
template <class Op>
class LogitsEpilogue : public NothingPending, public NothingAhead {
  static constexpr int kOctets = Op::kTileN / 8;  // of columns, of which a thread has two in each of two rows

 public:
  static constexpr int kStagingBytes = 0;
  static constexpr int kBarriers = 0;

  __device__ LogitsEpilogue(const GemmArguments<typename Op::Element>& a, std::uint32_t, std::uint32_t, ConsumerThread me)
      : a_(a), me_(me) {}

  __device__ void run(const Tile& tile, int row0, const typename Op::Accumulators& acc, const Tile&, bool) const {
    using Element = typename Op::Element;
    const int column0 = tile.n * Op::kTileN + 2 * (me_.lane % 4);
    float bias[2 * kOctets] = {};  // not added to acc: ptxas would make every product wait (C7515)
    if (a_.bias.data) load_bias(column0, bias);
    const bool pairs = a_.n_size % 2 == 0 && a_.logits.step % 2 == 0;
    if (a_.logits.is_float) store<float>(tile, row0, column0, pairs, acc, bias);
    else store<Element>(tile, row0, column0, pairs, acc, bias);
  }

 private:
  __device__ void load_bias(int column0, float (&bias)[2 * kOctets]) const {
#pragma unroll
    for (int i = 0; i < 2 * kOctets; ++i) {
      const int column = column0 + i / 2 * 8 + i % 2;
      if (column < a_.n_size) bias[i] = a_.bias.template load<float>(column * a_.bias.step);
    }
  }

  /// `pairs`: two columns are both there or neither, at a multiple of their size.
  template <class Out>
  __device__ void store(const Tile& tile, int row0, int column0, bool pairs, const typename Op::Accumulators& acc,
                        const float (&bias)[2 * kOctets]) const {
    static_for<2 * Op::kBlocksM>([&](auto r) {
      const int row = row0 + r / 2 * 64 + r % 2 * 8 + me_.row();
      if (row >= tile.rows) return;
      Out* const to = static_cast<Out*>(a_.logits.data) + row * a_.logits.step + column0;
      const auto value = [&](int c, int i) { return acc[r / 2][c * 4 + r % 2 * 2 + i] + bias[2 * c + i]; };
      if (pairs) {
        static_for<kOctets>([&](auto c) {
          if (column0 + c * 8 < a_.n_size) store_pair(to + c * 8, value(c, 0), value(c, 1));
        });
      } else {
        static_for<2 * kOctets>([&](auto i) {
          if (column0 + i / 2 * 8 + i % 2 < a_.n_size) to[i / 2 * 8 + i % 2] = Out(value(i / 2, i % 2));
        });
      }
    });
  }

  const GemmArguments<typename Op::Element>& a_;
  const ConsumerThread me_;
};

}  // namespace intarsia::cuda::sm90
