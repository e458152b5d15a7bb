// What the mma.sync kernels refuse: they address what they read in 32-bit counts of 16 bytes from its first element.
#include <gtest/gtest.h>

#include <string>

#include "cuda/sm80/sm80.h"

namespace intarsia::cuda::sm80 {
namespace {

constexpr std::int64_t kRows = 256, kHidden = 64, kWidth = 128, kExperts = 4;

/// Nothing reads these: any address at a multiple of 16 will do.
TensorView view(std::initializer_list<std::int64_t> shape) {
  return {reinterpret_cast<void*>(std::uintptr_t{1} << 20), DType::bfloat16, shape, {DeviceType::cuda, 0}};
}

UpBackward up_backward() {
  return {.dz = view({kRows, 2 * kWidth}),
          .expert_offsets = view({kExperts + 1}),
          .w_up = {.weight = view({kExperts, 2 * kWidth, kHidden})},
          .dx_rows = view({kRows, kHidden})};
}
DownWeightBackward down_weight_backward() {
  return {.dy = view({kRows, kHidden}),
          .a_scaled = view({kRows, kWidth}),
          .expert_offsets = view({kExperts + 1}),
          .dw_down = {.weight = view({kExperts, kHidden, kWidth})}};
}

template <class Op>
std::string refusal(const Op& op) {
  std::string why = "nobody said";
  const bool supported = supports(op, &why);
  EXPECT_EQ(supported, why.empty());
  return why;
}

TEST(Sm80Supports, WhatIsPlain) {
  EXPECT_EQ(refusal(up_backward()), "");
  EXPECT_EQ(refusal(down_weight_backward()), "");
}

TEST(Sm80Supports, RowsThatAreOneRow) {
  DownWeightBackward op = down_weight_backward();
  op.dy.stride[0] = 0;
  EXPECT_EQ(refusal(op), "");
}

TEST(Sm80Supports, DescendingRows) {
  DownWeightBackward op = down_weight_backward();
  op.dy.stride[0] = -kHidden;
  EXPECT_EQ(refusal(op), "dy: rows in descending order, or 64 GiB and more");
  UpBackward other = up_backward();
  other.dz.stride[0] = -2 * kWidth;
  EXPECT_EQ(refusal(other), "dz: rows in descending order, or 64 GiB and more");
}

TEST(Sm80Supports, DescendingWeights) {
  UpBackward op = up_backward();
  op.w_up.weight.stride[1] = -kHidden;
  EXPECT_EQ(refusal(op), "w_up: descending steps, or an expert of 64 GiB and more");
}

/// The last chunk of 2^21 rows of 16384 columns ends at 2^32 chunks; one row more does not fit.
TEST(Sm80Supports, SixtyFourGiB) {
  DownWeightBackward op = down_weight_backward();
  const auto with_rows = [&](std::int64_t rows, std::int64_t step) {
    op.dy = view({rows, kHidden});
    op.dy.stride[0] = step;
    return refusal(op);
  };
  const std::int64_t rows = std::int64_t{1} << 21, step = 16384;
  EXPECT_EQ(with_rows(rows, step), "");
  EXPECT_EQ(with_rows(rows + 1, step), "dy: rows in descending order, or 64 GiB and more");
}

TEST(Sm80Supports, AnExpertOfSixtyFourGiB) {
  UpBackward op = up_backward();
  op.w_up.weight.stride[1] = (std::int64_t{1} << 35) / (2 * kWidth);
  EXPECT_EQ(refusal(op), "w_up: descending steps, or an expert of 64 GiB and more");
  op.w_up.weight.stride[1] -= 8;
  EXPECT_EQ(refusal(op), "");
}

}  // namespace
}  // namespace intarsia::cuda::sm80
