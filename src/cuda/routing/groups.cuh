// sigmoid_group's limit: only the experts of a token's best groups can be chosen.
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

/// Gives the elements outside the best groups the rank -inf. A group is worth its best two, or its only one.
template <int kThreads, int kFours, class S>
__device__ void keep_best_groups(int experts, int groups, int top_groups, S (&x)[kFours][4]) {
  using Tm = Team<kThreads>;
  const GroupRoom<S> room(Tm::index(), experts);
  const int size = experts / groups;
#pragma unroll
  for (int j = 0; j < kFours; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (const int e = four_of<kThreads>(j) + i; e < experts) room.at(e) = x[j][i];
  Tm::sync();
  for (int g = Tm::rank(); g < groups; g += kThreads) {
    S best = -INFINITY, second = -INFINITY;
    for (int e = g * size; e < (g + 1) * size; ++e) {
      const S rank = room.at(e), lower = rank < best ? rank : best;
      second = lower > second ? lower : second;
      best = rank > best ? rank : best;
    }
    room.at(g * size) = size > 1 ? best + second : best;  // its ranks have been read: the first place holds the group's worth
  }
  Tm::sync();
  for (int g = Tm::rank(); g < groups; g += kThreads) {
    const S worth = room.at(g * size);
    int better = 0;
    for (int other = 0; other < groups; ++other) {
      const S rival = room.at(other * size);
      better += rival > worth || (rival == worth && other < g);
    }
    room.keep[g] = better < top_groups;
  }
  Tm::sync();
#pragma unroll
  for (int j = 0; j < kFours; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (const int e = four_of<kThreads>(j) + i; e < experts && !room.keep[e / size]) x[j][i] = -INFINITY;
}

}  // namespace intarsia::cuda
