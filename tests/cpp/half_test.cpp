// bfloat16 and float16: every bit pattern, and every rounding boundary between neighbours.
#include "base/half.h"

#include <gtest/gtest.h>

#include <cmath>

namespace intarsia {
namespace {

struct Format {
  int exponent_bits, mantissa_bits;
};
constexpr Format kBfloat16{8, 7}, kFloat16{5, 10};

/// The value of a bit pattern by the definition of the format.
double decode(std::uint16_t bits, Format f) {
  const int mantissa_mask = (1 << f.mantissa_bits) - 1, top = (1 << f.exponent_bits) - 1, bias = top / 2;
  const int mantissa = bits & mantissa_mask, exponent = (bits >> f.mantissa_bits) & top;
  const double sign = bits & 0x8000 ? -1 : 1;
  if (exponent == top) return mantissa ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - f.mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << f.mantissa_bits), exponent - bias - f.mantissa_bits);
}

template <class Half>
Half from_bits(std::uint16_t bits) {
  return std::bit_cast<Half>(bits);
}

template <class Half>
void expect_every_pattern(Format f) {
  for (std::uint32_t b = 0; b < 0x10000; ++b) {
    const auto bits = static_cast<std::uint16_t>(b);
    const double expected = decode(bits, f);
    const float value = from_bits<Half>(bits);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(value)) << bits;
      ASSERT_TRUE(std::isnan(static_cast<float>(Half(value)))) << bits;
      continue;
    }
    ASSERT_EQ(value, expected) << bits;
    ASSERT_EQ(std::signbit(value), (bits & 0x8000) != 0) << bits;
    ASSERT_EQ(Half(value).bits, bits);
  }
}

/// Between neighbours: the middle goes to the even one, anything off the middle to the nearer one.
template <class Half>
void expect_nearest_even(Format f) {
  const auto infinity = static_cast<std::uint16_t>(((1 << f.exponent_bits) - 1) << f.mantissa_bits);
  for (std::uint16_t low = 0; low + 1 < infinity; ++low) {
    const auto high = static_cast<std::uint16_t>(low + 1);
    const auto middle = static_cast<float>((decode(low, f) + decode(high, f)) / 2);
    ASSERT_EQ(Half(middle).bits, low % 2 == 0 ? low : high);
    ASSERT_EQ(Half(std::nextafter(middle, 0.0f)).bits, low);
    ASSERT_EQ(Half(std::nextafter(middle, INFINITY)).bits, high);
    ASSERT_EQ(Half(-middle).bits, Half(middle).bits | 0x8000);
  }
}

TEST(Bfloat16, EveryPatternSurvives) { expect_every_pattern<bfloat16>(kBfloat16); }
TEST(Float16, EveryPatternSurvives) { expect_every_pattern<float16>(kFloat16); }
TEST(Bfloat16, RoundsToNearestEven) { expect_nearest_even<bfloat16>(kBfloat16); }
TEST(Float16, RoundsToNearestEven) { expect_nearest_even<float16>(kFloat16); }

TEST(Bfloat16, OverflowsToInfinityAndKeepsNaN) {
  EXPECT_EQ(bfloat16(std::numeric_limits<float>::max()).bits, 0x7f80);
  EXPECT_EQ(bfloat16(-INFINITY).bits, 0xff80);
  // a NaN whose upper half looks like infinity
  EXPECT_TRUE(std::isnan(static_cast<float>(bfloat16(std::bit_cast<float>(0x7f800001u)))));
  EXPECT_TRUE(std::isnan(static_cast<float>(bfloat16(std::bit_cast<float>(0xffffffffu)))));
}

TEST(Float16, OverflowsToInfinity) {
  EXPECT_EQ(float16(65504.0f).bits, 0x7bff);
  EXPECT_EQ(float16(65520.0f).bits, 0x7c00);
  EXPECT_EQ(float16(1e-9f).bits, 0x0000);
}

}  // namespace
}  // namespace intarsia
