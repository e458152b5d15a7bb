// Checks and times the routing kernels of src/cuda/routing on a GPU, against the reference on the CPU.
//   routing_check [--quick] [--no-times] [--seed N] [--only OPERATION]      a line per failure and a summary; exit code 1 on
//   failure
// Fresh random inputs; poisoned outputs and workspaces of exactly the size asked for, with guards behind; every case runs twice
// and must give the same bits. --quick takes smaller shapes.
#include <algorithm>
#include <chrono>
#include <set>

#include "base/softmax.h"
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
  Tensor logits(dtype, {tokens, experts}, {below(random, 3), below(random, 2) * 3, 1 + (below(random, 8) == 0)});
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
  const bool renormalise = below(random, 2), with_raw = below(random, 2), counted = below(random, 4) != 0;
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
    return op;
  };
  const bool near_ties = grouped && dtype != DType::float64;
  const std::string what = std::string("route ") + kind_name(kind) + " " + to_string(dtype).data() + " T E K groups top " +
                           text({tokens, experts, k, groups, top_groups});
  std::vector<Output> outputs{{&ids, "ids", 0, near_ties}, {&scores, "scores", 2e-6, near_ties}};
  if (with_raw) outputs.push_back({&raw, "raw_scores", 2e-6, near_ties});
  if (counted) outputs.push_back({&nan_tokens, "nan_tokens", 0, false, true});
  check_operation(what, outputs, build);
  if (!near_ties) return;
  compare_near_ties(what, build(false), ids);
  if (ids.device_values() != ids.reference_values()) return;
  compare_numbers(what + ": scores", scores.device_values(), scores.reference_values(), 2e-6);
  if (with_raw) compare_numbers(what + ": raw_scores", raw.device_values(), raw.reference_values(), 2e-6);
}

