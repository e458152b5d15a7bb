// Rows of logits on the GPU: a row's softmax in two numbers.
#pragma once

#include "base/softmax.h"
#include "cuda/routing/kernel.cuh"

namespace intarsia::cuda {

inline bool by_sigmoid(RouterScores kind) { return kind == RouterScores::sigmoid || kind == RouterScores::sigmoid_group; }

/// p(x) = exp(x - largest) / sum. `sum` is 0 for a token that is not valid: masked, a NaN, or an infinite largest logit.
template <class S>
struct RowSoftmax {
  S largest, sum;
  __device__ __forceinline__ bool valid() const { return sum > S(0); }
  __device__ __forceinline__ S operator()(S x) const { return exp(x - largest) / sum; }
  __device__ __forceinline__ S log_sum_exp() const { return largest + log(sum); }
};

/// What a logit is worth to the softmax: itself, or its log-sigmoid where probabilities are shares of sigmoids.
template <class S>
__device__ __forceinline__ S softmax_argument(S logit, bool sigmoid_share) {
  return sigmoid_share ? log_sigmoid(logit) : logit;
}

/// Softmax of row t by one warp, in two passes over the row. `allowed`: false gives a token that is not valid.
template <class T, class S = Wide<T>>
__device__ RowSoftmax<S> warp_softmax(const Rows<const T>& logits, std::int64_t t, int experts, bool allowed,
                                      bool sigmoid_share) {
  S largest = -INFINITY;
  bool nan = false;
  if (allowed) {
    for (int e = lane_index(); e < experts; e += kWarpSize) {
      const S x = widen(*logits.at(t, e));
      nan |= x != x;
      largest = x > largest ? x : largest;
    }
  }
  largest = warp_reduce(largest, Max{});
  if (__any_sync(kAllLanes, nan) || !(fabs(largest) < S(INFINITY))) return {S(0), S(0)};

  largest = softmax_argument(largest, sigmoid_share);  // monotonic: the largest stays the largest
  S sum = S(0);
  for (int e = lane_index(); e < experts; e += kWarpSize)
    sum += exp(softmax_argument(static_cast<S>(widen(*logits.at(t, e))), sigmoid_share) - largest);
  return {largest, warp_reduce(sum, Add{})};
}

}  // namespace intarsia::cuda
