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

/// Where the scores of a thread's rows lie: `row` and 8 below, then the same 64 further down; -1 past the expert's end.
template <int kCount>
__device__ __forceinline__ void list_scores(const ScoreOfRow<float>& scores, const Tile& tile, int row, int (&slots)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int r = row + i / 2 * 64 + i % 2 * 8;
    slots[i] = r < tile.rows ? scores.listed(tile.first_row + r) : -1;
  }
}

/// Scores of a thread's two rows, `row` and 8 below; 0 past the expert's end.
__device__ __forceinline__ void load_scores(const ScoreOfRow<float>& scores, const Tile& tile, int row, float (&score)[2]) {
  int slots[2];
  list_scores(scores, tile, row, slots);
  scores.at(slots, score);
}

/// Where columns of a piece of 64 lie on the caller's out axis. Blocks of gates divide 128 or are its multiples (supports.cpp),
/// so those of 64 and more are one for the whole piece.
struct BiasOrder {
  int shift = 31, factor = 0, offset;
  __device__ BiasOrder(int block, int gates, int first, bool up) {
    if (block == 0) {
      offset = up ? gates : 0;
    } else if (block < 64) {
      shift = 31 - __clz(block);
      factor = block;
      offset = up ? block : 0;
    } else {
      offset = (first / block + up) * block;
    }
  }
  __device__ int place(int column) const { return column + (column >> shift) * factor + offset; }
};

/// The bias of a thread's 16 columns of a piece, two of every 8, all loaded before any is used. Past the last column it is that
/// of the last one: nothing there is stored.
template <class Element>
__device__ __forceinline__ void load_bias(const ExpertBias<Element>& bias, int expert, const BiasOrder& order, int first,
                                          int columns, int lane, float (&b)[16]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int column = min(first + column_of(i / 2 * 4 + i % 2, lane), columns - 1);
    b[i] = bias.data ? bias.template load<float>(expert * bias.expert_step + order.place(column) * bias.step) : 0.0f;
  }
}

/// z is packed after the main loop and leaves while the next tile's products run; a is made from the packed z then, so that it
/// is the same whether z is kept, recomputed or neither. kPlain: no bias and no score, the common case; with them there are no
/// registers left for that, and the tile leaves at once.
template <class Op, class Act, bool kPlain>
class UpEpilogue : public NothingAhead {
  static constexpr bool kGated = Act::kGated;
  static constexpr int kPieces = Op::kTileN / 64;                    // 64 columns of z: gates, then ups
  static constexpr int kActivated = kGated ? kPieces / 2 : kPieces;  // 64 columns of a
  static constexpr int kColumns = kActivated * 64;
  static_assert(Op::kBlocksM == 1 && !Op::kPingPong && Op::kConfig.store_tiles == 2);

 public:
  static constexpr int kStagingBytes = Staging<2, 2>::kBytes;
  static constexpr int kBarriers = 0;

  __device__ UpEpilogue(const GemmArguments<typename Op::Element>& a, std::uint32_t staging, std::uint32_t, ConsumerThread me)
      : a_(a), me_(me), staging_(staging, me) {}

  __device__ void products_issued(const Tile& tile, int row0) {
    if constexpr (!kPlain) load_scores(a_.scores, tile, row0 + me_.row(), score_);
  }
  __device__ void run(const Tile& tile, int row0, const typename Op::Accumulators& acc, const Tile&, bool) {
    finish();
    tile_ = tile;
    row0_ = row0;
    if constexpr (kPlain) {
      static_for<kPieces>([&](auto piece) { pack_columns<typename Op::Element>(&acc[0][piece * 32], z_[piece]); });
      step_ = a_.store_z ? 0 : 1;
    } else {
      static_for<kActivated>([&](auto c) {
        pack_biased(c, &acc[0][c * 32], z_[c]);
        if constexpr (kGated) pack_biased(kActivated + c, &acc[0][(kActivated + c) * 32], z_[kActivated + c]);
        if (a_.store_z) write_z(c);
        write_a(c);
      });
    }
  }

  /// One step: z's pieces of 64 columns of a, or those of a.
  __device__ void between() {
    const int now = step_;
    static_for<2 * kActivated>([&](auto step) {
      if (now != step) return;
      if constexpr (step % 2 == 1) write_a(step / 2);
      else write_z(step / 2);
    });
    step_ = now + (a_.store_z ? 1 : 2);
  }
  __device__ bool pending() const { return kPlain && step_ < 2 * kActivated; }
  __device__ void finish() {
    if constexpr (kPlain)
      while (pending()) between();
  }

 private:
  __device__ bool inside(int c) const { return row0_ < tile_.rows && column(c) < a_.n_size; }
  __device__ int column(int c) const { return tile_.n * kColumns + c * 64; }
  __device__ RowPlace place(int c) const { return RowPlace(tile_, row0_, column(c)); }

  __device__ __forceinline__ void write_z(int c) {
    const std::uint32_t tile = staging_.acquire();
    put_tile(tile, me_, z_[c]);
    if constexpr (kGated) put_tile(tile + kStoreTileBytes, me_, z_[kActivated + c]);
    staging_.publish([&] {
      if (!inside(c)) return;
      place(c).store(a_.store[0], tile);
      if constexpr (kGated) place(c).store(a_.store[1], tile + kStoreTileBytes);
    });
  }

