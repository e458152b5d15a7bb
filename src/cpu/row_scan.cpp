#include "cpu/row_scan.h"

#include <algorithm>
#include <bit>

#include "cpu/clones.h"

namespace intarsia::cpu {
namespace {

constexpr std::int64_t kBlock = 16;

/// Orders as (rank, then lowest index): larger is better, and no two are equal.
inline std::uint64_t rank_key(float rank, std::int64_t index) {
  const auto bits = std::bit_cast<std::uint32_t>(rank + 0.0f);  // -0 becomes 0: they are a tie
  const std::uint32_t sign = 0u - (bits >> 31);
  return static_cast<std::uint64_t>(bits ^ (sign | 0x80000000u)) << 32 | ~static_cast<std::uint32_t>(index);
}

inline std::uint64_t largest(const std::uint64_t* keys, std::int64_t n) {
  std::uint64_t best = 0;
  for (std::int64_t i = 0; i < n; ++i) best = keys[i] > best ? keys[i] : best;
  return best;
}

}  // namespace

INTARSIA_CLONES bool routable_row(const float* logits, std::int64_t n) {
  constexpr std::uint32_t kInfinity = 0x7f800000u, kSign = 0x80000000u;
  std::uint32_t bad = 0, above = 0;  // NaN or +inf anywhere; anything that is not -inf
  for (std::int64_t i = 0; i < n; ++i) {
    const auto bits = std::bit_cast<std::uint32_t>(logits[i]);
    bad |= static_cast<std::uint32_t>((bits & ~kSign) > kInfinity) | static_cast<std::uint32_t>(bits == kInfinity);
    above |= bits ^ (kInfinity | kSign);
  }
  return bad == 0 && above != 0;
}

// A tournament: the best of each block of 16 is kept, so a round looks at those and at one block.
INTARSIA_CLONES void top_k(const float* rank, std::int64_t n, std::int64_t k, std::uint64_t* scratch, std::int32_t* chosen) {
  std::uint64_t* const keys = scratch;
  std::uint64_t* const best = scratch + n;
  const std::int64_t blocks = (n + kBlock - 1) / kBlock;
  for (std::int64_t i = 0; i < n; ++i) keys[i] = rank_key(rank[i], i);
  for (std::int64_t b = 0; b < blocks; ++b) best[b] = largest(keys + b * kBlock, std::min(kBlock, n - b * kBlock));
  for (std::int64_t j = 0; j < k; ++j) {
    const auto winner = static_cast<std::int32_t>(~static_cast<std::uint32_t>(largest(best, blocks)));
    chosen[j] = winner;
    keys[winner] = 0;
    const std::int64_t b = winner / kBlock;
    best[b] = largest(keys + b * kBlock, std::min(kBlock, n - b * kBlock));
  }
}

}  // namespace intarsia::cpu
