// route and its backward: every family on the table of logits.h; a few choices by hand.
#include <span>

#include "cases/logits.h"

namespace intarsia::cases {
namespace {

/// A router family with its parameters.
struct Family {
  std::string name;
  RouterScores kind;
  bool bias = false;
  std::int64_t groups = 1, top_groups = 1;
  bool renormalise = true;
  double scale = 1;
};

const std::vector<Family> kFamilies{
    {"softmax", RouterScores::softmax},
    {"softmax_renorm", RouterScores::softmax_renorm},
    {"sigmoid", RouterScores::sigmoid},
    {"sigmoid_group", RouterScores::sigmoid_group},
    {"sigmoid_group_biased", RouterScores::sigmoid_group, true, 1, 1, true, 2.5},
    {"sigmoid_group_raw", RouterScores::sigmoid_group, true, 1, 1, false, 1.5},
    {"sigmoid_group_limited", RouterScores::sigmoid_group, true, 4, 2},
    {"sigmoid_group_of_one", RouterScores::sigmoid_group, true, 8, 5},
};

bool fits(const Logits& l, const Family& f) {
  return l.experts % f.groups == 0 && l.choices <= f.top_groups * (l.experts / f.groups);
}

/// Everything that a family can output; `broken` and `masked` tokens with it.
Route make_route(Tensors& t, const Logits& l, const Family& f, DType dtype) {
  const DType scores = score_dtype(dtype);
  Route op{.logits = make_logits(t, l, dtype),
           .scores_kind = f.kind,
           .groups = f.groups,
           .top_groups = f.top_groups,
           .renormalise = f.renormalise,
           .scale = f.scale};
  op.token_mask = make_mask(t, l, op.logits);
  if (f.bias) op.expert_bias = t.normal(scores, {l.experts}, 0.2);
  op.ids = t.out(l.tokens % 2 == 0 ? DType::int64 : DType::int32, {l.tokens, l.choices});
  op.scores = t.out(scores, {l.tokens, l.choices});
  op.raw_scores = t.out(scores, {l.tokens, l.choices});
  op.nan_tokens = t.constant(DType::int32, {1}, 3);
  if (op.logits.dtype == DType::float32)  // not where they are kept in float64
    op.rounded_logits = t.out(l.choices % 2 == 0 ? DType::bfloat16 : DType::float16, {l.tokens, l.experts});
  return op;
}

RouteBackward make_backward(Tensors& t, const Logits& l, const Family& f, DType dtype, bool fp32_dlogits) {
  Route route = make_route(t, l, f, dtype);
  run(route, Context{.backend = Backend::reference});
  return {.dscores = t.normal(score_dtype(dtype), {l.tokens, l.choices}),
          .scores = route.scores,
          .ids = route.ids,
          .raw_scores = f.kind == RouterScores::sigmoid_group ? route.raw_scores : TensorView{},
          .logits = f.kind == RouterScores::softmax ? route.logits : TensorView{},
          .scores_kind = f.kind,
          .renormalise = f.renormalise,
          .scale = f.scale,
          .dlogits = t.out(fp32_dlogits ? score_dtype(dtype) : dtype, {l.tokens, l.experts},
                           l.layout == Layout::padded ? Layout::padded : Layout::dense)};
}

/// The CSR form: scores and their gradients per row of token rounding.
RouteBackward make_rounded(Tensors& t, const Logits& l, DType dtype) {
  const std::int64_t tile = 4, rows = std::min(l.tokens * l.choices + l.experts * (tile - 1), l.tokens * l.experts) + 2;
  RoundTokens round{.logits = make_logits(t, l, dtype), .experts_per_token = l.choices, .tile = tile};
  round.token_mask = make_mask(t, l, round.logits);
  round.expert_offsets = t.out(DType::int32, {l.experts + 1});
  round.row_token = t.out(DType::int32, {rows});
  round.row_slot = t.out(DType::int32, {rows});
  round.token_offsets = t.out(DType::int32, {l.tokens + 1});
  round.token_rows = t.out(DType::int32, {rows});
  round.row_score = t.out(score_dtype(dtype), {rows});
  run(round, Context{.backend = Backend::reference});
  return {.dscores = t.normal(score_dtype(dtype), {rows}),
          .scores = round.row_score,
          .logits = round.logits,
          .expert_offsets = round.expert_offsets,
          .token_offsets = round.token_offsets,
          .token_rows = round.token_rows,
          .dlogits = t.out(score_dtype(dtype), {l.tokens, l.experts})};
}

/// Families that rank by a float32 sigmoid see ties that float64 does not.
bool saturates(const Logits& l, const Family& f, DType dtype) {
  if (dtype != DType::float32 || l.pattern == Pattern::near) return f.kind == RouterScores::sigmoid_group;
  return f.kind == RouterScores::sigmoid_group && (l.pattern == Pattern::large || l.pattern == Pattern::far_below);
}

template <class Op, class Make>
void append(std::vector<Case<Op>>& result, const Logits& l, const std::string& family, DType dtype, bool ranks_in_float,
            Make make) {
  Case<Op> c{.name = named(family + "/" + l.name, dtype), .scale = 1.0, .ranks_in_float = ranks_in_float};
  c.build = [=](Tensors& t) { return make(t, l, dtype); };
  result.push_back(std::move(c));
}

const std::vector<Logits> kBenchmarks{{.name = "t8192_e32_k4", .tokens = 8192, .experts = 32, .choices = 4},
                                      {.name = "t8192_e256_k8", .tokens = 8192, .experts = 256, .choices = 8}};

std::vector<Case<Route>> forward(const std::vector<Logits>& table, std::span<const DType> dtypes) {
  std::vector<Case<Route>> result;
  for (const Logits& l : table)
    for (const Family& f : kFamilies)
      for (const DType dtype : dtypes)
        if (fits(l, f))
          append(result, l, f.name, dtype, saturates(l, f, dtype),
                 [f](Tensors& t, const Logits& logits, DType d) { return make_route(t, logits, f, d); });
  return result;
}

std::vector<Case<RouteBackward>> backward(const std::vector<Logits>& table, std::span<const DType> dtypes) {
  std::vector<Case<RouteBackward>> result;
  for (const Logits& l : table) {
    for (const DType dtype : dtypes) {
      for (const Family& f : kFamilies) {
        if (!fits(l, f)) continue;
        const bool fp32 = l.tokens % 2 == 1;
        append(result, l, f.name, dtype, saturates(l, f, dtype),
               [f, fp32](Tensors& t, const Logits& logits, DType d) { return make_backward(t, logits, f, d, fp32); });
      }
      if (l.tokens * l.experts <= 8192)  // the reference sorts all tokens for every expert
        append(result, l, "rounded", dtype, true, make_rounded);
    }
  }
  return result;
}

/// Logits 1e-7 apart and ties: ids by hand.
Case<Route> literal() {
  Case<Route> c{.name = "literal_ties/float32", .scale = 1.0, .ranks_in_float = true};
  c.build = [](Tensors& t) {
    const double above = 1 + 0x1p-23;  // the float after 1
    return Route{.logits = t.values(DType::float32, {3, 4}, {1, above, 1, 1, 0, 0, 0, 0, -1, 3, 3, -1}),
                 .ids = t.out(DType::int32, {3, 3}),
                 .scores = t.out(DType::float32, {3, 3})};
  };
  c.expect = [](const Route& op) {
    const std::vector<double> ids{1, 0, 2, 0, 1, 2, 1, 2, 0};
    for (std::size_t i = 0; i < ids.size(); ++i)
      if (element(op.ids, static_cast<std::int64_t>(i)) != ids[i])
        return "ids must be 1 0 2, 0 1 2, 1 2 0; wrong at " + std::to_string(i);
    return std::string();
  };
  return c;
}

}  // namespace

template <>
std::vector<Case<Route>> cases() {
  auto result = forward(logits_table(), kDTypes);
  result.push_back(literal());
  return result;
}
template <>
std::vector<Case<Route>> benchmarks() {
  return forward(kBenchmarks, kBenchmarkDTypes);
}
template <>
std::vector<Case<RouteBackward>> cases() {
  return backward(logits_table(), kDTypes);
}
template <>
std::vector<Case<RouteBackward>> benchmarks() {
  return backward(kBenchmarks, kBenchmarkDTypes);
}

}  // namespace intarsia::cases
