// up_backward on every problem of problem.h.
#include "cases/problem.h"

namespace intarsia::cases {
namespace {

UpBackward make(Experts& experts, Tensors&, const Problem& p, DType) {
  return {.dz = experts.expert_rows(experts.gates() * p.width),
          .expert_offsets = experts.lists().expert_offsets,
          .w_up = experts.w_up(),
          .dx_rows = experts.out_rows(p.hidden)};
}

}  // namespace

template <>
std::vector<Case<UpBackward>> cases() {
  return expert_cases<UpBackward>(problems(), {.up = 1}, make);
}

template <>
std::vector<Case<UpBackward>> benchmarks() {
  return expert_benchmarks<UpBackward>({.up = 1}, make);
}

}  // namespace intarsia::cases
