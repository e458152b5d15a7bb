// down_backward on every problem of problem.h.
#include "cases/problem.h"

namespace intarsia::cases {
namespace {

DownBackward make(Experts& experts, Tensors&, const Problem& p, DType) {
  const Lists& l = experts.lists();
  const std::int64_t z_width = experts.gates() * p.width;
  DownBackward op{.dy = experts.token_rows(),
                  .z = experts.expert_rows(z_width),
                  .expert_offsets = l.expert_offsets,
                  .row_token = l.row_token,
                  .w_down = experts.w_down(),
                  .b_down = experts.b_down(),
                  .scores = experts.scores(),
                  .row_slot = l.row_slot,
                  .activation = p.activation,
                  .score_on = p.score_on};
  op.dz = p.in_place ? op.z : experts.out_rows(z_width);
  if (p.optional_outputs) {
    op.a_scaled = experts.out_rows(p.width);
    op.dscores = experts.like_scores();
  }
  return op;
}

}  // namespace

template <>
std::vector<Case<DownBackward>> cases() {
  return expert_cases<DownBackward>(problems(), {.down = 1}, make);
}

template <>
std::vector<Case<DownBackward>> benchmarks() {
  return expert_benchmarks<DownBackward>({.down = 1}, make);
}

}  // namespace intarsia::cases
