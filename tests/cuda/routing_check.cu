// Checks and times the routing kernels of src/cuda/routing on a GPU, against the reference on the CPU.
//   routing_check [--quick] [--no-times] [--seed N] [--only OPERATION]      a line per failure and a summary; exit code 1 on
//   failure
// Fresh random inputs; poisoned outputs and workspaces of exactly the size asked for, with guards behind; every case runs twice
// and must give the same bits. --quick takes smaller shapes.
#include <algorithm>
#include <chrono>
#include <numeric>
#include <set>

#include "base/softmax.h"
#include "routing_harness.h"
#include "routing_scores.h"
#include "routing_times.h"

namespace intarsia::check_routing {
namespace {

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
      row_slot(DType::int32, {tokens * k + extra / 2}), slot_row(DType::int32, {tokens, k}), counts(DType::int32, {experts});
  check_operation("build_index T E K " + text({tokens, experts, k}),
                  {{&offsets, "expert_offsets"},
                   {&row_token, "row_token"},
                   {&row_slot, "row_slot"},
                   {&slot_row, "slot_row"},
                   {&counts, "expert_counts"}},
                  [&](bool device) {
                    return BuildIndex{.ids = ids.on(device),
                                      .token_mask = mask.on(device),
                                      .expert_offsets = offsets.on(device),
                                      .row_token = row_token.on(device),
                                      .row_slot = row_slot.on(device),
                                      .slot_row = slot_row.on(device),
                                      .expert_counts = counts.on(device)};
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

/// Sums of squares of a matrix over the other axis.
std::vector<double> squares(const Tensor& t, int axis) {
  std::vector<double> sums(static_cast<std::size_t>(t.size(axis)));
  const std::vector<double> values = t.reference_values();
  const auto columns = static_cast<std::size_t>(t.size(1));
  for (std::size_t i = 0; i < values.size(); ++i) sums[axis == 0 ? i / columns : i % columns] += values[i] * values[i];
  return sums;
}

/// What sums of the products of two factors, `squares` along their common axis, are in the root mean square when signs are
/// random. That is what errors of the single products are measured by: an output of few sums may cancel by chance, and its own
/// size then says nothing about them. Of many sums it is the size itself.
double size_of_sums(const std::vector<double>& a, const std::vector<double>& b, std::int64_t outputs) {
  return std::sqrt(std::inner_product(a.begin(), a.end(), b.begin(), 0.0) /
                   static_cast<double>(std::max<std::int64_t>(1, outputs)));
}

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
  const Output out{&logits, "logits", 1e-5, false, false, size_of_sums(squares(x, 1), squares(w, 1), tokens * experts)};
  check_operation("router_logits " + sizes, {out}, [&](bool device) {
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
  const auto wanted = [&](Tensor& tensor, const char* name, double limit, double size) {
    outputs.push_back({&tensor, name, limit, false, false, size});
  };
  const std::vector<double> of_token = squares(dlogits, 0), ones(of_token.size(), 1.0);
  // Beside a bfloat16 weight the wgmma products take dlogits rounded to it: each by half an ulp at most, many by less together.
  const double rounded = tokens * experts < 100 ? 0x1.02p-8 : 3e-3;
  const double limit = dtype == DType::bfloat16 && w.dtype() == DType::bfloat16 ? rounded : 2e-5;
  if (absent != 0) wanted(dx, "dx", limit, size_of_sums(squares(dlogits, 1), squares(w, 0), tokens * hidden));
  if (absent != 1) wanted(dw, "dw_router", limit, size_of_sums(of_token, squares(x, 0), experts * hidden));
  if (absent != 2) wanted(dbias, "dbias", 1e-5, size_of_sums(of_token, ones, experts));
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
  const std::vector<std::int64_t> all_experts{1,  2,   3,   4,   5,   8,   16,  17,   32,   33,   60,   64,
                                              65, 128, 129, 132, 256, 260, 512, 1023, 1024, 1025, 2048, 4096};
  const std::vector<std::int64_t> all_tokens{0, 1, 17, 33, 1000, 4097};
  const auto grid = [&](std::int64_t work_per_cell, const auto& body) {  // body(T, E, K)
    for (const std::int64_t experts : all_experts)
      for (const std::int64_t tokens : all_tokens)
        if (tokens * experts * work_per_cell <= budget() || tokens <= 17)
          body(tokens, experts, std::min(experts, pick<std::int64_t>(random, {1, 2, 3, 8, 10, 32, 33, 64})));
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
