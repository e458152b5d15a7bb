// Checks of the operations on logits: route and its backward, the losses, the bias update; part of routing_check.cu.
#pragma once

#include <algorithm>
#include <chrono>
#include <set>

#include "base/softmax.h"
#include "reference/routing.h"
#include "routing_harness.h"
#include "routing_times.h"

namespace intarsia::check_routing {
namespace {

bool quick = false;
std::string only;  // the one group of checks to run

/// Cells (T * E, T * H, ...) that the reference may walk through in one case.
std::int64_t budget() { return quick ? 12000 : 2200000; }

std::string text(std::initializer_list<std::int64_t> numbers) {
  std::string all;
  for (const std::int64_t n : numbers) all += (all.empty() ? "" : " ") + std::to_string(n);
  return all;
}

// ---- logits and masks

/// Kinds of logits: normal ones; few distinct values, so that exact ties abound; rows that repeat earlier ones.
enum class Logits { normal, coarse, repeated };

void fill_logits(Tensor& t, Random& random, Logits kind) {
  const std::int64_t experts = t.size(1);
  std::vector<double> row(static_cast<std::size_t>(std::max<std::int64_t>(1, t.size(0) * experts)));
  t.fill([&](std::int64_t i) {
    double& x = row[static_cast<std::size_t>(i)];
    x = kind == Logits::coarse ? static_cast<double>(below(random, 17) - 8) / 4 : 2 * normal(random);
    const std::int64_t token = i / experts;
    if (kind == Logits::repeated && token % 3 == 2) x = row[static_cast<std::size_t>((token / 2) * experts + i % experts)];
    return x;
  });
  // a few rows that must be contained: a NaN, all NaN, an infinite maximum of either sign; and single -inf, which is legal
  for (std::int64_t token = 0; token < t.size(0); ++token) {
    const std::int64_t kind_of_row = below(random, 40);
    const auto set = [&](std::int64_t e, double value) { reference::store(t.host(), value, token, e); };
    if (kind_of_row == 0) set(below(random, experts), NAN);
    if (kind_of_row == 1)
      for (std::int64_t e = 0; e < experts; ++e) set(e, NAN);
    if (kind_of_row == 2) set(below(random, experts), INFINITY);
    if (kind_of_row == 3)
      for (std::int64_t e = 0; e < experts; ++e) set(e, -INFINITY);
    if (kind_of_row == 4 && experts > 70) set(below(random, experts), -INFINITY);
    if (kind_of_row == 5) set(0, -0.0), set(experts - 1, 0.0);
  }
  t.upload();
}

struct Mask {
  Tensor tensor;
  bool used;
  Mask(Random& random, std::int64_t tokens)
      : tensor(DType::boolean, {tokens}, {1, 0, pick<std::int64_t>(random, {1, 2})}), used(below(random, 3) == 0) {
    tensor.fill([&](std::int64_t) { return below(random, 5) != 0; });
  }
  TensorView on(bool device) const { return used ? tensor.on(device) : TensorView(); }
};

const char* kind_name(RouterScores kind) { return to_string(kind).data(); }

// ---- route

/// Logits where whole fours can be moved at once, and where they cannot: rows that are not aligned, an inner stride.
Place any_place(Random& random) {
  return {pick<std::int64_t>(random, {0, 0, 1, 2, 4}), pick<std::int64_t>(random, {0, 0, 3, 4}), 1 + (below(random, 8) == 0)};
}

/// Exactly the same numbers; a NaN is as good as another.
void compare_rounded_logits(const std::string& what, const Tensor& rounded) {
  ++checks;
  const std::vector<double> got = rounded.device_values(), want = rounded.reference_values();
  for (std::size_t i = 0; i < want.size(); ++i)
    if (got[i] != want[i] && !(std::isnan(got[i]) && std::isnan(want[i])))
      return fail(what + ": rounded_logits at " + std::to_string(i));
}

/// Where the ranks come from exp, a GPU may differ from the CPU in the last bit: the ids must then be a top-k of nearly equal
/// ranks.
void compare_near_ties(const std::string& what, const Route& host, Tensor& ids) {
  ++checks;
  const std::vector<double> got = ids.device_values(), want = ids.reference_values();
  const std::int64_t k = host.ids.size(1), experts = host.logits.size(1);
  std::int64_t different = 0;
  for (std::int64_t t = 0; t < host.logits.size(0); ++t) {
    const auto* g = got.data() + t * k;
    const auto* w = want.data() + t * k;
    if (std::equal(g, g + k, w)) continue;
    ++different;
    std::set<double> distinct(g, g + k);
    if (static_cast<std::int64_t>(distinct.size()) != k || *distinct.begin() < 0 || *distinct.rbegin() >= experts)
      return fail(what + ": ids are not a choice at token " + std::to_string(t));
    std::vector<float> logits, bias, rank(static_cast<std::size_t>(experts));
    for (std::int64_t e = 0; e < experts; ++e) {
      logits.push_back(static_cast<float>(reference::load(host.logits, t, e)));
      bias.push_back(host.expert_bias.defined() ? static_cast<float>(reference::load(host.expert_bias, e)) : 0);
    }
    sigmoid_group_rank_row(logits.data(), bias.data(), experts, host.groups, host.top_groups, rank.data());
    if (host.top_groups < host.groups) continue;  // groups of nearly equal worth may change places whole
    for (std::int64_t i = 0; i < k; ++i)
      if (std::abs(rank[static_cast<std::size_t>(g[i])] - rank[static_cast<std::size_t>(w[i])]) > 1e-6f)
        return fail(what + ": ids differ beyond a near tie at token " + std::to_string(t));
  }
  if (different > 2 + host.logits.size(0) / 100) fail(what + ": " + std::to_string(different) + " tokens differ");
}

void check_route(Random& random, std::int64_t tokens, std::int64_t experts, std::int64_t k, RouterScores kind) {
  const DType dtype = any_float(random);
  Tensor logits(dtype, {tokens, experts}, any_place(random));
  Tensor rounded(pick(random, {DType::bfloat16, DType::float16}), {tokens, experts}, {below(random, 2) * below(random, 5)});
  const Logits logits_kind = pick(random, {Logits::normal, Logits::coarse, Logits::repeated});
  fill_logits(logits, random, logits_kind);
  const Mask mask(random, tokens);
  Tensor ids(pick(random, {DType::int32, DType::int64}), {tokens, k}), scores(score_type(dtype), {tokens, k}),
      raw(score_type(dtype), {tokens, k});
  Tensor nan_tokens(DType::int32, {1}), bias(score_type(dtype), {experts});
  nan_tokens.fill([](std::int64_t) { return 7; });
  bias.fill([&](std::int64_t) { return static_cast<double>(below(random, 9) - 4) / 64; });

  std::int64_t groups = 1, top_groups = 1;
  const bool grouped = kind == RouterScores::sigmoid_group, biased = grouped && below(random, 2);
  if (grouped) {
    std::vector<std::int64_t> divisors;
    for (std::int64_t d = 1; d <= experts; ++d)
      if (experts % d == 0) divisors.push_back(d);
    groups = divisors[static_cast<std::size_t>(below(random, static_cast<std::int64_t>(divisors.size())))];
    const std::int64_t least = (k + experts / groups - 1) / (experts / groups);
    top_groups = least + below(random, groups - least + 1);
  }
  const bool renormalise = below(random, 2), with_raw = below(random, 2), counted = below(random, 4) != 0,
             with_rounded = dtype == DType::float32 && below(random, 3) != 0;
  const auto build = [&](bool device) {
    Route op{.logits = logits.on(device)};
    if (biased) op.expert_bias = bias.on(device);
    op.token_mask = mask.on(device);
    op.scores_kind = kind;
    op.groups = groups;
    op.top_groups = top_groups;
    op.renormalise = renormalise;
    op.scale = 2.5;
    op.ids = ids.on(device);
    op.scores = scores.on(device);
    if (with_raw) op.raw_scores = raw.on(device);
    if (counted) op.nan_tokens = nan_tokens.on(device);
    if (with_rounded) op.rounded_logits = rounded.on(device);
    return op;
  };
  const bool near_ties = grouped && dtype != DType::float64;
  const std::string what = std::string("route ") + kind_name(kind) + " " + to_string(dtype).data() + " T E K groups top " +
                           text({tokens, experts, k, groups, top_groups});
  std::vector<Output> outputs{{&ids, "ids", 0, near_ties}, {&scores, "scores", 2e-6, near_ties}};
  if (with_raw) outputs.push_back({&raw, "raw_scores", 2e-6, near_ties});
  if (counted) outputs.push_back({&nan_tokens, "nan_tokens", 0, false, true});
  if (with_rounded) outputs.push_back({&rounded, "rounded_logits", 0, true});
  check_operation(what, outputs, build);
  if (with_rounded) compare_rounded_logits(what, rounded);
  if (!near_ties) return;
  compare_near_ties(what, build(false), ids);
  if (ids.device_values() != ids.reference_values()) return;
  compare_numbers(what + ": scores", scores.device_values(), scores.reference_values(), 2e-6);
  if (with_raw) compare_numbers(what + ": raw_scores", raw.device_values(), raw.reference_values(), 2e-6);
}

/// The backward of what route gave: its ids are made on the CPU.
void check_route_backward(Random& random, std::int64_t tokens, std::int64_t experts, std::int64_t k, RouterScores kind) {
  const DType dtype = any_float(random), dlogits_dtype = below(random, 2) ? dtype : score_type(dtype), s = score_type(dtype);
  Tensor logits(dtype, {tokens, experts}, any_place(random));
  fill_logits(logits, random, Logits::normal);
  Tensor ids(pick(random, {DType::int32, DType::int64}), {tokens, k}), scores(s, {tokens, k}), raw(s, {tokens, k}),
      dscores(s, {tokens, k});
  Place rows = any_place(random);
  rows.inner_step = 1;  // of what is written
  Tensor dlogits(dlogits_dtype, {tokens, experts}, rows);
  fill_normal(dscores, random);
  const double scale = 2.5;
  const bool renormalise = below(random, 2);
  Route route{.logits = logits.host()};
  route.scores_kind = kind;
  route.renormalise = renormalise;
  route.scale = kind == RouterScores::sigmoid_group ? scale : 1;
  route.ids = ids.host(), route.scores = scores.host(), route.raw_scores = raw.host();
  reference::run(route, Execution{});
  const bool dirty = below(random, 2);  // duplicates and ids that are not here
  for (std::int64_t i = 0; dirty && i < tokens * k; ++i)
    if (below(random, 5) == 0) reference::store(ids.host(), static_cast<double>(below(random, experts + 4) - 2), i / k, i % k);
  for (Tensor* t : {&ids, &scores, &raw}) t->upload();
  check_operation(
      std::string("route_backward ") + kind_name(kind) + " " + to_string(dtype).data() + " T E K " + text({tokens, experts, k}),
      {{&dlogits, "dlogits", 4e-6, false, false, 0.1}}, [&](bool device) {
        RouteBackward op{.dscores = dscores.on(device), .scores = scores.on(device), .ids = ids.on(device)};
        if (kind == RouterScores::sigmoid_group) op.raw_scores = raw.on(device);
        if (kind == RouterScores::softmax || experts % 2) op.logits = logits.on(device);
        op.scores_kind = kind;
        op.renormalise = renormalise;
        op.scale = route.scale;
        op.dlogits = dlogits.on(device);
        return op;
      });
}

// ---- losses

/// Root mean square of p_e dloss/dP_e. dlogits are differences of such terms, which cancel where all experts have one fraction,
/// and always with a single expert.
double size_of_balance_terms(const LoadBalanceLossBackward& op) {
  const auto experts = static_cast<double>(op.logits.size(1)), valid = reference::load(op.valid_tokens, 0);
  const double c =
      op.normalisation == BalanceNormalisation::huggingface ? experts : experts / static_cast<double>(op.experts_per_token);
  double sum = 0;
  for (std::int64_t t = 0; t < op.logits.size(0); ++t) {
    if (!reference::valid_token(op.logits, op.token_mask, t)) continue;
    const reference::Vector logits = reference::load_row(op.logits, t);
    const bool shares = reference::by_sigmoid(op.scores_kind);
    const reference::Vector p = shares ? reference::sigmoid_share(logits) : reference::softmax(logits);
    for (std::size_t e = 0; e < p.size(); ++e) {
      const double term =
          p[e] * reference::load(op.dloss, 0) * c * reference::load(op.expert_fraction, static_cast<std::int64_t>(e)) / valid;
      sum += term * term;
    }
  }
  return std::sqrt(sum / static_cast<double>(std::max<std::int64_t>(1, op.dlogits.numel())));
}

void check_losses(Random& random, std::int64_t tokens, std::int64_t experts, std::int64_t k) {
  const DType dtype = any_float(random), s = score_type(dtype), d = below(random, 2) ? dtype : s;
  const RouterScores kind = pick(random, {RouterScores::softmax, RouterScores::sigmoid});
  const auto normalisation = pick(random, {BalanceNormalisation::huggingface, BalanceNormalisation::megatron});
  Tensor logits(dtype, {tokens, experts}, {0, below(random, 2) * 5});
  fill_logits(logits, random, Logits::normal);
  Tensor ids(pick(random, {DType::int32, DType::int64}), {tokens, k});
  ids.fill([&](std::int64_t) { return static_cast<double>(below(random, experts + 3) - 1); });
  const Mask mask(random, tokens);
  Tensor loss(s, {1}), fraction(s, {experts}), valid(s, {1}), dloss(s, {1}),
      dlogits(d, {tokens, experts}, {0, below(random, 2) * 3});
  dloss.fill([](std::int64_t) { return 1.75; });
  const std::string sizes = std::string(to_string(dtype)) + " T E K " + text({tokens, experts, k});

  check_operation("load_balance_loss " + sizes,
                  {{&loss, "loss", 1e-5}, {&fraction, "expert_fraction"}, {&valid, "valid_tokens", 0}}, [&](bool device) {
                    return LoadBalanceLoss{.logits = logits.on(device),
                                           .ids = ids.on(device),
                                           .token_mask = mask.on(device),
                                           .scores_kind = kind,
                                           .normalisation = normalisation,
                                           .loss = loss.on(device),
                                           .expert_fraction = fraction.on(device),
                                           .valid_tokens = valid.on(device)};
                  });
  for (Tensor* t : {&fraction, &valid}) t->upload();
  const auto backward = [&](bool device) {
    return LoadBalanceLossBackward{.dloss = dloss.on(device),
                                   .logits = logits.on(device),
                                   .token_mask = mask.on(device),
                                   .expert_fraction = fraction.on(device),
                                   .valid_tokens = valid.on(device),
                                   .experts_per_token = k,
                                   .scores_kind = kind,
                                   .normalisation = normalisation,
                                   .dlogits = dlogits.on(device)};
  };
  const double size = std::max(1e-6, size_of_balance_terms(backward(false)));  // float16 gradients end at 6e-8
  check_operation("load_balance_loss_backward " + sizes, {{&dlogits, "dlogits", 1e-5, false, false, size}}, backward);
  check_operation("z_loss " + sizes, {{&loss, "loss", 1e-5}, {&valid, "valid_tokens", 0}}, [&](bool device) {
    return ZLoss{
        .logits = logits.on(device), .token_mask = mask.on(device), .loss = loss.on(device), .valid_tokens = valid.on(device)};
  });
  valid.upload();
  check_operation("z_loss_backward " + sizes, {{&dlogits, "dlogits", 1e-5, false, false, 1e-6}}, [&](bool device) {
    return ZLossBackward{.dloss = dloss.on(device),
                         .logits = logits.on(device),
                         .token_mask = mask.on(device),
                         .valid_tokens = valid.on(device),
                         .dlogits = dlogits.on(device)};
  });
}

void check_update_expert_bias(Random& random, std::int64_t experts) {
  Tensor counts(pick(random, {DType::int32, DType::int64, DType::float32}), {experts}),
      bias(pick(random, {DType::float32, DType::float64}), {experts});
  const std::int64_t spread = pick<std::int64_t>(random, {1, 3, 100000});  // 1: balance, where nothing may move
  counts.fill([&](std::int64_t) { return static_cast<double>(below(random, spread)); });
  fill_normal(bias, random, 0.1);
  check_operation("update_expert_bias E " + text({experts}), {{&bias, "bias", 1e-7, false, true}}, [&](bool device) {
    return UpdateExpertBias{.counts = counts.on(device), .rate = 0.001, .bias = bias.on(device)};
  });
}

}  // namespace
}  // namespace intarsia::check_routing
