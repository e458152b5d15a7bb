// bfloat16 and float16 as storage types: conversions round to nearest even; arithmetic happens in float.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace intarsia {

struct bfloat16 {
  std::uint16_t bits;

  bfloat16() = default;
  explicit bfloat16(float value) {
    const auto u = std::bit_cast<std::uint32_t>(value);
    const bool nan = (u & 0x7fffffffu) > 0x7f800000u;
    bits = nan ? static_cast<std::uint16_t>((u >> 16) | 0x40u)
               : static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
  }
  operator float() const { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }
};

struct float16 {
  std::uint16_t bits;

  float16() = default;
  explicit float16(float value) : bits(std::bit_cast<std::uint16_t>(static_cast<_Float16>(value))) {}
  operator float() const { return static_cast<float>(std::bit_cast<_Float16>(bits)); }
};

static_assert(sizeof(bfloat16) == 2 && sizeof(float16) == 2);

/// The type arithmetic on T happens in: double for double, float for all others.
template <class T>
using Accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

}  // namespace intarsia
