// The row functions that both backends rank by, and the counter-based random numbers.
#include <gtest/gtest.h>

#include <set>
#include <vector>

#include "base/random.h"
#include "base/softmax.h"

namespace intarsia {
namespace {

TEST(SoftmaxRow, SumsToOneAtAnyOffset) {
  for (const float offset : {-1e4f, -80.0f, 0.0f, 1e4f}) {
    const std::vector<float> logits{offset, offset + 1, offset + 2};
    std::vector<float> p(3);
    softmax_row(logits.data(), 3, p.data());
    const double e = std::exp(1.0), sum = 1 + e + e * e;
    EXPECT_NEAR(p[0], 1 / sum, 1e-6);
    EXPECT_NEAR(p[1], e / sum, 1e-6);
    EXPECT_NEAR(p[2], e * e / sum, 1e-6);
    EXPECT_NEAR(log_sum_exp(logits.data(), 3), offset + std::log(sum), 1e-6 * (1 + std::abs(offset)));
  }
}

TEST(SoftmaxRow, MinusInfinityHasNoProbability) {
  double p[2] = {-INFINITY, 3};
  softmax_row(p, 2, p);
  EXPECT_EQ(p[0], 0);
  EXPECT_EQ(p[1], 1);
}

TEST(Routable, RefusesNaNAndInfiniteMaxima) {
  const float good[] = {1, -INFINITY}, nan[] = {1, NAN}, high[] = {1, INFINITY}, low[] = {-INFINITY, -INFINITY};
  EXPECT_TRUE(routable(good, 2));
  EXPECT_FALSE(routable(nan, 2));
  EXPECT_FALSE(routable(high, 2));
  EXPECT_FALSE(routable(low, 2));
}

TEST(SigmoidShareRow, IsSigmoidOverItsSum) {
  const double logits[] = {-2, 0.5, 3};
  double p[3];
  sigmoid_share_row(logits, 3, p);
  const double sum = sigmoid(-2.0) + sigmoid(0.5) + sigmoid(3.0);
  for (int e = 0; e < 3; ++e) EXPECT_NEAR(p[e], sigmoid(logits[e]) / sum, 1e-15);
}

TEST(SigmoidShareRow, DoesNotDivideZeroByZero) {
  const float logits[] = {-1000, -1000, -1001};
  float p[3];
  sigmoid_share_row(logits, 3, p);
  EXPECT_NEAR(p[0] + p[1] + p[2], 1, 1e-6);
  EXPECT_NEAR(p[2] / p[0], std::exp(-1.0f), 1e-5);
}

TEST(SigmoidGroupRankRow, KeepsTheBestGroups) {
  // sigmoid(0) = 0.5 for all, so the bias decides: sums of the best two are 0.75, 0.875, 0.875, 0.25 above 1
  const std::vector<float> logits(12, 0.0f),
      bias{0.5f, 0.25f, -9, 0.75f, 0.125f, 0.125f, 0.4375f, 0.4375f, 0.25f, 0.125f, 0.125f, 0.125f};
  std::vector<float> rank(12);
  sigmoid_group_rank_row(logits.data(), bias.data(), 12, 4, 1, rank.data());
  for (std::size_t e = 0; e < 12; ++e) {
    if (e / 3 == 1) EXPECT_EQ(rank[e], 0.5f + bias[e]);  // tie with group 2: the lower group stays
    else EXPECT_EQ(rank[e], -INFINITY);
  }
  sigmoid_group_rank_row<float>(logits.data(), nullptr, 12, 4, 4, rank.data());
  for (const float r : rank) EXPECT_EQ(r, 0.5f);
}

TEST(SigmoidGroupRankRow, GroupsOfOneAreWorthTheirOnly) {
  const double logits[] = {1, 3, 2};
  double rank[3];
  sigmoid_group_rank_row<double>(logits, nullptr, 3, 3, 2, rank);
  EXPECT_EQ(rank[0], -INFINITY);
  EXPECT_EQ(rank[1], sigmoid(3.0));
  EXPECT_EQ(rank[2], sigmoid(2.0));
}

TEST(Uniform01, IsUniformAndHasNoState) {
  double sum = 0;
  std::set<double> seen;
  for (std::uint64_t i = 0; i < 10000; ++i) {
    const double u = uniform01(42, i);
    ASSERT_GE(u, 0);
    ASSERT_LT(u, 1);
    ASSERT_EQ(u, uniform01(42, i));
    sum += u;
    seen.insert(u);
  }
  EXPECT_NEAR(sum / 10000, 0.5, 0.015);
  EXPECT_EQ(seen.size(), 10000u);
  for (std::uint64_t i = 0; i < 100; ++i)
    EXPECT_NE(uniform01(1, i + 1), uniform01(2, i)) << "seeds must not be shifts of one another";
}

}  // namespace
}  // namespace intarsia
