// The k largest of a row that lies in the registers of a team of threads, ties to the lowest index, compared with all bits.
// Each four is sorted once; a round finds the team's largest head, and the thread that had it moves its four up. Of a long row
// of one warp only the few numbers that can be among them are looked at, where they are few.
#pragma once

#include <climits>

#include "cuda/routing/team.cuh"

namespace intarsia::cuda {

/// An unsigned integer that orders as the number does. 0 orders below every number: it marks "none".
__device__ __forceinline__ std::uint32_t order_key(float x) {
  const std::uint32_t bits = __float_as_uint(x + 0.0f);  // -0 and 0 are equal
  const std::uint32_t key = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return key ? key : 1u;
}
__device__ __forceinline__ std::uint64_t order_key(double x) {
  const auto bits = static_cast<std::uint64_t>(__double_as_longlong(x + 0.0));
  const std::uint64_t key = bits >> 63 ? ~bits : bits | 0x8000000000000000u;
  return key ? key : 1u;
}
__device__ __forceinline__ float number_of(std::uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}
__device__ __forceinline__ double number_of(std::uint64_t key) {
  return __longlong_as_double(static_cast<long long>(key >> 63 ? key & 0x7fffffffffffffffu : ~key));
}

template <class S>
using OrderKey = std::conditional_t<std::is_same_v<S, double>, std::uint64_t, std::uint32_t>;

// ---- the largest of a team

template <class Key>
struct Candidate {
  Key key;
  int index;
  __device__ __forceinline__ bool beats(const Candidate& other) const {
    return key > other.key || (key == other.key && index < other.index);
  }
};

template <int kThreads, class Key>
__device__ __forceinline__ Key team_max(Key key) {
  if constexpr (kThreads == kWarpSize && sizeof(Key) == 4) return __reduce_max_sync(kAllLanes, key);
  else return Team<kThreads>::reduce(key, Max{});
}

/// The best candidate of a warp's part of the team.
template <int kThreads, class Key>
__device__ __forceinline__ Candidate<Key> lanes_best(Candidate<Key> mine) {
  constexpr int kLanes = Team<kThreads>::kLanes;
  const Key key = team_max<kLanes>(mine.key);
  auto index = mine.key == key ? static_cast<unsigned>(mine.index) : UINT_MAX;
  if constexpr (kLanes == kWarpSize) {
    index = __reduce_min_sync(kAllLanes, index);
  } else {
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) index = min(index, __shfl_xor_sync(kAllLanes, index, offset));
  }
  return {key, static_cast<int>(index)};
}

template <int kThreads, class Key>
__device__ __forceinline__ Candidate<Key> team_best(Candidate<Key> mine) {
  mine = lanes_best<kThreads>(mine);
  if constexpr (constexpr int kWarps = Team<kThreads>::kWarps; kWarps > 1) {
    __shared__ Candidate<Key> of_warp[kWarps];
    __syncthreads();
    if (lane_index() == 0) of_warp[warp_index()] = mine;
    __syncthreads();
    for (int w = 0; w < kWarps; ++w)
      if (of_warp[w].beats(mine)) mine = of_warp[w];
  }
  return mine;
}

/// The largest number of a row; infinity when there is a NaN.
template <int kThreads, int kFours, class S>
__device__ __forceinline__ S team_largest(const S (&x)[kFours][4]) {
  S largest = -INFINITY;
  bool nan = false;
#pragma unroll
  for (int j = 0; j < kFours; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      nan |= x[j][i] != x[j][i];
      largest = x[j][i] > largest ? x[j][i] : largest;
    }
  return number_of(team_max<kThreads>(order_key(nan ? S(INFINITY) : largest)));
}

// ---- the choice

/// Four neighbouring elements, the largest first, of equal ones the one that lies first.
template <class Key>
struct Four {
  Key key[4];
  std::uint32_t order;  // byte i: which of the four key[i] is

