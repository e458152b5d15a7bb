// sigmoid_group's limit: only the experts of a token's best groups can be chosen. Ties go to the group that comes first.
#pragma once

#include "cuda/routing/team.cuh"

namespace intarsia::cuda {

/// A team's room in shared memory for the ranks of a row while its groups are compared. A group's elements are read by one
/// thread: the place of an element is shifted by one for every 32, so that threads do not meet in a bank when a group's size is
/// a multiple of 32.
template <class S>
struct GroupRoom {
  S* rank;
  bool* keep;  // of each group

  static constexpr __host__ __device__ int rank_bytes(int experts) {
    return (experts + experts / 32) * static_cast<int>(sizeof(S));
  }
  static constexpr __host__ __device__ int bytes(int experts) { return (rank_bytes(experts) + experts + 15) / 16 * 16; }
  __device__ GroupRoom(int team, int experts) {
    extern __shared__ __align__(16) unsigned char group_rooms[];
    unsigned char* const mine = group_rooms + team * bytes(experts);
    rank = reinterpret_cast<S*>(mine);
    keep = reinterpret_cast<bool*>(mine + rank_bytes(experts));
  }
  __device__ __forceinline__ S& at(int e) const { return rank[e + e / 32]; }
};

/// A group's best two ranks; it is worth their sum, or its only one.
template <class S>
struct BestTwo {
  S best = -INFINITY, second = -INFINITY;
  __device__ __forceinline__ void add(S rank) {
    const S lower = rank < best ? rank : best;
    second = lower > second ? lower : second;
    best = rank > best ? rank : best;
  }
};

/// Whether a group comes before another by worth, then by number.
template <class S>
__device__ __forceinline__ bool comes_before(S worth, int group, S other_worth, int other) {
  return worth > other_worth || (worth == other_worth && group < other);
}

/// Groups of whole fours in 1, 2, 4 ... neighbouring threads of a team within a warp: by shuffles.
template <int kThreads, int kFours, class S>
__device__ __forceinline__ void keep_best_neighbours(int groups, int top_groups, int threads, S (&x)[kFours][4]) {
  const int each = kThreads / threads, mine = Team<kThreads>::rank() / threads;  // groups of the fours j; group j * each + mine
  S worth[kFours];
  int better[kFours] = {};
#pragma unroll
  for (int j = 0; j < kFours; ++j) {
    BestTwo<S> two;
#pragma unroll
    for (int i = 0; i < 4; ++i) two.add(x[j][i]);
    for (int offset = 1; offset < threads; offset *= 2) {
      const S best = __shfl_xor_sync(kAllLanes, two.best, offset), second = __shfl_xor_sync(kAllLanes, two.second, offset);
      two.add(best);
      two.add(second);
    }
    worth[j] = two.best + two.second;
  }
#pragma unroll
  for (int other_j = 0; other_j < kFours; ++other_j)
    for (int i = 0; i < each; ++i) {
      const S rival = __shfl_sync(kAllLanes, worth[other_j], i * threads, kThreads);
      const int other = other_j * each + i;
      if (other >= groups) continue;
#pragma unroll
      for (int j = 0; j < kFours; ++j) better[j] += comes_before(rival, other, worth[j], j * each + mine);
    }
#pragma unroll
  for (int j = 0; j < kFours; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) x[j][i] = better[j] < top_groups ? x[j][i] : S(-INFINITY);
}

/// Gives the elements outside the best groups the rank -inf.
template <int kThreads, int kFours, class S>
__device__ void keep_best_groups(int experts, int groups, int top_groups, S (&x)[kFours][4]) {
  using Tm = Team<kThreads>;
  const int size = experts / groups, threads = size / 4;
  if constexpr (Tm::kWarps == 1)
    if (size % 4 == 0 && (threads & (threads - 1)) == 0 && threads <= kThreads)
      return keep_best_neighbours<kThreads>(groups, top_groups, threads, x);

  const GroupRoom<S> room(Tm::index(), experts);
#pragma unroll
  for (int j = 0; j < kFours; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (const int e = four_of<kThreads>(j) + i; e < experts) room.at(e) = x[j][i];
  Tm::sync();
  for (int g = Tm::rank(); g < groups; g += kThreads) {
    BestTwo<S> two;
    for (int e = g * size; e < (g + 1) * size; ++e) two.add(room.at(e));
    // Its ranks have been read: the first place holds the group's worth.
    room.at(g * size) = size > 1 ? two.best + two.second : two.best;
  }
  Tm::sync();
  for (int g = Tm::rank(); g < groups; g += kThreads) {
    const S worth = room.at(g * size);
    int better = 0;
    for (int other = 0; other < groups; ++other) better += comes_before(room.at(other * size), other, worth, g);
    room.keep[g] = better < top_groups;
  }
  Tm::sync();
#pragma unroll
  for (int j = 0; j < kFours; ++j) {
    const int first = four_of<kThreads>(j);
    int g = first / size, end = (g + 1) * size;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (first + i == end) ++g, end += size;
      if (first + i < experts && !room.keep[g]) x[j][i] = -INFINITY;
    }
  }
}

}  // namespace intarsia::cuda
