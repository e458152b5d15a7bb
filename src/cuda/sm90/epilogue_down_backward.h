// Epilogue of down_backward: the tile is da' = dy[row_token] w_down; with z loaded by TMA in 64 x 64 pieces,
//   ds += <da', a>;  da = s da';  dz = act'(z) da;  a' = s a        with a = act(z)
// for scores on the output or inside; on the input (kScoreOnInput)
//   da = da';  dz = s act'(s z) da;  a' = a;  ds += <act'(s z) da, z>    with a = act(s z)
// z comes through a ring of pieces (a gate and an up tile each) that runs on from tile to tile: the slot of a piece that has
// left takes the piece kSlots on, which is often the next tile's, so that z is there when a main loop ends. In ping-pong the
// two warpgroups share the ring, and their epilogues take turns; else each has its own. dz overwrites the tiles it came from
// before they are stored. Rows are private to a warp, so within a piece __syncwarp is enough. Each (row, n tile) has one
// partial ds, summed later in fixed order.
#pragma once

#include "cuda/row_dots.h"
#include "cuda/sm90/epilogue_rows.h"
#include "cuda/sm90/producer.h"

namespace intarsia::cuda::sm90 {

/// Act is one activation, not a choice at run time: sixteen switches in the unrolled loop below compile for minutes.
template <class Op, class Act, bool kScoreOnInput>
class DownBackwardEpilogue : public NothingPending {
  static constexpr bool kGated = Act::kGated, kShared = Op::kPingPong;
  static constexpr int kSlots = Op::kConfig.z_slots, kRings = kShared ? 1 : kConsumers;
  static constexpr int kColumnPieces = Op::kTileN / 64, kPieces = Op::kBlocksM * kColumnPieces, kScores = 2 * Op::kBlocksM;
  static constexpr int kSlotBytes = (kGated ? 2 : 1) * kStoreTileBytes, kRingBytes = kSlots * kSlotBytes;
  static_assert(kSlots <= kPieces);

 public:
  static constexpr int kStagingBytes = kRings * kRingBytes + kConsumers * kStoreTileBytes;  // and a tile of a' a warpgroup
  static constexpr int kBarriers = kRings * kSlots;

  __device__ DownBackwardEpilogue(const GemmArguments<typename Op::Element>& a, std::uint32_t staging, std::uint32_t barriers,
                                  ConsumerThread me)
      : a_(a),
        me_(me),
        ring_(staging + (kShared ? 0 : me.warpgroup) * kRingBytes),
        a_tile_(staging + kRings * kRingBytes + me.warpgroup * kStoreTileBytes),
        barriers_(barriers + (kShared ? 0 : me.warpgroup) * kSlots * 8) {}

  /// The first pieces of the CTA's first tile.
  __device__ void start(const Tile& tile) {
    if (kShared && me_.warpgroup != 0) return;
    if constexpr (kShared) ptx::named_arrive(kBarrierOfTurn, 256);
    if (me_.leads())
#pragma unroll
      for (int piece = 0; piece < kSlots; ++piece) load_z(tile, piece, piece);
  }
  /// The other warpgroup takes this tile.
  __device__ void skip() { ring_state_.advance(kPieces); }
  /// Nobody wants this tile: its pieces pass, and the next ones are asked for.
  __device__ void pass(const Tile& tile, const Tile& next, bool more) {
    wait_for_turn();
#pragma unroll 1
    for (int piece = 0; piece < kPieces; ++piece) {
      ptx::barrier_wait(barriers_ + ring_state_.stage * 8, ring_state_.phase);
      if (piece == kPieces - 1) pass_turn();
      me_.sync();
      if (me_.leads()) reload(piece, ring_state_.stage, tile, next, more);
      ring_state_.advance();
    }
  }

