// combine on every problem with tokens, with and without scores, and a sum that a narrow accumulator would lose.
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
  op.y = p.addend && p.in_place
             ? op.addend
             : t.out(dtype, {l.tokens, p.hidden}, p.rows_layout == Layout::padded ? Layout::padded : Layout::dense);
  return op;
}

Combine make_scored(Experts& experts, Tensors& t, const Problem& p, DType dtype) { return make(experts, t, p, dtype, true); }
Combine make_plain(Experts& experts, Tensors& t, const Problem& p, DType dtype) { return make(experts, t, p, dtype, false); }

std::vector<Problem> token_problems(std::vector<Problem> table) {
  std::erase_if(table, [](const Problem& p) { return p.form == Form::sorted; });
  return table;
}

/// 256 and eight ones: a sum kept in bfloat16 would stay at 256.
Case<Combine> large_and_small() {
  Case<Combine> c{.name = "large_and_small/bfloat16"};
  c.build = [](Tensors& t) {
    return Combine{.rows = t.values(DType::bfloat16, {9, 1}, {256, 1, 1, 1, 1, 1, 1, 1, 1}),
                   .slot_row = t.values(DType::int32, {1, 9}, {0, 1, 2, 3, 4, 5, 6, 7, 8}),
                   .y = t.out(DType::bfloat16, {1, 1})};
  };
  c.expect = [](const Combine& op) { return element(op.y, 0) == 264 ? std::string() : "y must be 264 exactly"; };
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
  return expert_benchmarks<Combine>({}, make_scored);
}

}  // namespace intarsia::cases