  template <class S>
  __device__ __forceinline__ void sort(const S (&x)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) key[i] = order_key(x[i]);
    order = 0x03020100;
    exchange<0>(), exchange<2>(), exchange<1>();  // of neighbours only, so that equal ones stay as they are
    exchange<0>(), exchange<2>(), exchange<1>();
  }
  __device__ __forceinline__ int first() const { return static_cast<int>(order & 0xff); }
  /// Takes the first away, if it is `taken`; past the last there are keys 0. By selection: a branch would let the compiler
  /// index the fours at run time, in local memory.
  __device__ __forceinline__ void pop(bool taken) {
#pragma unroll
    for (int i = 0; i < 3; ++i) key[i] = taken ? key[i + 1] : key[i];
    key[3] = taken ? 0 : key[3];
    order = taken ? order >> 8 : order;
  }

 private:
  template <int i>
  __device__ __forceinline__ void exchange() {
    constexpr std::uint32_t kSwapped = i == 0 ? 0x3201 : i == 1 ? 0x3120 : 0x2310;  // bytes i and i + 1
    const bool swap = key[i + 1] > key[i];
    const Key low = swap ? key[i] : key[i + 1];
    key[i] = swap ? key[i + 1] : key[i];
    key[i + 1] = low;
    order = swap ? __byte_perm(order, 0, kSwapped) : order;
  }
};

constexpr int kMostFiltered = 16;  // choices: of more, the candidates are too often more than a warp

/// For a long row of one warp: the numbers from the k-th largest of the lanes' largest on, among which the k largest are, one a
/// lane. With 16 numbers a lane and k = 10 they are about 12. False when they are more than a warp (ties), or when NaNs left
/// too few.
template <int kFours>
__device__ __forceinline__ bool few_candidates(const float (&x)[kFours][4], int k_count, Candidate<std::uint32_t>& mine) {
  struct Found {
    float x;
    int index;
  };
  __shared__ Found found[Team<kWarpSize>::kTokens][kWarpSize];
  float largest = -INFINITY;
#pragma unroll
  for (int j = 0; j < kFours; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) largest = fmaxf(largest, x[j][i]);
  std::uint32_t left = order_key(largest), bound = 0;
  for (int k = 0; k < k_count; ++k) {
    bound = __reduce_max_sync(kAllLanes, left);
    left = left == bound ? 0 : left;
  }
  const float least = number_of(bound);
  int count = 0;
#pragma unroll
  for (int j = 0; j < kFours; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool here = !(x[j][i] < least);  // a NaN, of a bias that is one, ranks as its bits do
      const unsigned lanes = __ballot_sync(kAllLanes, here);
      if (lanes == 0) continue;
      const int place = count + __popc(lanes & lanes_below());
      if (here && place < kWarpSize) found[warp_index()][place] = {x[j][i], four_of<kWarpSize>(j) + i};
      count += __popc(lanes);
    }
  if (count < k_count || count > kWarpSize) return false;
  __syncwarp();
  mine = {0, INT_MAX};
  if (lane_index() < count) {
    const Found f = found[warp_index()][lane_index()];
    mine = {order_key(f.x), f.index};
  }
  return true;
}

/// Slot i of thread `rank` gets choice rank + i * kThreads, if there is one.
template <int kThreads, int kFours, int kSlots, class S>
__device__ __forceinline__ void team_top_k(const S (&x)[kFours][4], int k_count, Candidate<OrderKey<S>> (&chosen)[kSlots]) {
  using Key = OrderKey<S>;
  const auto keep = [&](int k, const Candidate<Key>& winner) {
#pragma unroll
    for (int i = 0; i < kSlots; ++i)
      if (k == i * kThreads + Team<kThreads>::rank()) chosen[i] = winner;
  };
  if constexpr (kThreads == kWarpSize && kFours >= 4 && std::is_same_v<S, float>) {
    if (Candidate<Key> mine; k_count <= kMostFiltered && few_candidates(x, k_count, mine)) {
      for (int k = 0; k < k_count; ++k) {
        const Candidate<Key> winner = team_best<kThreads>(mine);
        if (winner.index == mine.index) mine.key = 0;
        keep(k, winner);
      }
      return;
    }
  }

  Four<Key> four[kFours];
#pragma unroll
  for (int j = 0; j < kFours; ++j) four[j].sort(x[j]);
  for (int k = 0; k < k_count; ++k) {
    Candidate<Key> mine{four[0].key[0], four_of<kThreads>(0) + four[0].first()};
#pragma unroll
    for (int j = 1; j < kFours; ++j)
      if (four[j].key[0] > mine.key) mine = {four[j].key[0], four_of<kThreads>(j) + four[j].first()};
    const Candidate<Key> winner = team_best<kThreads>(mine);
#pragma unroll
    for (int j = 0; j < kFours; ++j)
      four[j].pop(winner.index == mine.index && (kFours == 1 || winner.index / (4 * kThreads) == j));
    keep(k, winner);
  }
}

}  // namespace intarsia::cuda
