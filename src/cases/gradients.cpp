// Central differences of the layer, the router and the losses.
#include "cases/gradients.h"

#include <cmath>

#include "cases/logits.h"
#include "cases/problem.h"

namespace intarsia::cases {
namespace {

constexpr Context kReference{.backend = Backend::reference};
constexpr DType kDouble = DType::float64;
constexpr double kStep = 1e-4, kTolerance = 1e-6;  // truncation is of the order of kStep^2

struct Gradient {
  std::string name;
  TensorView value, gradient;
};

/// d loss / d value by central differences, against `gradient`. Values that are NaN are those that nobody reads.
Outcome check(const std::string& name, const std::vector<Gradient>& gradients, const std::function<double()>& loss) {
  Outcome outcome{"finite_differences/" + name, 0, {}};
  for (const Gradient& g : gradients) {
    if (!g.gradient.defined() || !g.value.defined()) continue;
    for (std::int64_t i = 0; i < g.value.numel(); ++i) {
      const double value = element(g.value, i), got = element(g.gradient, i);
      if (!std::isfinite(value)) continue;
      set_element(g.value, i, value + kStep);
      const double above = loss();
      set_element(g.value, i, value - kStep);
      const double below = loss();
      set_element(g.value, i, value);
      const double expected = (above - below) / (2 * kStep), allowed = kTolerance * (1 + std::abs(expected));
      const double error = std::abs(expected - got);
      outcome.ratio = std::max(outcome.ratio, error / allowed);
      if (!(error <= allowed) && outcome.failure.empty())
        outcome.failure = g.name + " element " + std::to_string(i) + ": central difference " + std::to_string(expected) +
                          ", gradient " + std::to_string(got);
    }
  }
  return outcome;
}

/// sum of weight * value, over the finite weights
double inner(const TensorView& weight, const TensorView& value) {
  double sum = 0;
  for (std::int64_t i = 0; i < value.numel(); ++i)
    if (std::isfinite(element(weight, i))) sum += element(weight, i) * element(value, i);
  return sum;
}

// ---- the layer

std::vector<Problem> small_problems() {
  std::vector<Problem> table;
  const Problem base{.tokens = 6, .hidden = 5, .width = 4, .experts = 3, .choices = 2, .biases = true};
  const auto add = [&](const std::string& name, auto change) {
    Problem p = base;
    p.name = name;
    change(p);
    table.push_back(p);
  };
  for (int a = 0; a <= static_cast<int>(Activation::relu2); ++a)
    for (const ScorePlacement s : {ScorePlacement::output, ScorePlacement::inside, ScorePlacement::input})
      add(std::string(to_string(static_cast<Activation>(a))) + "_" + std::string(to_string(s)), [&](Problem& p) {
        p.activation = static_cast<Activation>(a);
        p.score_on = s;
      });
  add("csr", [](Problem& p) { p.form = Form::csr; });
  add("csr_inside", [](Problem& p) { p.form = Form::csr, p.score_on = ScorePlacement::inside; });
  add("sorted", [](Problem& p) { p.form = Form::sorted, p.slack = 2; });
  add("sorted_input", [](Problem& p) { p.form = Form::sorted, p.score_on = ScorePlacement::input; });
  add("sorted_no_scores", [](Problem& p) { p.form = Form::sorted, p.scores = false; });
  add("sentinels", [](Problem& p) { p.routing = Routing::sentinels, p.addend = true; });
  add("duplicates", [](Problem& p) { p.routing = Routing::duplicates; });
  add("half_empty", [](Problem& p) { p.routing = Routing::half_empty; });
  add("interleaved", [](Problem& p) { p.weights.gate_block = 1; });
  add("blocks_transposed", [](Problem& p) { p.weights = {.gate_block = 2, .transposed = true, .memory = Layout::permuted}; });
  add("two_tensors", [](Problem& p) { p.weights.two_tensors = true; });
  add("recompute", [](Problem& p) { p.keep_z = false; });
  return table;
}

Outcome check_layer(const Problem& p) {
  Tensors t(seed_of(p.name), Precision::stored);
  Experts experts(t, p, kDouble);
  const Lists& l = experts.lists();
  const Shape y_shape{p.form == Form::sorted ? l.capacity : l.tokens, p.hidden};
  LayerForward f{.x = experts.token_rows(),
                 .expert_offsets = l.expert_offsets,
                 .row_token = l.row_token,
                 .row_slot = l.row_slot,
                 .slot_row = l.slot_row,
                 .token_offsets = l.token_offsets,
                 .token_rows = l.token_rows,
                 .scores = experts.scores(),
                 .w_up = experts.w_up(),
                 .w_down = experts.w_down(),
                 .b_up = experts.b_up(),
                 .b_down = experts.b_down(),
                 .activation = p.activation,
                 .score_on = p.score_on,
                 .z = experts.out_rows(experts.gates() * p.width),
                 .y = t.out(kDouble, y_shape)};
  run(f, kReference);

  LayerBackward b{.dy = experts.token_rows(),
                  .x = f.x,
                  .expert_offsets = l.expert_offsets,
                  .row_token = l.row_token,
                  .row_slot = l.row_slot,
                  .slot_row = l.slot_row,
                  .token_offsets = l.token_offsets,
                  .token_rows = l.token_rows,
                  .scores = f.scores,
                  .w_up = f.w_up,
                  .w_down = f.w_down,
                  .b_up = f.b_up,
                  .b_down = f.b_down,
                  .activation = p.activation,
                  .score_on = p.score_on,
                  .z = p.keep_z ? f.z : TensorView{},
                  .dx = t.out(kDouble, y_shape),
                  .dscores = experts.like_scores(),
                  .dw_up = experts.dw_up(),
                  .dw_down = experts.dw_down(),
                  .db_up = experts.db_up(),
                  .db_down = experts.db_down()};
  run(b, kReference);

  f.z = {};
  return check(p.name,
               {{"dx", f.x, b.dx},
                {"dscores", f.scores, b.dscores},
                {"dw_up", f.w_up.weight, b.dw_up.weight},
                {"dw_up_second", f.w_up.second, b.dw_up.second},
                {"dw_down", f.w_down.weight, b.dw_down.weight},
                {"db_up", f.b_up, b.db_up},
                {"db_down", f.b_down, b.db_down}},
               [&] {
                 run(f, kReference);
                 return inner(b.dy, f.y);
               });
}

// ---- the router

Outcome check_router_logits() {
  Tensors t(1, Precision::stored);
  const RouterLogits f{.x = t.normal(kDouble, {4, 5}),
                       .w_router = t.normal(kDouble, {3, 5}),
                       .bias = t.normal(kDouble, {3}),
                       .logits = t.out(kDouble, {4, 3})};
  const RouterLogitsBackward b{.dlogits = t.normal(kDouble, {4, 3}),
                               .x = f.x,
                               .w_router = f.w_router,
                               .dx = t.out(kDouble, {4, 5}),
                               .dw_router = t.out(kDouble, {3, 5}),
                               .dbias = t.out(kDouble, {3})};
  run(b, kReference);
  return check("router_logits", {{"dx", f.x, b.dx}, {"dw_router", f.w_router, b.dw_router}, {"dbias", f.bias, b.dbias}}, [&] {
    run(f, kReference);
    return inner(b.dlogits, f.logits);
  });
}

Outcome check_route(const std::string& name, Route f) {
  Tensors t(seed_of(name), Precision::stored);
  const std::int64_t tokens = 5, experts = 6, k = 3;
  f.logits = t.normal(kDouble, {tokens, experts}, 2);
  t.set(f.logits, NAN, 2, 3);
  if (f.scores_kind == RouterScores::sigmoid_group) f.expert_bias = t.normal(kDouble, {experts});
  f.ids = t.out(DType::int32, {tokens, k});
  f.scores = t.out(kDouble, {tokens, k});
  f.raw_scores = t.out(kDouble, {tokens, k});
  run(f, kReference);
  const RouteBackward b{.dscores = t.normal(kDouble, {tokens, k}),
                        .scores = f.scores,
                        .ids = f.ids,
                        .raw_scores = f.raw_scores,
                        .logits = f.logits,
                        .scores_kind = f.scores_kind,
                        .renormalise = f.renormalise,
                        .scale = f.scale,
                        .dlogits = t.out(kDouble, {tokens, experts})};
  run(b, kReference);
  f.scores = t.out(kDouble, {tokens, k});  // b reads the ones before
  f.ids = t.out(DType::int32, {tokens, k});
  return check(name, {{"dlogits", f.logits, b.dlogits}}, [&] {
    run(f, kReference);
    return inner(b.dscores, f.scores);
  });
}

Outcome check_round_tokens() {
  Tensors t(2, Precision::stored);
  const std::int64_t tokens = 7, experts = 3, rows = 7 * 2 + 3 * 3;
  const auto integers = [&](std::int64_t n) { return t.out(DType::int32, {n}); };
  RoundTokens f{.logits = t.normal(kDouble, {tokens, experts}),
                .experts_per_token = 2,
                .tile = 4,
                .rounding = Rounding::up,
                .expert_offsets = integers(experts + 1),
                .row_token = integers(rows),
                .row_slot = integers(rows),
                .token_offsets = integers(tokens + 1),
                .token_rows = integers(rows),
                .row_score = t.out(kDouble, {rows})};
  run(f, kReference);
  const RouteBackward b{.dscores = t.normal(kDouble, {rows}),
                        .scores = f.row_score,
                        .logits = f.logits,
                        .expert_offsets = f.expert_offsets,
                        .token_offsets = f.token_offsets,
                        .token_rows = f.token_rows,
                        .dlogits = t.out(kDouble, {tokens, experts})};
  run(b, kReference);
  return check("round_tokens", {{"dlogits", f.logits, b.dlogits}}, [&] {
    run(f, kReference);
    return inner(b.dscores, f.row_score);
  });
}

std::vector<Outcome> check_routes() {
  using R = RouterScores;
  return {check_route("softmax", {.scores_kind = R::softmax}),
          check_route("softmax_renorm", {.scores_kind = R::softmax_renorm}),
          check_route("sigmoid", {.scores_kind = R::sigmoid}),
          check_route("sigmoid_group", {.scores_kind = R::sigmoid_group, .groups = 3, .top_groups = 2, .scale = 2.5}),
          check_route("sigmoid_group_raw", {.scores_kind = R::sigmoid_group, .renormalise = false, .scale = 1.5}),
          check_round_tokens()};
}

// ---- the losses

Outcome check_load_balance(RouterScores kind, BalanceNormalisation normalisation) {
  Tensors t(3, Precision::stored);
  const std::int64_t tokens = 6, experts = 5, k = 2;
  LoadBalanceLoss f{.logits = t.normal(kDouble, {tokens, experts}),
                    .token_mask = t.values(DType::boolean, {tokens}, {1, 1, 0, 1, 1, 1}),
                    .scores_kind = kind,
                    .normalisation = normalisation,
                    .loss = t.out(kDouble, {1}),
                    .expert_fraction = t.out(kDouble, {experts}),
                    .valid_tokens = t.out(kDouble, {1})};
  f.ids = t.values(DType::int32, {tokens, k}, {0, 1, 1, 2, 0, 3, 4, 0, -1, 2, 1, 0});
  run(f, kReference);
  const LoadBalanceLossBackward b{.dloss = t.constant(kDouble, {1}, 0.7),
                                  .logits = f.logits,
                                  .token_mask = f.token_mask,
                                  .expert_fraction = f.expert_fraction,
                                  .valid_tokens = f.valid_tokens,
                                  .experts_per_token = k,
                                  .scores_kind = kind,
                                  .normalisation = normalisation,
                                  .dlogits = t.out(kDouble, {tokens, experts})};
  run(b, kReference);
  return check(std::string(to_string(kind)) + "_" + std::string(to_string(normalisation)), {{"dlogits", f.logits, b.dlogits}},
               [&] {
                 run(f, kReference);
                 return 0.7 * element(f.loss, 0);
               });
}

Outcome check_z_loss() {
  Tensors t(4, Precision::stored);
  const ZLoss f{.logits = t.normal(kDouble, {5, 4}),
                .token_mask = t.values(DType::boolean, {5}, {1, 0, 1, 1, 1}),
                .loss = t.out(kDouble, {1}),
                .valid_tokens = t.out(kDouble, {1})};
  run(f, kReference);
  const ZLossBackward b{.dloss = t.constant(kDouble, {1}, 0.7),
                        .logits = f.logits,
                        .token_mask = f.token_mask,
                        .valid_tokens = f.valid_tokens,
                        .dlogits = t.out(kDouble, {5, 4})};
  run(b, kReference);
  return check("z_loss", {{"dlogits", f.logits, b.dlogits}}, [&] {
    run(f, kReference);
    return 0.7 * element(f.loss, 0);
  });
}

std::vector<Outcome> all_of(std::string_view operation) {
  std::vector<Outcome> outcomes;
  if (operation == LayerBackward::kName)
    for (const Problem& p : small_problems()) outcomes.push_back(check_layer(p));
  if (operation == RouterLogitsBackward::kName) outcomes.push_back(check_router_logits());
  if (operation == RouteBackward::kName) outcomes = check_routes();
  if (operation == LoadBalanceLossBackward::kName)
    for (const RouterScores kind : {RouterScores::softmax, RouterScores::sigmoid})
      for (const auto normalisation : {BalanceNormalisation::huggingface, BalanceNormalisation::megatron})
        outcomes.push_back(check_load_balance(kind, normalisation));
  if (operation == ZLossBackward::kName) outcomes.push_back(check_z_loss());
  return outcomes;
}

}  // namespace

std::vector<Outcome> verify_gradients(std::string_view operation, std::string_view filter) {
  std::vector<Outcome> outcomes = all_of(operation);
  std::erase_if(outcomes, [&](const Outcome& o) { return o.name.find(filter) == std::string::npos; });
  return outcomes;
}

}  // namespace intarsia::cases
