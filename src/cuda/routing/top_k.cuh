// The k largest of a row that lies in the registers of a team of threads, ties to the lowest index, compared with all bits.
#pragma once

#include <climits>

#include "cuda/routing/kernel.cuh"

namespace intarsia::cuda {

/// An unsigned integer that orders as the number does. 0 orders below every number: it marks "none".
__device__ __forceinline__ std::uint32_t order_key(float x) {
  const std::uint32_t bits = __float_as_uint(x == 0.0f ? 0.0f : x);  // -0 and 0 are equal
  const std::uint32_t key = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return key ? key : 1u;
}
__device__ __forceinline__ std::uint64_t order_key(double x) {
  const auto bits = static_cast<std::uint64_t>(__double_as_longlong(x == 0.0 ? 0.0 : x));
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

template <class Key>
struct Candidate {
  Key key;
  int index;
  __device__ __forceinline__ bool beats(const Candidate& other) const {
    return key > other.key || (key == other.key && index < other.index);
  }
};

__device__ __forceinline__ Candidate<std::uint32_t> warp_best(Candidate<std::uint32_t> mine) {
  const std::uint32_t key = __reduce_max_sync(kAllLanes, mine.key);
  return {key, static_cast<int>(__reduce_min_sync(kAllLanes, mine.key == key ? static_cast<unsigned>(mine.index) : UINT_MAX))};
}
__device__ __forceinline__ Candidate<std::uint64_t> warp_best(Candidate<std::uint64_t> mine) {
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    const Candidate<std::uint64_t> other{__shfl_xor_sync(kAllLanes, mine.key, offset),
                                         __shfl_xor_sync(kAllLanes, mine.index, offset)};
    if (other.beats(mine)) mine = other;
  }
  return mine;
}

/// The threads that share one token: a warp, or all warps of a block. Element e of the row lies in thread e % kThreads.
template <int kWarps>
struct Team {
  static constexpr int kThreads = kWarps * kWarpSize;

  __device__ static int rank() { return static_cast<int>(threadIdx.x % kThreads); }

  __device__ static void sync() {
    if constexpr (kWarps == 1) __syncwarp();
    else __syncthreads();
  }

  template <class V, class Op>
  __device__ static V reduce(V value, Op op) {
    if constexpr (kWarps == 1) return warp_reduce(value, op);
    else return block_reduce<kWarps>(value, op);
  }

  template <class Key>
  __device__ static Candidate<Key> best(Candidate<Key> mine) {
    mine = warp_best(mine);
    if constexpr (kWarps > 1) {
      __shared__ Candidate<Key> of_warp[kWarps];
      __syncthreads();
      if (lane_index() == 0) of_warp[warp_index()] = mine;
      __syncthreads();
      for (int w = 0; w < kWarps; ++w)
        if (of_warp[w].beats(mine)) mine = of_warp[w];
    }
    return mine;
  }
};

constexpr int kMaxChoices = 64;  // of route, checked by the api

/// Choices k = rank, rank + kThreads, ... of a team are kept by thread `rank`.
template <int kWarps>
constexpr int kChoicesPerThread = (kMaxChoices + Team<kWarps>::kThreads - 1) / Team<kWarps>::kThreads;

/// chosen[i] = the index of choice rank + i * kThreads. `key` is used up: a taken element becomes 0.
template <int kWarps, int kPerThread, class Key>
__device__ __forceinline__ void team_top_k(Key (&key)[kPerThread], int k_count, int (&chosen)[kChoicesPerThread<kWarps>]) {
  using T = Team<kWarps>;
  Candidate<Key> mine{0, T::rank()};
#pragma unroll
  for (int j = 0; j < kPerThread; ++j)
    if (key[j] > mine.key) mine = {key[j], j * T::kThreads + T::rank()};

  for (int k = 0; k < k_count; ++k) {
    const Candidate<Key> winner = T::best(mine);
    if (winner.index == mine.index) {
      mine = {0, T::rank()};
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) {
        if (j * T::kThreads + T::rank() == winner.index) key[j] = 0;
        if (key[j] > mine.key) mine = {key[j], j * T::kThreads + T::rank()};
      }
    }
#pragma unroll
    for (int i = 0; i < kChoicesPerThread<kWarps>; ++i)
      if (k == i * T::kThreads + T::rank()) chosen[i] = winner.index;
  }
}

}  // namespace intarsia::cuda
