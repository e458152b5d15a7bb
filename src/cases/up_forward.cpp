// up_forward on every problem of problem.h.
#include "cases/problem.h"

namespace intarsia::cases {
namespace {

UpForward make(Experts& experts, Tensors&, const Problem& p, DType) {
  const Lists& l = experts.lists();
  return {.x = experts.token_rows(),
          .expert_offsets = l.expert_offsets,
          .row_token = l.row_token,
          .w_up = experts.w_up(),
          .b_up = experts.b_up(),
          .scores = experts.scores(),
          .row_slot = l.row_slot,
          .activation = p.activation,
          .score_on = p.score_on,
          .z = p.optional_outputs ? experts.out_rows(experts.gates() * p.width) : TensorView{},
          .a = experts.out_rows(p.width)};
}

}  // namespace

template <>
std::vector<Case<UpForward>> cases() {
  return expert_cases<UpForward>(problems(), {.up = 1}, make);
}

template <>
std::vector<Case<UpForward>> benchmarks() {
  return expert_benchmarks<UpForward>({.up = 1}, make);
}

}  // namespace intarsia::cases
