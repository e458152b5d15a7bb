// down_forward on every problem of problem.h, as the layer calls it and as a bare grouped GEMM.
#include "cases/problem.h"

namespace intarsia::cases {
namespace {

DownForward make(Experts& experts, Tensors&, const Problem& p, DType) {
  const Lists& l = experts.lists();
  return {.a = experts.expert_rows(p.width),
          .expert_offsets = l.expert_offsets,
          .w_down = experts.w_down(),
          .b_down = experts.b_down(),
          .scores = experts.scores(),
          .row_slot = l.row_slot,
          .score_on = p.score_on,
          .rows = experts.out_rows(p.hidden)};
}

/// In the layer the scores of `output` are applied by combine: down_forward has none. Alone it is a bare grouped GEMM.
DownForward make_bare(Experts& experts, Tensors&, const Problem& p, DType) {
  return {.a = experts.expert_rows(p.width),
          .expert_offsets = experts.lists().expert_offsets,
          .w_down = experts.w_down(),
          .rows = experts.out_rows(p.hidden)};
}

}  // namespace

template <>
std::vector<Case<DownForward>> cases() {
  auto table = expert_cases<DownForward>(problems(), {.down = 1}, make);
  for (auto& c : expert_cases<DownForward>(problems(), {.down = 1}, make_bare)) {
    c.name = "grouped_gemm_" + c.name;
    table.push_back(std::move(c));
  }
  return table;
}

template <>
std::vector<Case<DownForward>> benchmarks() {
  return expert_benchmarks<DownForward>({.down = 1}, make_bare);
}

}  // namespace intarsia::cases