  __device__ __forceinline__ void write_a(int c) {
    const std::uint32_t tile = staging_.acquire();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      std::uint32_t pairs[4];
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        keep_here(z_[c][4 * j + x]);
        if constexpr (kGated) keep_here(z_[kActivated + c][4 * j + x]);
        const float2 g = unpack<typename Op::Element>(z_[c][4 * j + x]);
        const float2 u = kGated ? unpack<typename Op::Element>(z_[kGated ? kActivated + c : 0][4 * j + x]) : float2{0, 0};
        pairs[x] = pack<typename Op::Element>(value(g.x, u.x, x & 1), value(g.y, u.y, x & 1));
      }
      put_quarter(tile, me_, j, pairs);
    }
    staging_.publish([&] {
      if (inside(c)) place(c).store(a_.store[2], tile);
    });
  }

  /// sa * act(sz * z), with factors instead of a question at every element.
  __device__ float value(float gate, float up, int half) const {
    constexpr ScorePlacement kNone = ScorePlacement::output;
    if constexpr (kPlain) return activated<FastFloat>(Act{}, gate, up, 1.0f, kNone).v;
    const float s = score_[half];
    const FastFloat sz = a_.score_on == ScorePlacement::input ? s : 1.0f, sa = a_.score_on == ScorePlacement::inside ? s : 1.0f;
    return (sa * activated<FastFloat>(Act{}, sz * FastFloat(gate), sz * FastFloat(up), 1.0f, kNone)).v;
  }

  __device__ void pack_biased(int piece, const float* f, std::uint32_t (&pairs)[16]) const {
    const int first = column(piece % kActivated);
    float b[16];
    load_bias(a_.bias, tile_.expert, {a_.bias.out.block, a_.n_size, first, piece >= kActivated}, first, a_.n_size, me_.lane, b);
#pragma unroll
    for (int i = 0; i < 16; ++i)
      pairs[i] = pack<typename Op::Element>(f[2 * i] + b[i / 2 * 2], f[2 * i + 1] + b[i / 2 * 2 + 1]);
  }

  const GemmArguments<typename Op::Element>& a_;
  const ConsumerThread me_;
  Staging<2, 2> staging_;
  std::uint32_t z_[kPieces][16];
  Tile tile_{};  // that z_ is of
  int row0_ = 0, step_ = 2 * kActivated;
  float score_[2];
};

template <class Op, bool kPlain>
class StoreEpilogue : public NothingAhead {
  static_assert(kPlain || Op::kBlocksM == 1);

 public:
  static constexpr int kStagingBytes = TileStores<Op, false>::kBytes;
  static constexpr int kBarriers = 0;

  __device__ StoreEpilogue(const GemmArguments<typename Op::Element>& a, std::uint32_t staging, std::uint32_t,
                           ConsumerThread me)
      : a_(a), me_(me), stores_(staging, me) {}
  __device__ bool pending() const { return stores_.pending(); }
  __device__ void between() { stores_.between(*this); }
  __device__ void finish() { stores_.finish(*this); }

  __device__ void products_issued(const Tile& tile, int row0) {
    if constexpr (!kPlain) load_scores(a_.scores, tile, row0 + me_.row(), score_);
  }
  __device__ void run(const Tile& tile, int row0, const typename Op::Accumulators& acc, const Tile&, bool) {
    finish();
    tile_ = tile;
    row0_ = row0;
    stores_.take(
        [&](int m, int c, std::uint32_t (&pairs)[16]) {
          const float* f = &acc[m][c * 32];
          if (kPlain || (!a_.bias.data && !a_.scores.values)) pack_columns<typename Op::Element>(f, pairs);
          else pack_weighted(tile.n * Op::kTileN + c * 64, f, pairs);
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
  __device__ void pack_weighted(int first, const float* f, std::uint32_t (&pairs)[16]) const {
    float b[16];
    load_bias(a_.bias, tile_.expert, {0, a_.n_size, first, false}, first, a_.n_size, me_.lane, b);
    const bool output = a_.score_on == ScorePlacement::output, input = a_.score_on == ScorePlacement::input;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float s = score_[i & 1], of_sum = output ? s : 1.0f, of_bias = input ? 1.0f : s, *add = &b[i / 2 * 2];
      pairs[i] = pack<typename Op::Element>(of_sum * f[2 * i] + of_bias * add[0], of_sum * f[2 * i + 1] + of_bias * add[1]);
    }
  }

  const GemmArguments<typename Op::Element>& a_;
  const ConsumerThread me_;
  TileStores<Op, false> stores_;
  Tile tile_{};  // that stores_ has
  int row0_ = 0;
  float score_[2];
};

/// Straight from registers: the four threads of a row write 32 bytes of it (16 of 16-bit logits) at a time, and any E and
/// alignment will do. What differs from call to call is asked once and not for every column: that was ten thousand instructions
/// in a row, which no instruction cache holds.
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
