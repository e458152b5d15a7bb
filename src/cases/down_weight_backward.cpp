// down_weight_backward on every problem of problem.h.
#include "cases/problem.h"

namespace intarsia::cases {
namespace {

DownWeightBackward make(Experts& experts, Tensors&, const Problem& p, DType) {
  const Lists& l = experts.lists();
  return {.dy = experts.token_rows(),
          .a_scaled = experts.expert_rows(p.width),
          .expert_offsets = l.expert_offsets,
          .row_token = l.row_token,
          .accumulate = p.accumulate,
          .grad_scale = p.grad_scale,
          .dw_down = experts.dw_down()};
}

}  // namespace

template <>
std::vector<Case<DownWeightBackward>> cases() {
  return expert_cases<DownWeightBackward>(problems(), {.down = 1}, make);
}

template <>
std::vector<Case<DownWeightBackward>> benchmarks() {
  return expert_benchmarks<DownWeightBackward>({.down = 1}, make);
}

}  // namespace intarsia::cases
