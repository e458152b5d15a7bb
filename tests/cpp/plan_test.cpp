// The plan: formulas of docs/memory.md, and placements that never let two live buffers share bytes.
#include <gtest/gtest.h>

#include "intarsia/error.h"
#include "intarsia/plan.h"
#include "plan/layer_workspace.h"

namespace intarsia {
namespace {

LayerShape qwen3() {
  return {.tokens = 4096, .hidden = 2048, .width = 768, .experts = 128, .experts_per_token = 8, .dtype = DType::bfloat16};
}

TEST(Plan, SavedBytesFollowTheFormula) {
  const LayerShape s = qwen3();
  const std::size_t t = 4096, h = 2048, r = t * 8, i = 768, e = 128;
  // x 2TH, z 4RI, row_token + row_slot + slot_row + scores + ids 20R, expert_offsets 4(E+1)
  EXPECT_EQ(plan_layer(s, {.has_router = true}).saved_bytes, 2 * t * h + 4 * r * i + 20 * r + 4 * (e + 1));
  EXPECT_EQ(plan_layer(s, {.save = SaveMode::input, .has_router = true}).saved_bytes, 2 * t * h + 20 * r + 4 * (e + 1));
  EXPECT_EQ(plan_layer(s, {}).saved_bytes, 2 * t * h + 4 * r * i + 16 * r + 4 * (e + 1));
  EXPECT_EQ(plan_layer(s, {.training = false, .has_router = true}).saved_bytes, 0u);
}

TEST(Plan, FamiliesSaveWhatTheirBackwardNeeds) {
  const LayerShape s = qwen3();
  const std::size_t r = 4096 * 8, plain = plan_layer(s, {.has_router = true}).saved_bytes;
  EXPECT_EQ(plan_layer(s, {.router = RouterScores::sigmoid_group, .has_router = true}).saved_bytes, plain + 4 * r);
  EXPECT_EQ(plan_layer(s, {.router = RouterScores::softmax, .router_keeps_logits = true, .has_router = true}).saved_bytes,
            plain + 2 * 4096 * 128);
}

TEST(Plan, LiveBuffersNeverOverlap) {
  for (int choice = 0; choice < 32; ++choice) {
    LayerShape s = qwen3();
    s.sorted_rows = choice & 1;
    const Plan plan = plan_layer(s, {.save = choice & 2 ? SaveMode::input : SaveMode::preactivation,
                                     .overwrite_z = (choice & 4) != 0,
                                     .bias_gradient = (choice & 16) != 0,
                                     .backend = choice & 8 ? Backend::cuda : Backend::cpu,
                                     .threads = 2});
    for (const Buffer& a : plan.buffers)
      for (const Buffer& b : plan.buffers) {
        const bool same_pass = (a.first < plan.border) == (b.first < plan.border);
        if (&a == &b || a.kind != BufferKind::workspace || b.kind != BufferKind::workspace || !same_pass) continue;
        const bool together = a.first <= b.last && b.first <= a.last;
        const bool apart = a.offset + a.bytes <= b.offset || b.offset + b.bytes <= a.offset;
        EXPECT_TRUE(!together || apart) << a.name << " and " << b.name;
        const std::size_t block = a.first < plan.border ? plan.forward_workspace_bytes : plan.backward_workspace_bytes;
        EXPECT_LE(a.offset + a.bytes, block) << a.name;
        EXPECT_EQ(a.offset % 256, 0u);
      }
  }
}

TEST(Plan, BiasSumsTakeThePlaceOfWhatIsDead) {
  LayerShape s = qwen3();
  const auto cuda = [&](bool bias) { return plan_layer(s, {.bias_gradient = bias, .backend = Backend::cuda}); };
  for (const bool sorted : {false, true}) {
    s.sorted_rows = sorted;
    const Plan plan = cuda(true);
    const Buffer* sums = plan.backward_workspace("bias_sums");
    ASSERT_NE(sums, nullptr);
    // 4096 * 8 rows are 256 slices of 128; 2048 columns of db_down are more than 2 * 768 of db_up
    EXPECT_EQ(sums->bytes, (256u + 128u) * 2048u * 4u);
    EXPECT_EQ(plan.steps[static_cast<std::size_t>(sums->first)], "bias_backward");
    EXPECT_EQ(sums->first, sums->last);
    EXPECT_EQ(plan.backward_workspace_bytes, cuda(false).backward_workspace_bytes)
        << "a' was there, and is not needed any more";
  }
  s = {.tokens = 3, .hidden = 4096, .width = 8, .experts = 64, .sorted_rows = true};  // nothing to take the place of
  const std::size_t more = cuda(true).backward_workspace_bytes - cuda(false).backward_workspace_bytes;
  EXPECT_GT(more, 0u);
  EXPECT_LE(more, 65u * 4096u * 4u);
  EXPECT_EQ(plan_layer(qwen3(), {.bias_gradient = true}).backward_workspace("bias_sums"), nullptr) << "the CPU needs none";
}

TEST(Plan, PeakCountsWhatLivesTogether) {
  const Plan plan = plan_layer(qwen3(), {.threads = 2});
  const std::size_t x = 2 * 4096 * 2048;
  EXPECT_GE(plan.peak_bytes, plan.saved_bytes - x + plan.backward_workspace_bytes);
  EXPECT_LE(plan.peak_bytes, plan.saved_bytes - x + plan.backward_workspace_bytes + plan.forward_workspace_bytes + x);
}

TEST(Plan, RefusesNonsenseInWords) {
  try {
    plan_layer({.tokens = 4, .hidden = 0, .width = 1, .experts = 1});
    FAIL() << "expected InvalidArgument";
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(), "plan_layer: hidden must be at least 1, got 0");
  }
  EXPECT_THROW(plan_layer({.tokens = 4, .hidden = 1, .width = 1, .experts = 1, .rows = -3}), InvalidArgument);
}

TEST(Plan, KeptPlansAreThoseOfTheirLayer) {
  for (int round = 0; round < 2; ++round)
    for (std::int64_t width = 1; width <= 20; ++width)  // more than are kept
      for (const bool overwrite_z : {false, true}) {
        const LayerShape shape{.tokens = 50, .hidden = 16, .width = width, .experts = 3, .experts_per_token = 2};
        const PlanOptions options{.overwrite_z = overwrite_z, .backend = Backend::cuda};
        EXPECT_EQ(to_json(*kept_plan(shape, options)), to_json(plan_layer(shape, options)));
      }
}

}  // namespace
}  // namespace intarsia