  /// Before the main loop: where the scores of the thread's rows lie, which nobody looks at before the main loop is over, and
  /// the pieces of z that are not on their way yet into the L2.
  __device__ void begin(const Tile& tile, int row0) {
    list_scores(a_.scores, tile, row0 + me_.row(), slot_of_score_);
    if (kSlots < kPieces && me_.leads()) {
#pragma unroll
      for (int piece = kSlots; piece < kPieces; ++piece) {
        const RowPlace place = place_of(tile, piece);
        ptx::prefetch_box(a_.z[0], place.column, place.row, place.fold, place.last);
        if constexpr (kGated) ptx::prefetch_box(a_.z[1], place.column, place.row, place.fold, place.last);
      }
    }
    __syncwarp();
  }

  /// The last products of the main loop run: the scores arrive beside them.
  __device__ void products_issued(const Tile&, int) { a_.scores.at(slot_of_score_, scores_); }

  __device__ void run(const Tile& tile, int row0, typename Op::Accumulators& acc, const Tile& next, bool more) {
    wait_for_turn();
    static_for<Op::kBlocksM>([&](auto block) {
      constexpr int m = decltype(block)::value;
      const int first = row0 + m * 64;
      const float score[2] = {scores_[2 * m], scores_[2 * m + 1]};
      float dot[2] = {0, 0};
      static_for<kColumnPieces>([&](auto column_piece) {
        constexpr int c = decltype(column_piece)::value, piece = m * kColumnPieces + c;
        const std::uint32_t z_tile = ring_ + ring_state_.stage * kSlotBytes;
        ptx::barrier_wait(barriers_ + ring_state_.stage * 8, ring_state_.phase);
        if constexpr (piece == kPieces - 1) pass_turn();
        __syncwarp();
        // Scores on the input leave no registers for a' to wait in until its tile is free, so the piece waits for it.
        if constexpr (kScoreOnInput) free_a_tile();
        std::uint32_t a_pairs[16];
        static_for<4>([&](auto quarter) {
          constexpr int j = decltype(quarter)::value;
          // Half way the stores of the piece before have long read their slot, which another piece of z may take.
          if constexpr (j == 2 && piece > 0) {
            if (me_.leads()) {
              ptx::wait_stores_read<0>();
              reload(piece - 1, before_, tile, next, more);
            }
            __syncwarp();
          }
          transform(z_tile, j, &acc[m][c * 32 + 8 * j], score, dot, &a_pairs[4 * j]);
          if constexpr (kScoreOnInput)
            if (a_.store_a) put_quarter(a_tile_, me_, j, &a_pairs[4 * j]);
        });
        if constexpr (!kScoreOnInput) {
          free_a_tile();
          if (a_.store_a) put_tile(a_tile_, me_, a_pairs);
        }
        ptx::fence_async_proxy();
        me_.sync();
        const int column = tile.n * Op::kTileN + c * 64;
        if (me_.leads()) {
          if (first < tile.rows && column < a_.n_size) {
            const RowPlace place(tile, first, column);
            place.store(a_.store[0], z_tile);
            if constexpr (kGated) place.store(a_.store[1], z_tile + kStoreTileBytes);
            if (a_.store_a) place.store(a_.store[2], a_tile_);
          }
          ptx::commit_stores();
        }
        before_ = ring_state_.stage;
        ring_state_.advance();
        constexpr int kPiecesOfPart = kRowDotColumns / 64;
        if constexpr (c % kPiecesOfPart == kPiecesOfPart - 1)
          if (a_.dot_parts && column < a_.n_size + 64) store_dots(tile, first, column / kRowDotColumns, dot);
      });
    });
    if (me_.leads()) {
      ptx::wait_stores_read<0>();
      reload(kPieces - 1, before_, tile, next, more);
    }
    __syncwarp();
  }

 private:
  static constexpr int kBarrierOfTurn = 4;
  /// Two warpgroups that share the ring wait for its pieces in turn: a barrier knows two phases only.
  __device__ void wait_for_turn() const {
    if constexpr (kShared) ptx::named_sync(kBarrierOfTurn + me_.warpgroup, 256);
  }
  __device__ void pass_turn() const {
    if constexpr (kShared) ptx::named_arrive(kBarrierOfTurn + (me_.warpgroup ^ 1), 256);
  }

