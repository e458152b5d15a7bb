// Every enumerator has one spelling, and parse is the inverse of to_string.
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "intarsia/config.h"
#include "intarsia/error.h"

namespace intarsia {
namespace {

template <class Enum>
void expect_round_trip(Enum last) {
  std::set<std::string_view> spellings;
  for (int i = 0; i <= static_cast<int>(last); ++i) {
    const auto value = static_cast<Enum>(i);
    EXPECT_EQ(parse<Enum>(to_string(value)), value);
    spellings.insert(to_string(value));
  }
  EXPECT_EQ(spellings.size(), static_cast<std::size_t>(last) + 1) << "two enumerators share a spelling";
  try {
    parse<Enum>("nonsense");
    ADD_FAILURE() << "nonsense was parsed";
  } catch (const InvalidArgument& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("\"nonsense\""), std::string::npos) << text;
    for (const auto spelling : spellings) EXPECT_NE(text.find(spelling), std::string::npos) << text;
  }
}

TEST(Names, RoundTrip) {
  expect_round_trip(DType::boolean);
  expect_round_trip(Activation::relu2);
  expect_round_trip(ScorePlacement::input);
  expect_round_trip(SaveMode::input);
  expect_round_trip(RouterScores::sigmoid);
  expect_round_trip(Rounding::balanced);
  expect_round_trip(BalanceNormalisation::megatron);
  expect_round_trip(Backend::cuda);
}

TEST(Names, AreTheDocumentedOnes) {
  EXPECT_EQ(to_string(Activation::clamped_swiglu), "clamped_swiglu");
  EXPECT_EQ(to_string(RouterScores::sigmoid_group), "sigmoid_group");
  EXPECT_EQ(to_string(SaveMode::input), "input");
  EXPECT_EQ(to_string(DType::bfloat16), "bfloat16");
}

TEST(Names, BytesOfADType) {
  EXPECT_EQ(size_of(DType::float64), 8u);
  EXPECT_EQ(size_of(DType::float32), 4u);
  EXPECT_EQ(size_of(DType::bfloat16), 2u);
  EXPECT_EQ(size_of(DType::float16), 2u);
  EXPECT_EQ(size_of(DType::int64), 8u);
  EXPECT_EQ(size_of(DType::int32), 4u);
  EXPECT_EQ(size_of(DType::boolean), 1u);
}

}  // namespace
}  // namespace intarsia
