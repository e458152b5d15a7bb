// router_logits and its backward on the CPU backend against plain loops in double: every mixture of dtypes, odd sizes, strides.
#include "poisoned.h"

namespace intarsia {
namespace {

using namespace poisoned;

struct Sizes {
  std::int64_t t, h, e;
};
constexpr Sizes kSizes[] = {{0, 5, 3},    {1, 1, 1},      {1, 64, 128},  {15, 33, 5},   {17, 257, 60},
                            {33, 48, 96}, {129, 16, 513}, {300, 70, 17}, {257, 600, 7}, {5000, 12, 3}};

/// The same numbers with the axes' strides exchanged: element (i, j) at j * rows + i.
TensorView column_major(const Tensor& tensor) {
  TensorView v = tensor.view();
  v.stride[0] = 1;
  v.stride[1] = v.shape[0];
  return v;
}

void verify_logits(const Sizes& size, DType dtype, bool parameters_fp32, bool logits_fp32, bool transposed) {
  const auto [t, h, e] = size;
  SCOPED_TRACE("T " + std::to_string(t) + " H " + std::to_string(h) + " E " + std::to_string(e) + " " +
               std::string(to_string(dtype)) + (parameters_fp32 ? " w fp32" : "") + (logits_fp32 ? " logits fp32" : ""));
  const DType parameter = parameters_fp32 ? DType::float32 : dtype, logit = logits_fp32 ? DType::float32 : dtype;
  const Tensor x = normal(dtype, {t, h}), w = normal(parameter, {e, h}), bias = normal(parameter, {e}), logits(logit, {t, e});
  const TensorView x_view = transposed ? column_major(x) : x.view(), w_view = transposed ? column_major(w) : w.view();
  verify(RouterLogits{.x = x_view, .w_router = w_view, .bias = bias.view(), .logits = logits.view()}, static_cast<double>(h));
  if (::testing::Test::HasFatalFailure()) return;

  const Tensor dlogits = normal(logit, {t, e}), dx(dtype, {t, h}), dw(parameter, {e, h}), dbias(parameter, {e});
  for (std::int64_t i = 0; i < t; ++i)
    for (std::int64_t j = 0; i % 3 == 1 && j < e; ++j) dlogits.set(i * e + j, 0);
  verify(RouterLogitsBackward{.dlogits = transposed ? column_major(dlogits) : dlogits.view(),
                              .x = x_view,
                              .w_router = w_view,
                              .dx = dx.view(),
                              .dw_router = dw.view(),
                              .dbias = dbias.view()},
         static_cast<double>(t + e));
}

TEST(CpuRouterLogits, EverySizeAndDtype) {
  for (const Sizes& size : kSizes)
    for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16})
      for (int bits = 0; bits < 8; ++bits) verify_logits(size, dtype, bits & 1, bits & 2, bits & 4);
}

TEST(CpuRouterLogits, NanTokenTouchesNoWeight) {
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    const Tensor x = normal(dtype, {40, 24}), clean = normal(dtype, {40, 24}), w = normal(dtype, {6, 24});
    const Tensor dlogits = normal(dtype, {40, 6});
    for (std::int64_t i = 0; i < x.numel(); ++i) clean.set(i, i / 24 == 11 ? 0 : x[i]);
    for (std::int64_t h = 0; h < 24; ++h) x.set(11 * 24 + h, std::nan(""));
    for (std::int64_t e = 0; e < 6; ++e) dlogits.set(11 * 6 + e, 0);
    const Tensor dw(dtype, {6, 24});
    RouterLogitsBackward op{.dlogits = dlogits.view(), .x = x.view(), .w_router = w.view(), .dw_router = dw.view()};
    const Outputs contained = run_on(op, Backend::cpu, 2);
    op.x = clean.view();
    EXPECT_TRUE(contained.at("dw_router").same_bits(run_on(op, Backend::cpu, 1).at("dw_router")));
  }
}

}  // namespace
}  // namespace intarsia