  /// The slot of a piece that has left takes the piece kSlots on, of this tile or the next.
  __device__ void reload(int piece, std::uint32_t slot, const Tile& tile, const Tile& next, bool more) const {
    if (piece + kSlots < kPieces) load_z(tile, piece + kSlots, slot);
    else if (more) load_z(next, piece + kSlots - kPieces, slot);
  }
  __device__ RowPlace place_of(const Tile& tile, int piece) const {
    const int row0 = tile.m * Op::kTileM + (kShared ? 0 : me_.warpgroup * 64 * Op::kBlocksM);
    return RowPlace(tile, row0 + piece / kColumnPieces * 64, tile.n * Op::kTileN + piece % kColumnPieces * 64);
  }

  /// The stores of the piece before have read the tile of a'.
  __device__ void free_a_tile() const {
    if (me_.leads()) ptx::wait_stores_read<0>();
    me_.sync();
  }

  __device__ void load_z(const Tile& tile, int piece, std::uint32_t slot) const {
    const RowPlace place = place_of(tile, piece);
    const std::uint32_t barrier = barriers_ + slot * 8, target = ring_ + slot * kSlotBytes;
    ptx::barrier_expect(barrier, kSlotBytes);
    ptx::load_box(target, a_.z[0], barrier, place.column, place.row, place.fold, place.last);
    if constexpr (kGated)
      ptx::load_box(target + kStoreTileBytes, a_.z[1], barrier, place.column, place.row, place.fold, place.last);
  }

  /// 16 columns: z from the tile, dz back into it, a' packed.
  __device__ void transform(std::uint32_t z_tile, int j, const float* da, const float (&score)[2], float (&dot)[2],
                            std::uint32_t* a_pairs) const {
    using Element = typename Op::Element;
    const std::uint32_t place = store_place(z_tile, me_.warp, me_.lane, j);
    std::uint32_t gate[4], up[4] = {};
    ptx::load_matrix(place, gate);
    if constexpr (kGated) ptx::load_matrix(place + kStoreTileBytes, up);
    constexpr ScorePlacement kOn = kScoreOnInput ? ScorePlacement::input : ScorePlacement::output;  // inside is as output here
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const int half = x & 1;
      const float2 g = unpack<Element>(gate[x]), u = unpack<Element>(up[x]);
      const FastFloat s = score[half];
      const auto d0 = down_gradient<FastFloat>(Act{}, FastFloat(g.x), FastFloat(u.x), FastFloat(da[2 * x]), s, kOn);
      const auto d1 = down_gradient<FastFloat>(Act{}, FastFloat(g.y), FastFloat(u.y), FastFloat(da[2 * x + 1]), s, kOn);
      dot[half] += d0.ds.v + d1.ds.v;
      gate[x] = pack<Element>(d0.dgate.v, d1.dgate.v);
      up[x] = pack<Element>(d0.dup.v, d1.dup.v);
      a_pairs[x] = pack<Element>(d0.a_scaled.v, d1.a_scaled.v);
    }
    __syncwarp();
    ptx::store_matrix(place, gate[0], gate[1], gate[2], gate[3]);
    if constexpr (kGated) ptx::store_matrix(place + kStoreTileBytes, up[0], up[1], up[2], up[3]);
  }

  /// The sums over one part's columns, and start anew.
  __device__ void store_dots(const Tile& tile, int first, int part, float (&dot)[2]) const {
    float* parts = a_.dot_parts + static_cast<std::int64_t>(part) * a_.schedule.capacity + tile.first_row;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float d = dot[i];
      d += __shfl_xor_sync(0xffffffffu, d, 1);
      d += __shfl_xor_sync(0xffffffffu, d, 2);
      const int row = first + me_.row() + 8 * i;
      if (me_.lane % 4 == 0 && row < tile.rows) parts[row] = d;
      dot[i] = 0;
    }
  }

  const GemmArguments<typename Op::Element>& a_;
  const ConsumerThread me_;
  const std::uint32_t ring_, a_tile_, barriers_;
  PipelineState<kSlots> ring_state_;
  std::uint32_t before_ = 0;  // slot of the piece before
  int slot_of_score_[kScores];
  float scores_[kScores];
};

}  // namespace intarsia::cuda::sm90
