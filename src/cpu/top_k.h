// The k largest of a row by insertion: one pass, and after the first few elements almost none passes the comparison.
#pragma once

#include <cstdint>

namespace intarsia::cpu {

/// chosen = the indices of the k <= n largest ranks in descending order; equal ranks by ascending index.
inline void top_k(const float* rank, std::int64_t n, std::int64_t k, std::int32_t* chosen) {
  std::int64_t count = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    if (count == k && !(rank[i] > rank[chosen[k - 1]])) continue;
    std::int64_t place = count < k ? count++ : k - 1;
    for (; place > 0 && rank[i] > rank[chosen[place - 1]]; --place) chosen[place] = chosen[place - 1];
    chosen[place] = static_cast<std::int32_t>(i);
  }
}

}  // namespace intarsia::cpu
