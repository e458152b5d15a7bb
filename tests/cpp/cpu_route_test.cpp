// The CPU backend's router, losses, index lists, combine and bias gradients against the plain loops of the reference backend:
// fresh random inputs, odd sizes, poisoned outputs and workspaces, guards around both, and the same bits for 1, 2 and 3
// threads.
#include "poisoned.h"

namespace intarsia {
namespace {

using namespace poisoned;

constexpr std::int64_t kExpertCounts[] = {1, 2, 3, 5, 60, 96, 127, 128, 129, 160, 255, 256, 384, 512, 1023, 1024, 1025, 2048};
constexpr std::int64_t kTokenCounts[] = {0, 1, 15, 16, 17, 31, 33, 1000};

/// Logits with ties, and with rows that hold NaN or infinities when `bad`.
Tensor logits_like(DType dtype, std::int64_t t, std::int64_t e, bool bad) {
  const Tensor logits = normal(dtype, {t, e}, 2);
  for (std::int64_t i = 0; e > 0 && i < t; ++i) {
    for (std::int64_t n = 0; n < e / 4; ++n) logits.set(i * e + below(e), logits[i * e + below(e)]);
    if (!bad || below(6) != 0) continue;
    const double values[] = {std::nan(""), INFINITY, -INFINITY};
    logits.set(i * e + below(e), values[below(3)]);
    if (below(4) == 0)
      for (std::int64_t j = 0; j < e; ++j) logits.set(i * e + j, -INFINITY);
  }
  return logits;
}

Tensor mask_of(std::int64_t t) {
  return Tensor(DType::boolean, {t}).fill([](std::int64_t) { return below(4) != 0; });
}

/// ids with sentinels on both sides and duplicates.
Tensor ids_of(DType dtype, std::int64_t t, std::int64_t k, std::int64_t e) {
  return Tensor(dtype, {t, k}).fill([&](std::int64_t) { return static_cast<double>(below(e + 3) - 1); });
}

BuildIndex index_op(const Tensor& ids, std::int64_t e, std::int64_t slack = 5) {
  const std::int64_t t = ids.view().size(0), k = ids.view().size(1);
  static std::vector<Tensor> keep;
  keep = {Tensor(DType::int32, {e + 1}), Tensor(DType::int32, {t * k + slack}), Tensor(DType::int32, {t * k + slack}),
          Tensor(DType::int32, {t, k}), Tensor(DType::int32, {e})};
  return {.ids = ids.view(),
          .expert_offsets = keep[0].view(),
          .row_token = keep[1].view(),
          .row_slot = keep[2].view(),
          .slot_row = keep[3].view(),
          .expert_counts = keep[4].view()};
}

constexpr DType kFloats[] = {DType::float32, DType::bfloat16, DType::float16};

// ---- the index lists

TEST(CpuBuildIndex, WorkedExample) {
  const std::int32_t choices[] = {2, 3, 0, 1, 0, 3, 1, 2, 0, 3};
  const Tensor ids = Tensor(DType::int32, {5, 2}).fill([&](std::int64_t i) { return choices[i]; });
  const Outputs lists = verify(index_op(ids, 4, 0));
  const auto values = [&](const char* name) {
    std::vector<double> v;
    for (std::int64_t i = 0; i < lists.at(name).numel(); ++i) v.push_back(lists.at(name)[i]);
    return v;
  };
  EXPECT_EQ(values("expert_offsets"), (std::vector<double>{0, 3, 5, 7, 10}));
  EXPECT_EQ(values("row_token"), (std::vector<double>{1, 2, 4, 1, 3, 0, 3, 0, 2, 4}));
  EXPECT_EQ(values("slot_row"), (std::vector<double>{5, 7, 0, 3, 1, 8, 4, 6, 2, 9}));
  EXPECT_EQ(values("expert_counts"), (std::vector<double>{3, 2, 2, 3}));
}

TEST(CpuBuildIndex, EveryExpertAndTokenCount) {
  std::int64_t turn = 0;
  for (const std::int64_t e : kExpertCounts) {
    for (const std::int64_t t : kTokenCounts) {
      const Tensor ids = ids_of(turn % 2 ? DType::int64 : DType::int32, t, 1 + turn % 11, e);
      const Tensor mask = mask_of(t);
      BuildIndex op = index_op(ids, e);
      if (++turn % 3 == 0) op.token_mask = mask.view();
      verify(op);
    }
  }
}

TEST(CpuBuildIndex, AllOnOneExpertAndFarSentinels) {
  verify(index_op(Tensor(DType::int32, {20000, 2}).fill([](std::int64_t) { return 3; }), 5));
  const double far[] = {-9e18, 9e18, 4294967296.0, 1, 0};
  verify(index_op(Tensor(DType::int64, {500, 3}).fill([&](std::int64_t) { return far[below(5)]; }), 2));
}

// ---- route

struct Family {
  RouterScores kind;
  bool renormalise;
  double scale;
};
constexpr Family kFamilies[] = {{RouterScores::softmax, true, 1},
                                {RouterScores::softmax_renorm, true, 1},
                                {RouterScores::sigmoid, true, 1},
                                {RouterScores::sigmoid_group, true, 2.5},
                                {RouterScores::sigmoid_group, false, 0.75}};

/// route, then route_backward and load_balance_loss with its backward on what it gave.
void verify_router(std::int64_t t, std::int64_t e, std::int64_t k, DType dtype, const Family& family, bool bad) {
  SCOPED_TRACE("T " + std::to_string(t) + " E " + std::to_string(e) + " K " + std::to_string(k) + " " +
               std::string(to_string(family.kind)) + " " + std::string(to_string(dtype)));
  const bool grouped = family.kind == RouterScores::sigmoid_group;
  const Tensor logits = logits_like(dtype, t, e, bad), mask = mask_of(t), bias = normal(DType::float32, {e}, 0.1);
  const Tensor ids(below(2) ? DType::int64 : DType::int32, {t, k}), scores(DType::float32, {t, k});
  const Tensor count = Tensor(DType::int32, {1}).fill([](std::int64_t) { return 7; });
  Route op{.logits = logits.view(),
           .scores_kind = family.kind,
           .renormalise = family.renormalise,
           .scale = family.scale,
           .ids = ids.view(),
           .scores = scores.view(),
           .raw_scores = scores.view(),
           .nan_tokens = count.view()};
  if (bad) op.token_mask = mask.view();
  if (grouped) op.expert_bias = bias.view();
  if (grouped && e % 4 == 0 && k <= e / 2) op.groups = 4, op.top_groups = 2;
  const Outputs routed = verify(op);
  if (::testing::Test::HasFatalFailure()) return;

  const Tensor dscores = normal(DType::float32, {t, k}), dlogits(dtype, {t, e}), one(DType::float32, {1});
  one.set(0, 1.25);
  verify(RouteBackward{.dscores = dscores.view(),
                       .scores = routed.at("scores").view(),
                       .ids = routed.at("ids").view(),
                       .raw_scores = grouped ? routed.at("raw_scores").view() : TensorView{},
                       .logits = family.kind == RouterScores::softmax ? logits.view() : TensorView{},
                       .scores_kind = family.kind,
                       .renormalise = family.renormalise,
                       .scale = family.scale,
                       .dlogits = dlogits.view()},
         4 * family.scale);
  const Tensor fraction(DType::float32, {e});
  const auto normalisation = below(2) ? BalanceNormalisation::megatron : BalanceNormalisation::huggingface;
  const Outputs loss = verify(LoadBalanceLoss{.logits = logits.view(),
                                              .ids = routed.at("ids").view(),
                                              .token_mask = op.token_mask,
                                              .scores_kind = family.kind,
                                              .normalisation = normalisation,
                                              .loss = one.view(),
                                              .expert_fraction = fraction.view(),
                                              .valid_tokens = one.view()});
  if (::testing::Test::HasFatalFailure()) return;
  verify(LoadBalanceLossBackward{.dloss = one.view(),
                                 .logits = logits.view(),
                                 .token_mask = op.token_mask,
                                 .expert_fraction = loss.at("expert_fraction").view(),
                                 .valid_tokens = loss.at("valid_tokens").view(),
                                 .experts_per_token = k,
                                 .scores_kind = family.kind,
                                 .normalisation = normalisation,
                                 .dlogits = dlogits.view()},
         1.25 * static_cast<double>(e) / static_cast<double>(std::max<std::int64_t>(1, t)));
}

TEST(CpuRoute, EveryExpertCount) {
  std::size_t turn = 0;
  for (const std::int64_t e : kExpertCounts)
    for (const std::int64_t k : {std::int64_t{1}, std::int64_t{2}, std::int64_t{8}, std::int64_t{64}})
      for (const Family& family : kFamilies) {
        if (k > e) continue;
        verify_router(kTokenCounts[turn % 7], e, k, kFloats[turn % 3], family, turn % 2 == 0);
        ++turn;
      }
}

TEST(CpuRoute, EveryTokenCount) {
  std::size_t turn = 0;
  for (const std::int64_t t : kTokenCounts)
    for (const Family& family : kFamilies) verify_router(t, 128, 8, kFloats[turn++ % 3], family, true);
}

Outputs route(const Tensor& logits, std::int64_t k) {
  const std::int64_t t = logits.view().size(0);
  const Tensor ids(DType::int32, {t, k}), scores(DType::float32, {t, k}), count(DType::int32, {1});
  count.set(0, 0);
  return run_on(Route{.logits = logits.view(),
                      .scores_kind = RouterScores::softmax_renorm,
                      .ids = ids.view(),
                      .scores = scores.view(),
                      .nan_tokens = count.view()},
                Backend::cpu, 2);
}

TEST(CpuRoute, TiesGoToTheLowestIdAndLastBitsCount) {
  const float near = std::nextafter(1.0f, 2.0f);
  const float row[] = {1.0f, near, 0.5f, 1.0f, near, 1.0f, -0.0f, 0.0f};
  const Outputs routed = route(Tensor(DType::float32, {1, 8}).fill([&](std::int64_t i) { return row[i]; }), 8);
  const double expected[] = {1, 4, 0, 3, 5, 2, 6, 7};
  for (std::int64_t k = 0; k < 8; ++k) EXPECT_EQ(routed.at("ids")[k], expected[k]);
}

TEST(CpuRoute, OneNanRowTouchesNoOther) {
  const Tensor logits = normal(DType::float32, {33, 60});
  const Outputs clean = route(logits, 4);
  logits.set(17 * 60 + 59, std::nan(""));
  const Outputs routed = route(logits, 4);
  EXPECT_EQ(routed.at("nan_tokens")[0], 1);
  for (std::int64_t i = 0; i < 33 * 4; ++i) {
    EXPECT_EQ(routed.at("ids")[i], i / 4 == 17 ? -1 : clean.at("ids")[i]);
    EXPECT_EQ(routed.at("scores")[i], i / 4 == 17 ? 0 : clean.at("scores")[i]);
  }
}

TEST(CpuRoute, ScoresOfVeryNegativeLogitsStillSumToOne) {
  const Tensor logits = Tensor(DType::float32, {4, 16}).fill([](std::int64_t i) { return i < 32 ? -60 : -1000; });
  const Tensor ids(DType::int32, {4, 4}), scores(DType::float32, {4, 4});
  const Outputs routed = run_on(
      Route{.logits = logits.view(), .scores_kind = RouterScores::sigmoid_group, .ids = ids.view(), .scores = scores.view()},
      Backend::cpu, 1);
  for (std::int64_t i = 0; i < 16; ++i) EXPECT_NEAR(routed.at("scores")[i], 0.25, 1e-6);
}

TEST(CpuRouteBackward, DuplicateIdsAddAndSentinelsDoNot) {
  for (const Family& family : kFamilies) {
    const Tensor logits = normal(DType::bfloat16, {50, 6}), dlogits(DType::float32, {50, 6});
    const Tensor scores = normal(DType::float32, {50, 4}, 0.2), dscores = normal(DType::float32, {50, 4});
    verify(RouteBackward{.dscores = dscores.view(),
                         .scores = scores.view(),
                         .ids = ids_of(DType::int64, 50, 4, 6).view(),
                         .raw_scores = scores.view(),
                         .logits = logits.view(),
                         .scores_kind = family.kind,
                         .renormalise = family.renormalise,
                         .scale = family.scale,
                         .dlogits = dlogits.view()},
           4);
  }
}

// ---- losses

double balance_loss(const Tensor& logits, const Tensor& ids, BalanceNormalisation normalisation) {
  const Tensor one(DType::float32, {1}), fraction(DType::float32, {logits.view().size(1)});
  return verify(LoadBalanceLoss{.logits = logits.view(),
                                .ids = ids.view(),
                                .normalisation = normalisation,
                                .loss = one.view(),
                                .expert_fraction = fraction.view(),
                                .valid_tokens = one.view()})
      .at("loss")[0];
}

TEST(CpuLosses, PerfectBalanceIsKOrOne) {
  for (const std::int64_t k : {1, 2, 8}) {
    const Tensor logits = Tensor(DType::float32, {64, 16}).fill([](std::int64_t) { return 0.0; });
    const Tensor ids = Tensor(DType::int32, {64, k}).fill([](std::int64_t i) { return static_cast<double>(i % 16); });
    EXPECT_NEAR(balance_loss(logits, ids, BalanceNormalisation::huggingface), static_cast<double>(k), 1e-5);
    EXPECT_NEAR(balance_loss(logits, ids, BalanceNormalisation::megatron), 1, 1e-6);
  }
}

TEST(CpuLosses, WithoutValidTokensAreZero) {
  const Tensor logits = Tensor(DType::bfloat16, {3, 5}).fill([](std::int64_t) { return std::nan(""); });
  const Tensor ids = Tensor(DType::int32, {3, 2}).fill([](std::int64_t) { return -1; });
  EXPECT_EQ(balance_loss(logits, ids, BalanceNormalisation::huggingface), 0);
  const Tensor none(DType::float32, {0, 5}), no_ids(DType::int32, {0, 2});
  EXPECT_EQ(balance_loss(none, no_ids, BalanceNormalisation::megatron), 0);
}

/// The largest |max| + |log of the sum| of a row: the absolute terms of its logsumexp, which may cancel to any value near 0.
double logsumexp_terms(const Tensor& logits, std::int64_t t, std::int64_t e) {
  double terms = 0;
  for (std::int64_t i = 0; e > 0 && i < t; ++i) {
    double largest = -INFINITY, sum = 0;
    for (std::int64_t j = 0; j < e; ++j) largest = std::max(largest, logits[i * e + j]);
    for (std::int64_t j = 0; j < e; ++j) sum += std::exp(logits[i * e + j] - largest);
    if (std::isfinite(sum)) terms = std::max(terms, std::abs(largest) + std::log(sum));
  }
  return terms;
}

TEST(CpuLosses, ZLoss) {
  std::size_t turn = 0;
  for (const std::int64_t e : kExpertCounts) {
    for (const std::int64_t t : {0, 1, 17}) {
      const Tensor logits = logits_like(kFloats[turn % 3], t, e, turn % 2 == 0), mask = mask_of(t), one(DType::float32, {1});
      const Tensor dlogits(turn++ % 4 ? logits.view().dtype : DType::float32, {t, e});
      const double terms = logsumexp_terms(logits, t, e);
      const Outputs loss =
          verify(ZLoss{.logits = logits.view(), .token_mask = mask.view(), .loss = one.view(), .valid_tokens = one.view()},
                 2 * terms * terms);
      one.set(0, -0.5);
      verify(ZLossBackward{.dloss = one.view(),
                           .logits = logits.view(),
                           .token_mask = mask.view(),
                           .valid_tokens = loss.at("valid_tokens").view(),
                           .dlogits = dlogits.view()},
             t > 0 ? terms / std::max(1.0, loss.at("valid_tokens")[0]) : 0);
    }
  }
}

TEST(CpuLosses, UpdateExpertBias) {
  for (const DType dtype : {DType::int32, DType::int64, DType::float32}) {
    const Tensor counts = Tensor(dtype, {129}).fill([](std::int64_t) { return static_cast<double>(below(4)); });
    const Tensor bias = normal(DType::float32, {129});
    verify(UpdateExpertBias{.counts = counts.view(), .rate = 0.01, .bias = bias.view()});
    counts.fill([](std::int64_t) { return 3; });
    const Outputs updated = verify(UpdateExpertBias{.counts = counts.view(), .bias = bias.view()});
    EXPECT_TRUE(updated.at("bias").same_bits(bias));
  }
}

// ---- token rounding

void verify_rounding(std::int64_t t, std::int64_t e, std::int64_t k, std::int64_t tile, Rounding rounding, bool bad) {
  SCOPED_TRACE("T " + std::to_string(t) + " E " + std::to_string(e) + " K " + std::to_string(k) + " tile " +
               std::to_string(tile) + " " + std::string(to_string(rounding)));
  const DType dtype = kFloats[below(3)];
  const Tensor logits = logits_like(dtype, t, e, bad), mask = mask_of(t);
  const std::int64_t capacity = std::min(t * k + e * (tile - 1), t * e) + below(3);
  const Tensor offsets(DType::int32, {e + 1}), rows(DType::int32, {capacity}), tokens(DType::int32, {t + 1});
  const Tensor score(DType::float32, {capacity});
  RoundTokens op{.logits = logits.view(),
                 .experts_per_token = k,
                 .tile = tile,
                 .rounding = rounding,
                 .seed = below(1000),
                 .expert_offsets = offsets.view(),
                 .row_token = rows.view(),
                 .row_slot = rows.view(),
                 .token_offsets = tokens.view(),
                 .token_rows = rows.view(),
                 .row_score = score.view()};
  if (bad) op.token_mask = mask.view();
  const Outputs lists = verify(op);
  if (::testing::Test::HasFatalFailure()) return;
  const Tensor dscores = normal(DType::float32, {capacity}), dlogits(dtype, {t, e});
  verify(RouteBackward{.dscores = dscores.view(),
                       .scores = lists.at("row_score").view(),
                       .logits = logits.view(),
                       .expert_offsets = lists.at("expert_offsets").view(),
                       .token_offsets = lists.at("token_offsets").view(),
                       .token_rows = lists.at("token_rows").view(),
                       .dlogits = dlogits.view()},
         4);
}

constexpr Rounding kRoundings[] = {Rounding::up, Rounding::down, Rounding::nearest, Rounding::stochastic, Rounding::balanced};

TEST(CpuRoundTokens, EveryRounding) {
  for (const Rounding rounding : kRoundings) {
    for (const std::int64_t e : {1, 2, 5, 17, 128}) {
      for (const std::int64_t t : {0, 1, 15, 33, 300}) {
        for (const std::int64_t tile : {1, 7, 16, 128})
          verify_rounding(t, e, std::min<std::int64_t>(e, 1 + below(8)), tile, rounding, below(2) == 0);
      }
    }
  }
}

TEST(CpuRoundTokens, ManyExpertsAndTokens) {
  for (const Rounding rounding : kRoundings) verify_rounding(1000, 96, 4, 64, rounding, true);
  verify_rounding(100, 1025, 8, 16, Rounding::up, true);
}

// ---- combine

TEST(CpuCombine, BothListsEveryDtype) {
  for (const DType dtype : kFloats) {
    for (const std::int64_t hidden : {1, 7, 64, 1030}) {
      for (const std::int64_t t : {0, 1, 33, 130}) {
        const std::int64_t k = 1 + below(9), e = 1 + below(12);
        const Outputs lists = run_on(index_op(ids_of(DType::int32, t, k, e), e), Backend::cpu, 1);
        const Tensor rows = normal(dtype, {t * k + 3, hidden}), scores = normal(DType::float32, {t, k});
        const Tensor addend = normal(dtype, {t, hidden}), y(dtype, {t, hidden});
        Combine op{.rows = rows.view(), .slot_row = lists.at("slot_row").view(), .scores = scores.view(), .y = y.view()};
        verify(op, 4.0 * static_cast<double>(k));
        op.scores = {};
        op.addend = addend.view();
        verify(op, 4.0 * static_cast<double>(k));

        const Tensor starts = Tensor(DType::int32, {t + 1}).fill([&](std::int64_t i) { return static_cast<double>(i * k); });
        const Tensor order =
            Tensor(DType::int32, {t * k}).fill([&](std::int64_t) { return static_cast<double>(below(t * k)); });
        const Tensor row_scores = normal(DType::float32, {t * k + 3});
        verify(Combine{.rows = rows.view(),
                       .token_offsets = starts.view(),
                       .token_rows = order.view(),
                       .scores = row_scores.view(),
                       .addend = addend.view(),
                       .y = y.view()},
               4.0 * static_cast<double>(k));
      }
    }
  }
}

TEST(CpuCombine, AddendMayBeTheOutput) {
  const Tensor rows = normal(DType::bfloat16, {20, 50}), addend = normal(DType::bfloat16, {10, 50}),
               y(DType::bfloat16, {10, 50});
  const Tensor slot_row = Tensor(DType::int32, {10, 2}).fill([](std::int64_t i) { return static_cast<double>(19 - i); });
  const Combine apart{.rows = rows.view(), .slot_row = slot_row.view(), .addend = addend.view(), .y = y.view()};
  Combine in_place = apart;
  in_place.y = addend.view();
  run(apart, {.backend = Backend::cpu});
  run(in_place, {.backend = Backend::cpu});
  EXPECT_TRUE(addend.same_bits(y));
}

TEST(CpuCombine, SumsInFp32) {  // 256 + 1 + ... + 1 in bfloat16 would stay 256
  const Tensor rows = Tensor(DType::bfloat16, {8, 3}).fill([](std::int64_t i) { return i < 3 ? 256 : 1; });
  const Tensor slot_row = Tensor(DType::int32, {1, 8}).fill([](std::int64_t i) { return static_cast<double>(i); });
  const Tensor y(DType::bfloat16, {1, 3});
  run(Combine{.rows = rows.view(), .slot_row = slot_row.view(), .y = y.view()}, {.backend = Backend::cpu});
  for (std::int64_t i = 0; i < 3; ++i) EXPECT_EQ(y[i], 264);  // 263 rounded once, to even
}

// ---- bias gradients

TEST(CpuBiasBackward, EveryForm) {
  for (int turn = 0; turn < 60; ++turn) {
    const std::int64_t t = kTokenCounts[turn % 7], k = 1 + below(4), e = kExpertCounts[turn % 9], width = 2 * (1 + below(200));
    const DType dtype = kFloats[turn % 3], gradient = turn % 2 ? dtype : DType::float32;
    const Outputs lists = run_on(index_op(ids_of(DType::int32, t, k, e), e), Backend::cpu, 1);
    const std::int64_t rows = lists.at("row_token").numel();
    const double rows_per_expert = static_cast<double>(rows) / static_cast<double>(e) + 8;
    const Tensor dz = normal(dtype, {rows, 2 * width}), dy = normal(dtype, {t, width + 1}),
                 dy_rows = normal(dtype, {rows, width});
    const Tensor scores = normal(DType::float32, {t, k}), row_scores = normal(DType::float32, {rows});
    const Tensor db_up = normal(gradient, {e, 2 * width}), db_down = normal(gradient, {e, width + 1});
    const std::int64_t blocks[] = {0, 1, 2, width};
    BiasBackward op{.dz = dz.view(),
                    .dy = dy.view(),
                    .expert_offsets = lists.at("expert_offsets").view(),
                    .row_token = lists.at("row_token").view(),
                    .scores = scores.view(),
                    .row_slot = lists.at("row_slot").view(),
                    .score_on = turn % 5 ? ScorePlacement::output : ScorePlacement::input,
                    .gate_block = blocks[turn % 4],
                    .accumulate = turn % 3 == 1,
                    .grad_scale = turn % 2 ? 1 : 0.125,
                    .db_up = db_up.view(),
                    .db_down = db_down.view()};
    verify(op, rows_per_expert);
    const Tensor db_rows = normal(gradient, {e, width});
    op.dy = dy_rows.view(), op.row_token = {}, op.db_down = db_rows.view();
    op.scores = row_scores.view(), op.row_slot = {};
    verify(op, rows_per_expert);
  }
}

}  // namespace
}  // namespace intarsia
