#include "cases/problem.h"

namespace intarsia::cases {
namespace {

Combine make(Experts& experts, Tensors& t, const Problem& p, DType dtype, bool with_scores) {
  const Lists& l = experts.lists();
  Combine op{.rows = experts.expert_rows(p.hidden),
             .slot_row = l.slot_row,
             .token_offsets = l.token_offsets,
             .token_rows = l.token_rows,
             .scores = with_scores ? experts.scores() : TensorView{}};
  if (p.addend) op.addend = t.normal(dtype, {l.tokens, p.hidden}, 1, p.in_place ? Layout::dense : p.rows_layout);
  op.y = p.addend && p.in_place ? op.addend : t.out(dtype, {l.tokens, p.hidden}, p.rows_layout == Layout::padded ? Layout::padded : Layout::dense);
  return op;
}

Combine make_scored(Experts& experts, Tensors& t, const Problem& p, DType dtype) { return make(experts, t, p, dtype, true); }
Combine make_plain(Experts& experts, Tensors& t, const Problem& p, DType dtype) { return make(experts, t, p, dtype, false); }

std::vector<Problem> token_problems(std::vector<Problem> table) {
  std::erase_if(table, [](const Problem& p) { return p.form == Form::sorted; });
  return table;
}

/// Contributions of 256 and 1 in turn: a sum kept in bfloat16 would lose the ones. (The tolerance is that of a single rounding.)
Case<Combine> large_and_small() {
  Case<Combine> c{.name = "large_and_small/bfloat16"};
  c.build = [](Tensors& t) {
    std::vector<double> slots, rows;
    for (std::int64_t i = 0; i < 8; ++i) {
      slots.push_back(static_cast<double>(i));
      rows.push_back(i % 2 == 0 ? 256 : 1);
    }
    return Combine{.rows = t.values(DType::bfloat16, {8, 1}, rows),
                   .slot_row = t.values(DType::int32, {1, 8}, slots),
                   .y = t.out(DType::bfloat16, {1, 1})};
  };
  c.expect = [](const Combine& op) { return element(op.y, 0) == 1024 + 4 ? std::string() : "y must be 1028 exactly"; };
  return c;
}

}  // namespace

template <>
std::vector<Case<Combine>> cases() {
  const auto table = token_problems(problems());
  auto result = expert_cases<Combine>(table, {}, make_scored);
  for (auto& c : expert_cases<Combine>(table, {}, make_plain)) {
    c.name = "no_scores_" + c.name;
    result.push_back(std::move(c));
  }
  result.push_back(large_and_small());
  return result;
}

template <>
std::vector<Case<Combine>> benchmarks() {
  return expert_cases<Combine>(benchmark_problems(), {}, make_scored);
}

}  // namespace intarsia::cases