/// The backward of what route gave: its ids are made on the CPU.
void check_route_backward(Random& random, std::int64_t tokens, std::int64_t experts, std::int64_t k, RouterScores kind) {
  const DType dtype = any_float(random), dlogits_dtype = below(random, 2) ? dtype : score_type(dtype), s = score_type(dtype);
  Tensor logits(dtype, {tokens, experts}, {0, below(random, 2) * 5});
  fill_logits(logits, random, Logits::normal);
  Tensor ids(pick(random, {DType::int32, DType::int64}), {tokens, k}), scores(s, {tokens, k}), raw(s, {tokens, k}),
      dscores(s, {tokens, k});
  Tensor dlogits(dlogits_dtype, {tokens, experts}, {below(random, 2), below(random, 2) * 7});
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
  check_operation("load_balance_loss_backward " + sizes, {{&dlogits, "dlogits", 1e-5, false, false, 1e-6}}, [&](bool device) {
    return LoadBalanceLossBackward{.dloss = dloss.on(device),
                                   .logits = logits.on(device),
                                   .token_mask = mask.on(device),
                                   .expert_fraction = fraction.on(device),
                                   .valid_tokens = valid.on(device),
                                   .experts_per_token = k,
                                   .scores_kind = kind,
                                   .normalisation = normalisation,
                                   .dlogits = dlogits.on(device)};
  });
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

// ---- index lists

void check_build_index(Random& random, std::int64_t tokens, std::int64_t experts, std::int64_t k) {
  Tensor ids(pick(random, {DType::int32, DType::int64}), {tokens, k});
  const std::int64_t skew = below(random, 3);  // any expert, one for nearly all, or few
  ids.fill([&](std::int64_t) {
    if (below(random, 20) == 0) return pick<double>(random, {-1, static_cast<double>(experts), -5, 2147483647, -2147483648.0});
    return static_cast<double>(skew == 1 && below(random, 10) ? experts / 2
                                                              : below(random, skew == 2 ? (experts + 3) / 4 : experts));
  });
  const Mask mask(random, tokens);
  const std::int64_t extra = below(random, 2) * 100;
  Tensor offsets(DType::int32, {experts + 1}), row_token(DType::int32, {tokens * k + extra}),
      row_slot(DType::int32, {tokens * k + extra / 2}), slot_row(DType::int32, {tokens, k});
  check_operation("build_index T E K " + text({tokens, experts, k}),
                  {{&offsets, "expert_offsets"}, {&row_token, "row_token"}, {&row_slot, "row_slot"}, {&slot_row, "slot_row"}},
                  [&](bool device) {
                    return BuildIndex{.ids = ids.on(device),
                                      .token_mask = mask.on(device),
                                      .expert_offsets = offsets.on(device),
                                      .row_token = row_token.on(device),
                                      .row_slot = row_slot.on(device),
                                      .slot_row = slot_row.on(device)};
                  });
}

struct RoundLists {
  Tensor offsets, row_token, row_slot, token_offsets, token_rows, row_score;
  RoundLists(std::int64_t tokens, std::int64_t experts, std::int64_t rows, DType s)
      : offsets(DType::int32, {experts + 1}),
        row_token(DType::int32, {rows}),
        row_slot(DType::int32, {rows}),
        token_offsets(DType::int32, {tokens + 1}),
        token_rows(DType::int32, {rows}),
        row_score(s, {rows}) {}
};

/// Lists that differ from the reference's must be right in themselves, and differ only where probabilities are nearly equal.
void compare_rounded(const std::string& what, RoundLists& lists) {
  ++checks;
  const auto offsets = lists.offsets.device_values(), tokens = lists.row_token.device_values(),
             slots = lists.row_slot.device_values(), token_offsets = lists.token_offsets.device_values(),
             rows = lists.token_rows.device_values(), score = lists.row_score.device_values();
  const auto want_tokens = lists.row_token.reference_values(), want_score = lists.row_score.reference_values();
  const auto used = static_cast<std::size_t>(offsets.back());
  if (token_offsets.front() != 0 || token_offsets.back() != offsets.back())
    return fail(what + ": token_offsets do not cover the rows");
  for (std::size_t r = used; r < tokens.size(); ++r)
    if (tokens[r] != -1 || slots[r] != -1 || rows[r] != -1 || score[r] != 0)
      return fail(what + ": a row past the last is not cleared");
  for (std::size_t r = 0; r < used; ++r) {
    const auto t = static_cast<std::size_t>(tokens[r]);
    if (tokens[r] < 0 || t + 1 >= token_offsets.size()) return fail(what + ": no such token in row " + std::to_string(r));
    if (slots[r] < token_offsets[t] || slots[r] >= token_offsets[t + 1] ||
        rows[static_cast<std::size_t>(slots[r])] != static_cast<double>(r))
      return fail(what + ": row_slot is not the inverse of token_rows at row " + std::to_string(r));
  }
  for (std::size_t t = 0; t + 1 < token_offsets.size(); ++t)
    for (auto i = static_cast<std::size_t>(token_offsets[t]) + 1; i < static_cast<std::size_t>(token_offsets[t + 1]); ++i)
      if (rows[i - 1] >= rows[i]) return fail(what + ": rows of token " + std::to_string(t) + " do not ascend");
  for (std::size_t e = 0; e + 1 < offsets.size(); ++e) {
    const auto first = static_cast<std::size_t>(offsets[e]), last = static_cast<std::size_t>(offsets[e + 1]);
    std::vector<double> lost, gained;  // probabilities of the rows that only one of them has
    const auto scores_of_rest = [&](const std::vector<double>& a, const std::vector<double>& s, const std::vector<double>& b) {
      std::vector<double> rest;
      const std::set<double> other(b.begin() + static_cast<long>(first), b.begin() + static_cast<long>(last));
      for (std::size_t r = first; r < last; ++r) {
        if (r > first && a[r - 1] >= a[r]) fail(what + ": tokens of an expert do not ascend");
        if (!other.count(a[r])) rest.push_back(s[r]);
      }
      std::sort(rest.begin(), rest.end());
      return rest;
    };
    lost = scores_of_rest(want_tokens, want_score, tokens), gained = scores_of_rest(tokens, score, want_tokens);
    for (std::size_t i = 0; i < std::min(lost.size(), gained.size()); ++i)
      if (std::abs(lost[i] - gained[i]) > 2e-6 * lost[i])
        return fail(what + ": rows differ beyond a near tie in expert " + std::to_string(e));
  }
  auto sorted = score, want = want_score;
  for (std::size_t e = 0; e + 1 < offsets.size(); ++e)
    for (auto* s : {&sorted, &want})
      std::sort(s->begin() + static_cast<long>(offsets[e]), s->begin() + static_cast<long>(offsets[e + 1]));
  compare_numbers(what + ": row_score", sorted, want, 2e-6);
}

void check_round_tokens(Random& random, std::int64_t tokens, std::int64_t experts, std::int64_t k, Rounding rounding) {
  const DType dtype = any_float(random), s = score_type(dtype);
  Tensor logits(dtype, {tokens, experts}, {0, below(random, 2) * 5});
  fill_logits(logits, random, pick(random, {Logits::normal, Logits::repeated, Logits::coarse}));
  const Mask mask(random, tokens);
  const std::int64_t tile = pick<std::int64_t>(random, {1, 2, 8, 64, 128}), seed = below(random, 1000);
  const std::int64_t rows = std::min(tokens * k + experts * (tile - 1), tokens * experts) + below(random, 2) * 60;
  RoundLists lists(tokens, experts, rows, s);
  const auto build = [&](bool device) {
    RoundTokens op{.logits = logits.on(device),
                   .token_mask = mask.on(device),
                   .experts_per_token = k,
                   .tile = tile,
                   .rounding = rounding,
                   .seed = seed};
    op.expert_offsets = lists.offsets.on(device);
    op.row_token = lists.row_token.on(device), op.row_slot = lists.row_slot.on(device);
    op.token_offsets = lists.token_offsets.on(device), op.token_rows = lists.token_rows.on(device);
    op.row_score = lists.row_score.on(device);
    return op;
  };
  const std::string what = std::string("round_tokens ") + to_string(rounding).data() + " " + to_string(dtype).data() +
                           " T E K tile " + text({tokens, experts, k, tile});
  check_operation(what,
                  {{&lists.offsets, "expert_offsets"},
                   {&lists.row_token, "row_token", 0, true},
                   {&lists.row_slot, "row_slot", 0, true},
                   {&lists.token_offsets, "token_offsets", 0, true},
                   {&lists.token_rows, "token_rows", 0, true},
                   {&lists.row_score, "row_score", 0, true}},
                  build);
  if (lists.offsets.device_values() == lists.offsets.reference_values()) compare_rounded(what, lists);

  // the CSR form of route_backward, on these very lists
  for (Tensor* t : {&lists.offsets, &lists.token_offsets, &lists.token_rows, &lists.row_score}) t->upload();
  Tensor dscores(s, {rows}), dlogits(below(random, 2) ? dtype : s, {tokens, experts});
  fill_normal(dscores, random);
  check_operation("route_backward (CSR) after " + what, {{&dlogits, "dlogits", 4e-6, false, false, 0.1}}, [&](bool device) {
    RouteBackward op{.dscores = dscores.on(device), .scores = lists.row_score.on(device), .logits = logits.on(device)};
    op.expert_offsets = lists.offsets.on(device), op.token_offsets = lists.token_offsets.on(device),
    op.token_rows = lists.token_rows.on(device);
    op.dlogits = dlogits.on(device);
    return op;
  });
}

// ---- combine, bias gradients

void check_combine(Random& random, std::int64_t tokens, std::int64_t k, std::int64_t hidden, bool csr) {
  const DType dtype = any_float(random), s = score_type(dtype);
  const std::int64_t capacity = tokens * k + 3;
  Tensor rows(dtype, {capacity, hidden}, {below(random, 3) == 0, below(random, 3) * 4});
  fill_normal(rows, random);
  Tensor slot_row(DType::int32, {tokens, k}), token_offsets(DType::int32, {tokens + 1}), token_rows(DType::int32, {capacity});
  Tensor scores(s, csr ? std::vector<std::int64_t>{capacity} : std::vector<std::int64_t>{tokens, k});
  fill_normal(scores, random);
  slot_row.fill([&](std::int64_t) { return below(random, 6) == 0 ? -1.0 : static_cast<double>(below(random, capacity)); });
  std::int64_t place = 0;
  token_offsets.fill([&](std::int64_t t) {
    if (t > 0) place += below(random, k + 1);
    return static_cast<double>(place);
  });
  token_rows.fill([&](std::int64_t) { return static_cast<double>(below(random, capacity)); });
  const std::int64_t addend_kind = below(random, 4);  // none, a tensor of its own, one with an inner stride, y itself
  Tensor y(dtype, {tokens, hidden}, {below(random, 4) == 0, below(random, 3) * 8}),
      addend(dtype, {tokens, hidden}, {0, 8, addend_kind == 2 ? 2 : 1});
  fill_normal(addend, random);
  fill_normal(y, random);
  const bool scored = below(random, 3) != 0;
  check_operation(std::string("combine ") + to_string(dtype).data() + (csr ? " CSR" : "") + " T K H addend " +
                      text({tokens, k, hidden, addend_kind}),
                  {{&y, "y", 2e-6, false, addend_kind == 3}}, [&](bool device) {
                    Combine op{.rows = rows.on(device)};
                    if (csr) op.token_offsets = token_offsets.on(device), op.token_rows = token_rows.on(device);
                    else op.slot_row = slot_row.on(device);
                    if (scored) op.scores = scores.on(device);
                    if (addend_kind == 1 || addend_kind == 2) op.addend = addend.on(device);
                    if (addend_kind == 3) op.addend = y.on(device);
                    op.y = y.on(device);
                    return op;
                  });
}

void check_bias_backward(Random& random, std::int64_t rows, std::int64_t experts, std::int64_t half, std::int64_t hidden) {
  const DType dtype = any_float(random), s = score_type(dtype), db_dtype = below(random, 2) ? dtype : s;
  const std::int64_t capacity = rows + below(random, 2) * 37, tokens = rows / 2 + 1, k = 3;
  Tensor offsets(DType::int32, {experts + 1});
  std::vector<double> cuts;
  for (std::int64_t e = 1; e < experts; ++e)
    cuts.push_back(static_cast<double>(below(random, 3) ? below(random, rows + 1) : 0));  // many empty
  std::sort(cuts.begin(), cuts.end());
  offsets.fill([&](std::int64_t e) {
    return e == 0 ? 0 : e == experts ? static_cast<double>(rows) : cuts[static_cast<std::size_t>(e - 1)];
  });
  const bool gathered = below(random, 2), by_slot = below(random, 2), accumulate = below(random, 2);
  Tensor dz(dtype, {capacity, 2 * half}, {below(random, 3) == 0, below(random, 2) * 8}),
      dy(dtype, {gathered ? tokens : capacity, hidden}, {0, 0, 1 + (below(random, 4) == 0)});
  fill_normal(dz, random), fill_normal(dy, random);
  Tensor row_token(DType::int32, {capacity}), row_slot(DType::int32, {capacity});
  row_token.fill([&](std::int64_t) { return static_cast<double>(below(random, tokens)); });
  row_slot.fill([&](std::int64_t) { return static_cast<double>(below(random, tokens * k)); });
  Tensor scores(s, by_slot ? std::vector<std::int64_t>{tokens, k} : std::vector<std::int64_t>{capacity});
  fill_normal(scores, random);
  Tensor db_up(db_dtype, {experts, 2 * half}, {0, 4}),
      db_down(db_dtype, {experts, hidden}, {0, 0, 1 + (below(random, 3) == 0)});
  fill_normal(db_up, random), fill_normal(db_down, random);
  const auto gate_block = pick<std::int64_t>(random, {0, 1, half});
  const auto score_on = pick(random, {ScorePlacement::output, ScorePlacement::inside, ScorePlacement::input});
  const bool scored = below(random, 4) != 0;
  check_operation(std::string("bias_backward ") + to_string(dtype).data() + " R E I H " + text({rows, experts, half, hidden}),
                  {{&db_up, "db_up", 4e-6, false, accumulate}, {&db_down, "db_down", 4e-6, false, accumulate}},
                  [&](bool device) {
                    BiasBackward op{.dz = dz.on(device), .dy = dy.on(device), .expert_offsets = offsets.on(device)};
                    if (gathered) op.row_token = row_token.on(device);
                    if (scored) op.scores = scores.on(device);
                    if (scored && by_slot) op.row_slot = row_slot.on(device);
                    op.score_on = score_on;
                    op.gate_block = gate_block;
                    op.accumulate = accumulate;
                    op.grad_scale = 0.5;
                    op.db_up = db_up.on(device), op.db_down = db_down.on(device);
                    return op;
                  });
}

// ---- router_logits

void check_router_logits(Random& random, std::int64_t tokens, std::int64_t hidden, std::int64_t experts) {
  const DType dtype = any_float(random), s = score_type(dtype);
  const auto either = [&] { return below(random, 2) ? dtype : s; };
  const std::int64_t gap = pick<std::int64_t>(random, {0, 0, 8, 3});
  Tensor x(dtype, {tokens, hidden}, {below(random, 4) == 0, gap, 1 + (below(random, 10) == 0)}),
      w(either(), {experts, hidden}, {0, gap});
  Tensor bias(either(), {experts}, {0, 0, 2}), logits(either(), {tokens, experts}, {0, below(random, 2) * 3});
  fill_normal(x, random), fill_normal(w, random), fill_normal(bias, random);
  const bool biased = below(random, 2);
  const std::string sizes =
      std::string(to_string(dtype)) + " w " + to_string(w.dtype()).data() + " T H E " + text({tokens, hidden, experts});
  check_operation("router_logits " + sizes, {{&logits, "logits", 1e-5}}, [&](bool device) {
    RouterLogits op{.x = x.on(device), .w_router = w.on(device)};
    if (biased) op.bias = bias.on(device);
    op.logits = logits.on(device);
    return op;
  });

  Tensor dlogits(either(), {tokens, experts}, {below(random, 4) == 0, below(random, 2) * 4});
  fill_normal(dlogits, random, 1e-3);
  Tensor dx(dtype, {tokens, hidden}, {0, gap}), dw(below(random, 2) ? w.dtype() : s, {experts, hidden}),
      dbias(either(), {experts}, {0, 0, 2});
  const std::int64_t absent = below(random, 5);
  std::vector<Output> outputs;
  if (absent != 0) outputs.push_back({&dx, "dx", 2e-5});
  if (absent != 1) outputs.push_back({&dw, "dw_router", 2e-5});
  if (absent != 2) outputs.push_back({&dbias, "dbias", 1e-5});
  check_operation("router_logits_backward " + sizes + " dlogits " + to_string(dlogits.dtype()).data(), outputs,
                  [&](bool device) {
                    RouterLogitsBackward op{.dlogits = dlogits.on(device), .x = x.on(device), .w_router = w.on(device)};
                    if (absent != 0) op.dx = dx.on(device);
                    if (absent != 1) op.dw_router = dw.on(device);
                    if (absent != 2) op.dbias = dbias.on(device);
                    return op;
                  });
}

// ---- the grids

void check_all(Random& random) {
  const auto run = [](const char* name, const auto& body) {
    if (!only.empty() && only != name) return;
    const int before = checks, failed = failures;
    const auto start = std::chrono::steady_clock::now();
    body();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    std::printf("%-20s %5d checks, %d failures, %.1f s\n", name, checks - before, failures - failed, seconds.count());
    std::fflush(stdout);
  };
  const std::vector<std::int64_t> all_experts{1, 2, 3, 5, 60, 128, 129, 256, 512, 1023, 1025, 2048, 4096};
  const std::vector<std::int64_t> all_tokens{0, 1, 17, 33, 1000, 4097};
  const auto grid = [&](std::int64_t work_per_cell, const auto& body) {  // body(T, E, K)
    for (const std::int64_t experts : all_experts)
      for (const std::int64_t tokens : all_tokens)
        if (tokens * experts * work_per_cell <= budget() || tokens <= 17)
          body(tokens, experts, std::min(experts, pick<std::int64_t>(random, {1, 2, 3, 8, 10, 64})));
  };
  run("route", [&] {
    for (const RouterScores kind :
         {RouterScores::softmax, RouterScores::softmax_renorm, RouterScores::sigmoid_group, RouterScores::sigmoid})
      grid(2, [&](auto t, auto e, auto k) { check_route(random, t, e, k, kind); });
  });
  run("route_backward", [&] {
    for (const RouterScores kind :
         {RouterScores::softmax, RouterScores::softmax_renorm, RouterScores::sigmoid_group, RouterScores::sigmoid})
      grid(2, [&](auto t, auto e, auto k) { check_route_backward(random, t, e, k, kind); });
  });
  run("losses", [&] { grid(8, [&](auto t, auto e, auto k) { check_losses(random, t, e, k); }); });
  run("update_expert_bias", [&] {
    for (const std::int64_t e : all_experts) check_update_expert_bias(random, e);
  });
  run("build_index", [&] {
    for (int repeat = 0; repeat < 3; ++repeat)
      for (const std::int64_t e : {1, 2, 3, 5, 60, 128, 129, 256, 512, 1023, 1024, 1025, 2048, 4096, 10000})
        for (const std::int64_t t : all_tokens)
          for (const std::int64_t k : {std::int64_t{1}, pick<std::int64_t>(random, {2, 8, 22, 64})})
            if (t * k <= (quick ? 6000 : 300000)) check_build_index(random, t, e, k);
  });
  run("round_tokens", [&] {
    for (const Rounding rounding : {Rounding::up, Rounding::down, Rounding::nearest, Rounding::stochastic, Rounding::balanced})
      grid(4, [&](auto t, auto e, auto k) { check_round_tokens(random, t, e, k, rounding); });
  });
  run("combine", [&] {
    for (const bool csr : {false, true})
      for (const std::int64_t hidden : {1, 2, 7, 8, 16, 60, 96, 130, 256, 1000})
        for (const std::int64_t t : all_tokens)
          for (const std::int64_t k : {std::int64_t{1}, pick<std::int64_t>(random, {2, 4, 8, 22})})
            if (t * k * hidden <= budget()) check_combine(random, t, k, hidden, csr);
  });
  run("bias_backward", [&] {
    for (const std::int64_t rows : {0, 1, 127, 128, 129, 1000, 5000})
      for (const std::int64_t experts : {1, 5, 128, 300})
        for (const std::int64_t half : {1, 6, 64})
          if (rows * (half + 8) <= budget())
            check_bias_backward(random, rows, experts, half, pick<std::int64_t>(random, {1, 5, 8, 96, 200}));
  });
  run("router_logits", [&] {
    for (const std::int64_t experts : {1, 5, 60, 64, 65, 128, 200, 512})
      for (const std::int64_t hidden : {1, 7, 8, 33, 96, 256, 1000})
        for (const std::int64_t t : {0, 1, 17, 130, 600})
          if (t * experts * hidden <= (quick ? 200000 : 3000000))
            for (int repeat = 0; repeat < 2; ++repeat) check_router_logits(random, t, hidden, experts);
  });
}

}  // namespace
}  // namespace intarsia::check_routing

int main(int argc, char** argv) {
  using namespace intarsia::check_routing;
  std::uint64_t seed = static_cast<std::uint64_t>(std::chrono::system_clock::now().time_since_epoch().count());
  bool times = true;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--quick") quick = true;
    else if (argument == "--no-times") times = false;
    else if (argument == "--only" && i + 1 < argc) only = argv[++i];
    else if (argument == "--seed" && i + 1 < argc) seed = std::stoull(argv[++i]);
  }
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  Random random(seed);
  try {
    check_all(random);
    if (!quick && only.empty()) check_past_2_31(random);
    if (times && !quick && only.empty()) print_times(random);
  } catch (const std::exception& e) {
    fail(e.what());
  }
  std::printf("%s: %d checks, %d failures\n", failures ? "FAILED" : "passed", checks, failures);
  return failures ? 1 : 0;
}
