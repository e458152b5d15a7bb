// Random numbers without state: a number is a function of a seed and a counter, so no order of evaluation can change it.
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace intarsia {

/// The finaliser of splitmix64: a bijection in which every input bit reaches every output bit.
INTARSIA_HOST_DEVICE constexpr std::uint64_t mix_bits(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/// Uniform in [0, 1), 53 bits. The seed is mixed first, so that neighbouring seeds do not give shifted sequences.
INTARSIA_HOST_DEVICE constexpr double uniform01(std::uint64_t seed, std::uint64_t counter) {
  constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15u;
  return static_cast<double>(mix_bits(mix_bits(seed + kGolden) + kGolden * (counter + 1)) >> 11) * 0x1p-53;
}

}  // namespace intarsia
