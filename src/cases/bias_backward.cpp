// bias_backward on every problem of problem.h.
#include "cases/problem.h"

namespace intarsia::cases {
namespace {

BiasBackward make(Experts& experts, Tensors&, const Problem& p, DType) {
  const Lists& l = experts.lists();
  BiasBackward op{.expert_offsets = l.expert_offsets,
                  .row_token = l.row_token,
                  .scores = experts.scores(),
                  .row_slot = l.row_slot,
                  .score_on = p.score_on,
                  .gate_block = p.weights.gate_block,
                  .accumulate = p.accumulate,
                  .grad_scale = p.grad_scale};
  if (p.score_on != ScorePlacement::input) {
    op.dz = experts.expert_rows(experts.gates() * p.width);
    op.db_up = experts.db_up();
  }
  if (p.optional_outputs || p.score_on == ScorePlacement::input) {
    op.dy = experts.token_rows();
    op.db_down = experts.db_down();
  }
  return op;
}

}  // namespace

template <>
std::vector<Case<BiasBackward>> cases() {
  return expert_cases<BiasBackward>(problems(), {}, make);
}

template <>
std::vector<Case<BiasBackward>> benchmarks() {
  return expert_benchmarks<BiasBackward>({}, make);
}

}  // namespace intarsia::cases
