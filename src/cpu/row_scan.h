// Scans of one row of logits, vectorised on integers, whose maxima and sums may be taken in any order: the same answers as the
// plain loops of base/softmax.h and of the reference backend.
#pragma once

#include <cstdint>

namespace intarsia::cpu {

/// `routable` of base/softmax.h: no NaN, and a finite largest logit.
bool routable_row(const float* logits, std::int64_t n);

/// Elements of scratch that top_k needs for a row of n.
constexpr std::int64_t top_k_scratch(std::int64_t n) { return n + n / 16 + 1; }

/// chosen = the indices of the k <= n largest ranks in descending order; equal ranks by ascending index.
void top_k(const float* rank, std::int64_t n, std::int64_t k, std::uint64_t* scratch, std::int32_t* chosen);

}  // namespace intarsia::cpu
