// router_logits and its backward: odd sizes, dtypes of parameters and logits, layouts, gradients left out.
#include <cmath>

#include "cases/case.h"

namespace intarsia::cases {
namespace {

struct Router {
  std::string name;
  std::int64_t tokens, hidden, experts;
  bool bias = true, fp32_parameters = false, fp32_logits = true;
  Layout x_layout = Layout::dense, w_layout = Layout::dense;
  bool dx = true, dw_router = true, dbias = true;
  bool add_to_dx = false;
};

const std::vector<Router> kTable{
    {"no_tokens", 0, 12, 4},
    {"one_token", 1, 12, 4},
    {"one_of_everything", 1, 1, 1},
    {"odd", 33, 67, 7},
    {"odd_without_bias", 33, 67, 7, false},
    {"wide", 130, 130, 129},
    {"rounded_logits", 40, 64, 8, true, false, false},
    {"fp32_parameters", 40, 64, 8, true, true},
    {"padded", 21, 20, 6, true, false, true, Layout::padded, Layout::padded},
    {"permuted", 21, 20, 6, true, false, false, Layout::permuted, Layout::permuted},
    {"strided_and_reversed", 21, 20, 6, true, false, true, Layout::strided, Layout::reversed},
    {"expanded", 21, 20, 6, true, true, true, Layout::expanded, Layout::expanded},
    {"add_to_dx", 33, 67, 7, true, true, true, Layout::dense, Layout::dense, true, true, true, true},
    {"add_to_padded_dx", 300, 24, 6, true, false, true, Layout::padded, Layout::dense, true, true, true, true},
    {"only_dx", 21, 20, 6, true, false, true, Layout::dense, Layout::dense, true, false, false},
    {"only_dw_router", 21, 20, 6, true, false, true, Layout::dense, Layout::dense, false, true, false},
    {"only_dbias", 21, 20, 6, true, false, true, Layout::dense, Layout::dense, false, false, true},
};
const std::vector<Router> kBenchmarks{{"t4096_h512_e32", 4096, 512, 32}, {"t8192_h256_e128", 8192, 256, 128}};

DType parameter_dtype(const Router& r, DType x) { return r.fp32_parameters ? score_dtype(x) : x; }
DType logits_dtype(const Router& r, DType x) { return r.fp32_logits ? score_dtype(x) : x; }

RouterLogits forward(Tensors& t, const Router& r, DType dtype) {
  const double deviation = 1 / std::sqrt(static_cast<double>(r.hidden));
  RouterLogits op{.x = t.normal(dtype, {r.tokens, r.hidden}, 1, r.x_layout),
                  .w_router = t.normal(parameter_dtype(r, dtype), {r.experts, r.hidden}, deviation, r.w_layout)};
  if (r.bias) op.bias = t.normal(parameter_dtype(r, dtype), {r.experts}, 1, r.w_layout);
  op.logits =
      t.out(logits_dtype(r, dtype), {r.tokens, r.experts}, r.x_layout == Layout::padded ? Layout::padded : Layout::dense);
  return op;
}

RouterLogitsBackward backward(Tensors& t, const Router& r, DType dtype) {
  const Layout layout = r.x_layout == Layout::padded ? Layout::padded : Layout::dense;
  RouterLogitsBackward op{.dlogits = t.normal(logits_dtype(r, dtype), {r.tokens, r.experts}, 1, r.x_layout),
                          .x = t.normal(dtype, {r.tokens, r.hidden}, 1, r.x_layout),
                          .w_router = t.normal(parameter_dtype(r, dtype), {r.experts, r.hidden}, 1, r.w_layout),
                          .add_to_dx = r.add_to_dx};
  if (r.dx) op.dx = r.add_to_dx ? t.normal(dtype, {r.tokens, r.hidden}, 1, layout) : t.out(dtype, {r.tokens, r.hidden}, layout);
  if (r.dw_router) op.dw_router = t.out(parameter_dtype(r, dtype), {r.experts, r.hidden}, layout);
  if (r.dbias) op.dbias = t.out(parameter_dtype(r, dtype), {r.experts});
  return op;
}

template <class Op, class Make>
std::vector<Case<Op>> all(const std::vector<Router>& table, double products, Make make) {
  std::vector<Case<Op>> result;
  for (const Router& r : table) {
    for (const DType dtype : kDTypes) {
      Case<Op> c{.name = named(r.name, dtype)};
      c.build = [=](Tensors& t) { return make(t, r, dtype); };
      c.flops = 2 * products * static_cast<double>(r.tokens * r.hidden * r.experts);
      result.push_back(std::move(c));
    }
  }
  return result;
}

}  // namespace

template <>
std::vector<Case<RouterLogits>> cases() {
  return all<RouterLogits>(kTable, 1, forward);
}
template <>
std::vector<Case<RouterLogits>> benchmarks() {
  return all<RouterLogits>(kBenchmarks, 1, forward);
}
template <>
std::vector<Case<RouterLogitsBackward>> cases() {
  return all<RouterLogitsBackward>(kTable, 2, backward);
}
template <>
std::vector<Case<RouterLogitsBackward>> benchmarks() {
  return all<RouterLogitsBackward>(kBenchmarks, 2, backward);
}

}  // namespace intarsia::cases
