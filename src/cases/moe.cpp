// moe_forward and moe_backward: every router family on small layers, with and without what may be left out. The numbers of each
// step are checked by the step's own cases; here it is what goes from one to the next.
#include <cmath>
#include <span>

#include "cases/problem.h"
#include "intarsia/moe.h"

namespace intarsia::cases {
namespace {

struct Moe {
  Problem problem;
  RouterScores scores = RouterScores::softmax;
  bool expert_bias = false, mask = false;
  bool logits = true;   ///< forward: an output, and the counts are; backward: kept
  bool router = true;   ///< backward: gradients of the router's parameters
  bool experts = true;  ///< backward: gradients of the experts' parameters
};

constexpr std::int64_t kGroups = 2, kTopGroups = 1;
constexpr double kScale = 2.5;

std::vector<Moe> table() {
  const Problem bare{.tokens = 24, .hidden = 20, .width = 12, .experts = 6, .choices = 2};
  const auto changed = [&](const char* name, auto change) {
    Problem p = bare;
    p.name = name;
    change(p);
    return p;
  };
  const Problem full = changed("full", [](Problem& p) { p.biases = true, p.addend = true; });
  std::vector<Moe> result;
  for (const RouterScores scores :
       {RouterScores::softmax, RouterScores::softmax_renorm, RouterScores::sigmoid_group, RouterScores::sigmoid}) {
    const bool grouped = scores == RouterScores::sigmoid_group;
    result.push_back({.problem = full, .scores = scores, .expert_bias = grouped, .mask = true});
    result.push_back({.problem = changed("lean", [](Problem& p) { p.keep_z = false; }), .scores = scores, .logits = false});
  }
  result.push_back({.problem = changed("no_tokens", [](Problem& p) { p.tokens = 0; })});
  result.push_back({.problem = changed("in_place", [](Problem& p) { p.in_place = true; })});
  result.push_back({.problem = changed("router_alone", [](Problem&) {}), .logits = false, .experts = false});
  result.push_back({.problem = changed("experts_alone", [](Problem& p) { p.biases = true; }), .router = false});
  result.push_back(
      {.problem = changed("two_tensors", [](Problem& p) { p.weights = {.two_tensors = true, .transposed = true}; })});
  return result;
}

MoeForward make_forward(Experts& experts, Tensors& t, const Moe& m, DType dtype) {
  const Problem& p = m.problem;
  const DType scores = score_dtype(dtype);
  const std::int64_t tokens = p.tokens, e = p.experts, k = p.choices;
  const double deviation = 2 / std::sqrt(static_cast<double>(p.hidden));
  MoeForward op{.x = t.normal(dtype, {tokens, p.hidden}), .w_router = t.normal(dtype, {e, p.hidden}, deviation)};
  if (p.biases) op.b_router = t.normal(dtype, {e});
  if (m.expert_bias) op.expert_bias = t.normal(scores, {e}, 0.1);
  if (m.mask) {
    op.token_mask = t.constant(DType::boolean, {tokens}, 1);
    for (std::int64_t i = 0; i < tokens; i += 3) t.set(op.token_mask, 0, i);
  }
  op.w_up = experts.w_up();
  op.w_down = experts.w_down();
  op.b_up = experts.b_up();
  op.b_down = experts.b_down();
  if (p.addend) op.addend = t.normal(dtype, {tokens, p.hidden});
  op.scores_kind = m.scores;
  if (m.scores == RouterScores::sigmoid_group) op.groups = kGroups, op.top_groups = kTopGroups, op.scale = kScale;
  op.logits_dtype = score_dtype(op.x.dtype);  // x may be kept in float64
  if (m.logits) op.logits = t.out(scores, {tokens, e});
  op.ids = t.out(DType::int32, {tokens, k});
  op.scores = t.out(scores, {tokens, k});
  if (m.scores == RouterScores::sigmoid_group) op.raw_scores = t.out(scores, {tokens, k});
  op.nan_tokens = t.constant(DType::int32, {1}, 0);
  op.expert_offsets = t.out(DType::int32, {e + 1});
  op.row_token = t.out(DType::int32, {tokens * k});
  op.row_slot = t.out(DType::int32, {tokens * k});
  op.slot_row = t.out(DType::int32, {tokens, k});
  if (m.logits) op.expert_counts = t.out(DType::int32, {e});
  if (p.keep_z) op.z = t.out(dtype, {tokens * k, experts.gates() * p.width});
  op.y = t.out(dtype, {tokens, p.hidden});
  return op;
}

MoeBackward make_backward(Experts& experts, Tensors& t, const Moe& m, DType dtype) {
  const Problem& p = m.problem;
  const MoeForward f = make_forward(experts, t, m, dtype);
  run(f, Context{.backend = Backend::reference});
  MoeBackward op{.dy = t.normal(dtype, {p.tokens, p.hidden}),
                 .x = f.x,
                 .w_router = f.w_router,
                 .b_router = f.b_router,
                 .logits = m.scores == RouterScores::softmax ? f.logits : TensorView{},
                 .ids = f.ids,
                 .scores = f.scores,
                 .raw_scores = f.raw_scores,
                 .expert_offsets = f.expert_offsets,
                 .row_token = f.row_token,
                 .row_slot = f.row_slot,
                 .slot_row = f.slot_row,
                 .w_up = f.w_up,
                 .w_down = f.w_down,
                 .b_up = f.b_up,
                 .b_down = f.b_down,
                 .scores_kind = f.scores_kind,
                 .scale = f.scale,
                 .logits_dtype = f.logits_dtype,
                 .dlogits_dtype = f.logits_dtype,
                 .overwrite_z = p.in_place,
                 .z = f.z};
  if (m.router) {
    op.dx = t.out(dtype, {p.tokens, p.hidden});
    op.dw_router = t.out(dtype, {p.experts, p.hidden});
    if (p.biases) op.db_router = t.out(dtype, {p.experts});
  }
  if (!m.experts) return op;
  op.dw_up = experts.dw_up();
  op.dw_down = experts.dw_down();
  if (p.biases) op.db_up = experts.db_up(), op.db_down = experts.db_down();
  return op;
}

template <class Op, class Make>
std::vector<Case<Op>> every(const std::vector<Moe>& table, std::span<const DType> dtypes, Make make) {
  std::vector<Case<Op>> result;
  for (const Moe& m : table)
    for (const DType dtype : dtypes) {
      Case<Op> c{
          .name = named(std::string(to_string(m.scores)) + "/" + m.problem.name, dtype), .scale = 3.0, .rounding = dtype};
      c.build = [=](Tensors& t) {
        Experts experts(t, m.problem, dtype);
        return make(experts, t, m, dtype);
      };
      result.push_back(std::move(c));
    }
  return result;
}

std::vector<Moe> benchmark_table() {
  std::vector<Moe> result;
  for (const Problem& p : benchmark_problems()) result.push_back({.problem = p});
  return result;
}

}  // namespace

template <>
std::vector<Case<MoeForward>> cases() {
  return every<MoeForward>(table(), kDTypes, make_forward);
}
template <>
std::vector<Case<MoeForward>> benchmarks() {
  return every<MoeForward>(benchmark_table(), kBenchmarkDTypes, make_forward);
}
template <>
std::vector<Case<MoeBackward>> cases() {
  return every<MoeBackward>(table(), kDTypes, make_backward);
}
template <>
std::vector<Case<MoeBackward>> benchmarks() {
  return every<MoeBackward>(benchmark_table(), kBenchmarkDTypes, make_backward);
}

}  // namespace intarsia::cases
