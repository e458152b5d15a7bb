// The checks of src/cases can fail: a single wrong element, a write outside an output, an output left unwritten.
#include <gtest/gtest.h>

#include <cmath>

#include "cases/compare.h"
#include "cases/tensors.h"

namespace intarsia::cases {
namespace {

const std::vector<double> kValues{1, -2, 3, 4, 0.5, -6};

Comparison compare_with(DType dtype, std::int64_t i, double value) {
  Tensors t(1, Precision::stored);
  const TensorView expected = t.values(dtype, {2, 3}, kValues), actual = t.values(dtype, {2, 3}, kValues);
  set_element(actual, i, value);
  return compare("y", actual, expected, [&](std::int64_t k) { return std::abs(element(expected, k)); }, unit(dtype));
}

TEST(Compare, EqualTensorsPass) {
  for (const DType dtype : {DType::float64, DType::float32, DType::bfloat16, DType::float16, DType::int32})
    EXPECT_EQ(compare_with(dtype, 1, -2).failure, "");
}

TEST(Compare, SeesOneWrongElement) {
  EXPECT_NE(compare_with(DType::float32, 1, -2.00002).failure, "");
  EXPECT_NE(compare_with(DType::bfloat16, 4, 0.53).failure, "");
  EXPECT_NE(compare_with(DType::float16, 4, 0.503).failure, "");
  EXPECT_NE(compare_with(DType::int32, 5, -7).failure, "");
  EXPECT_EQ(compare_with(DType::float32, 1, -2.000001).failure, "");
  EXPECT_EQ(compare_with(DType::bfloat16, 4, 0.502).failure, "");
}

TEST(Compare, NamesTheElement) {
  const std::string failure = compare_with(DType::float32, 4, 9).failure;
  EXPECT_NE(failure.find("y[1, 1]"), std::string::npos) << failure;
}

TEST(Compare, NaNAndInfinityAreErrors) {
  EXPECT_NE(compare_with(DType::float32, 0, NAN).failure, "");
  EXPECT_NE(compare_with(DType::float32, 0, INFINITY).failure, "");
}

TEST(Compare, ManySmallErrorsAddUp) {
  Tensors t(1, Precision::stored);
  const TensorView expected = t.constant(DType::float32, {100}, 1), actual = t.constant(DType::float32, {100}, 1 + 3e-6);
  const auto scale = [](std::int64_t) { return 1.0; };
  EXPECT_NE(compare("y", actual, expected, scale, 1e-6).failure, "") << "each is below 4 u, all together above u";
}

TEST(Compare, UnwrittenMustStayUnwrittenAndWrittenMustBeWritten) {
  Tensors t(1, Precision::stored);
  const TensorView expected = t.out(DType::bfloat16, {3}), actual = t.out(DType::bfloat16, {3});
  const auto scale = [](std::int64_t) { return 1.0; };
  EXPECT_EQ(compare("y", actual, expected, scale, 1).failure, "");
  set_element(actual, 1, 0);
  EXPECT_NE(compare("y", actual, expected, scale, 1).failure, "");
  set_element(expected, 1, 0);
  set_element(expected, 2, 0);
  EXPECT_NE(compare("y", actual, expected, scale, 1).failure, "") << "element 2 was never written";
}

TEST(Tensors, SameNumbersInEveryPrecision) {
  Tensors stored(5, Precision::stored), exact(5, Precision::exact), absolute(5, Precision::absolute);
  const auto make = [](Tensors& t) { return t.normal(DType::bfloat16, {4, 5}, 1, Layout::strided); };
  const TensorView a = make(stored), b = make(exact), c = make(absolute);
  EXPECT_EQ(a.dtype, DType::bfloat16);
  EXPECT_EQ(b.dtype, DType::float64);
  for (std::int64_t i = 0; i < a.numel(); ++i) {
    EXPECT_EQ(element(a, i), element(b, i));
    EXPECT_EQ(std::abs(element(a, i)), element(c, i));
  }
}

TEST(Tensors, EveryLayoutHoldsItsValues) {
  for (const Layout layout : {Layout::dense, Layout::padded, Layout::reversed, Layout::strided, Layout::permuted}) {
    Tensors t(5, Precision::stored);
    const TensorView v = t.values(DType::float32, {2, 3}, kValues, layout);
    for (std::int64_t i = 0; i < 6; ++i) EXPECT_EQ(element(v, i), kValues[static_cast<std::size_t>(i)]);
  }
}

TEST(Tensors, SeesWritesOutsideOutputs) {
  for (const Layout layout : {Layout::dense, Layout::padded, Layout::reversed, Layout::strided, Layout::permuted}) {
    Tensors t(5, Precision::stored);
    t.values(DType::float32, {2, 3}, kValues);
    const TensorView y = t.out(DType::float32, {2, 3}, layout);
    t.remember();
    for (std::int64_t i = 0; i < 6; ++i) set_element(y, i, 1);
    EXPECT_EQ(t.damage({y}), "");
    float* last = y.as<float>() + std::max<std::int64_t>(0, y.step(0)) + 2 * y.step(1);
    last[1] = 0;  // a guard, or the gap between strided elements
    EXPECT_NE(t.damage({y}), "");
  }
  Tensors t(5, Precision::stored);
  const TensorView x = t.values(DType::float32, {2, 3}, kValues);
  t.remember();
  set_element(x, 3, 9);
  EXPECT_NE(t.damage({}), "") << "an input changed";
}

}  // namespace
}  // namespace intarsia::cases
