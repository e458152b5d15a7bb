// A float whose exp, erfc and tanh are straight-line arithmetic: a loop over it vectorises, where one that calls std::exp
// cannot. It is the scalar that the CPU backend gives to the activations of base/activation.h.
#pragma once

#include <bit>
#include <cstdint>

namespace intarsia::cpu {

struct VectorFloat {
  float value;

  VectorFloat() = default;
  constexpr explicit VectorFloat(double v) : value(static_cast<float>(v)) {}
  constexpr explicit VectorFloat(float v) : value(v) {}
  constexpr explicit VectorFloat(int v) : value(static_cast<float>(v)) {}

  friend VectorFloat operator-(VectorFloat x) { return VectorFloat(-x.value); }
  friend VectorFloat operator+(VectorFloat x, VectorFloat y) { return VectorFloat(x.value + y.value); }
  friend VectorFloat operator-(VectorFloat x, VectorFloat y) { return VectorFloat(x.value - y.value); }
  friend VectorFloat operator*(VectorFloat x, VectorFloat y) { return VectorFloat(x.value * y.value); }
  friend VectorFloat operator/(VectorFloat x, VectorFloat y) { return VectorFloat(x.value / y.value); }
  friend bool operator<(VectorFloat x, VectorFloat y) { return x.value < y.value; }
  friend bool operator>(VectorFloat x, VectorFloat y) { return x.value > y.value; }
};

/// e^x within 2 ulp; 0 below and inf above float's range, subnormal results included, NaN for NaN.
inline VectorFloat exp(VectorFloat x_) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  float x = x_.value < -104.0f ? -104.0f : x_.value;
  x = x > 89.0f ? 89.0f : x;
  const float shifted = x * 1.44269504088896341f + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // n * ln 2 in two parts, the first exact
  float p = 1.9875691500e-4f;                                   // Cephes' polynomial on [-ln 2 / 2, ln 2 / 2]
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  // Times 2^n in two steps, because n leaves the exponent's range at both ends. Unsigned: n is garbage for NaN.
  const std::int32_t exponent = std::bit_cast<std::int32_t>(shifted) - std::bit_cast<std::int32_t>(kRound);
  const std::int32_t half = exponent >> 1;
  const auto power = [](std::int32_t e) { return std::bit_cast<float>((static_cast<std::uint32_t>(e) + 127u) << 23); };
  return VectorFloat(p * power(half) * power(exponent - half));
}

/// Relative error 2e-7 near zero, growing to 1e-5 in the tail at x = 9 (W. H. Press et al., Numerical Recipes, 6.2).
inline VectorFloat erfc(VectorFloat x) {
  const float z = x.value < 0.0f ? -x.value : x.value;
  const float t = 1.0f / (1.0f + 0.5f * z);
  float p = 0.17087277f;
  p = p * t - 0.82215223f;
  p = p * t + 1.48851587f;
  p = p * t - 1.13520398f;
  p = p * t + 0.27886807f;
  p = p * t - 0.18628806f;
  p = p * t + 0.09678418f;
  p = p * t + 0.37409196f;
  p = p * t + 1.00002368f;
  p = p * t - 1.26551223f;
  const float tail = t * exp(VectorFloat(p - z * z)).value;
  return VectorFloat(x.value < 0.0f ? 2.0f - tail : tail);
}

inline VectorFloat tanh(VectorFloat x) { return VectorFloat(1) - VectorFloat(2) / (VectorFloat(1) + exp(x + x)); }

}  // namespace intarsia::cpu
