// Argument checks: bad input is refused in a sentence that names the argument, what was expected and what came, and nothing is
// written; good but unusual input is taken. The layer for C++ programs.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "intarsia/intarsia.h"

namespace intarsia {
namespace {

struct Problem {  // a small layer with everything right
  std::int64_t t = 9, h = 12, i = 8, e = 4, k = 2, r = 18;
  std::vector<float> x, w_up, w_down, scores, y, z;
  std::vector<std::int32_t> ids, offsets, row_token, row_slot, slot_row;

  Problem() {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    const auto draw = [&](std::vector<float>& v, std::int64_t n) {
      v.resize(static_cast<std::size_t>(n));
      for (float& value : v) value = normal(random);
    };
    draw(x, t * h);
    draw(w_up, e * 2 * i * h);
    draw(w_down, e * h * i);
    draw(scores, t * k);
    y.assign(static_cast<std::size_t>(t * h), std::nanf(""));
    z.assign(static_cast<std::size_t>(r * 2 * i), std::nanf(""));
    ids.resize(static_cast<std::size_t>(r));
    for (std::size_t n = 0; n < ids.size(); ++n) ids[n] = static_cast<std::int32_t>((n * 5 + n / 4) % 4);
    offsets.resize(static_cast<std::size_t>(e + 1));
    row_token.resize(static_cast<std::size_t>(r));
    row_slot.resize(static_cast<std::size_t>(r));
    slot_row.resize(static_cast<std::size_t>(r));
    run(BuildIndex{.ids = view(ids, {t, k}),
                   .expert_offsets = view(offsets, {e + 1}),
                   .row_token = view(row_token, {r}),
                   .row_slot = view(row_slot, {r}),
                   .slot_row = view(slot_row, {t, k})});
  }

  static TensorView view(std::vector<float>& v, std::initializer_list<std::int64_t> shape) {
    return {v.data(), DType::float32, shape};
  }
  static TensorView view(std::vector<std::int32_t>& v, std::initializer_list<std::int64_t> shape) {
    return {v.data(), DType::int32, shape};
  }

  LayerForward forward() {
    return {.x = view(x, {t, h}),
            .expert_offsets = view(offsets, {e + 1}),
            .row_token = view(row_token, {r}),
            .row_slot = view(row_slot, {r}),
            .slot_row = view(slot_row, {t, k}),
            .scores = view(scores, {t, k}),
            .w_up = {.weight = view(w_up, {e, 2 * i, h})},
            .w_down = {.weight = view(w_down, {e, h, i})},
            .z = view(z, {r, 2 * i}),
            .y = view(y, {t, h})};
  }
};

void expect_refusal(const LayerForward& op, const std::string& part) {
  const std::string why = supports(op);
  EXPECT_NE(why.find(part), std::string::npos) << "got: " << why;
  EXPECT_THROW(run(op), Error);
}

TEST(Checks, RightArgumentsRun) {
  Problem p;
  EXPECT_EQ(supports(p.forward()), "");
  run(p.forward());
  for (float v : p.y) EXPECT_TRUE(std::isfinite(v));
}

TEST(Checks, WrongShapesNameArgumentExpectedAndGot) {
  Problem p;
  LayerForward op = p.forward();
  op.w_up.weight = Problem::view(p.w_up, {p.e, 2 * p.i - 2, p.h});
  expect_refusal(op, "layer_forward: w_down: expected (E, H, I)");
  op = p.forward();
  op.w_down.weight = Problem::view(p.w_down, {p.e, p.h - 1, p.i});
  expect_refusal(
      op, "layer_forward: w_down: expected (E, H, I) with E = 4 (expert_offsets), H = 12 (x), I = 8 (w_up), got (4, 11, 8)");
  op = p.forward();
  op.expert_offsets = Problem::view(p.offsets, {p.e});
  expect_refusal(op, "slot_row");  // the last of four offsets no longer counts all rows
}

TEST(Checks, WrongDtypesAreRefused) {
  Problem p;
  LayerForward op = p.forward();
  op.w_down.weight.dtype = DType::float64;
  expect_refusal(op, "w_down: expected dtype float32");
  op = p.forward();
  op.scores.dtype = DType::bfloat16;
  expect_refusal(op, "scores: expected dtype float32, got bfloat16");
}

TEST(Checks, ListsAreVerifiedOnTheCpu) {
  Problem p;
  const std::vector<float> before = p.y;
  p.row_token[3] = 1000;
  expect_refusal(p.forward(), "row_token: expected values in [0, 9)");
  Problem q;
  std::swap(q.offsets[1], q.offsets[2]);
  expect_refusal(q.forward(), "expert_offsets: expected ascending offsets");
  Problem s;
  std::swap(s.slot_row[0], s.slot_row[3]);
  expect_refusal(s.forward(), "row_slot: is not the inverse of slot_row");
  for (float v : p.y) EXPECT_TRUE(std::isnan(v)) << "a refused call must write nothing";
  EXPECT_EQ(before.size(), p.y.size());
}

TEST(Checks, OutputsMustBeRealTensorsApartFromInputs) {
  Problem p;
  LayerForward op = p.forward();
  op.y = op.x;
  expect_refusal(op, "y: must not share memory with x");
  op = p.forward();
  op.y.stride = {0, 1, 0};
  expect_refusal(op, "y: is an output and must not be an expanded view");
}

TEST(Checks, InputPlacementRefusesUpBias) {
  Problem p;
  std::vector<float> b_up(static_cast<std::size_t>(p.e * 2 * p.i), 1.0f);
  LayerForward op = p.forward();
  op.score_on = ScorePlacement::input;
  op.b_up = Problem::view(b_up, {p.e, 2 * p.i});
  expect_refusal(op, "b_up: must be left out");
}

TEST(Checks, GateBlockMustDivideTheWidth) {
  Problem p;
  LayerForward op = p.forward();
  op.w_up.gate_block = 3;
  expect_refusal(op, "w_up_gate_block: must divide I = 8, got 3");
}

TEST(Checks, TensorsOnTwoDevicesAreNamedWithBoth) {
  Problem p;
  LayerForward op = p.forward();
  op.row_slot.device = {DeviceType::cuda, 1};
  expect_refusal(op, "layer_forward: row_slot: expected a tensor on cpu like x, got one on cuda:1; move it there");
}

TEST(Checks, NullPointersAreRefusedInEveryList) {
  Problem p;
  for (TensorView LayerForward::* list :
       {&LayerForward::expert_offsets, &LayerForward::row_token, &LayerForward::row_slot, &LayerForward::slot_row}) {
    LayerForward op = p.forward();
    (op.*list).data = nullptr;
    expect_refusal(op, "got a null pointer");
  }
}

TEST(Checks, BackendsExplainThemselves) {
  Problem p;
  const LayerForward op = p.forward();
  EXPECT_NE(explain(op).find("backend cpu"), std::string::npos);
  EXPECT_NE(explain(op, {.backend = Backend::reference}).find("backend reference"), std::string::npos);
  EXPECT_NE(explain(op, {.backend = Backend::cuda}).find("wants CUDA tensors"), std::string::npos);
  EXPECT_THROW(run(op, {.backend = Backend::cuda}), Unsupported);
}

TEST(Checks, NothingIsExplainedThatRunWouldRefuse) {
  Problem p;
  LayerForward op = p.forward();
  op.w_up.gate_block = 3;
  for (const Backend backend : {Backend::automatic, Backend::reference, Backend::cuda}) {
    try {
      explain(op, {.backend = backend});
      ADD_FAILURE() << "explained";
    } catch (const InvalidArgument& error) {
      EXPECT_EQ(std::string(error.what()), supports(op, {.backend = backend}));
    }
  }
}

TEST(Checks, RouterLimitsAreStated) {
  std::vector<float> logits(6), scores(8);
  std::vector<std::int32_t> ids(8);
  const Route op{
      .logits = Problem::view(logits, {2, 3}), .ids = Problem::view(ids, {2, 4}), .scores = Problem::view(scores, {2, 4})};
  EXPECT_EQ(supports(op), "route: K: expected 1 to min(64, E = 3) experts per token, got 4");
}

TEST(Checks, WhatIsMadeOfLogitsLiesElsewhere) {
  std::vector<float> floats(6), scores(2), dscores(2);
  std::vector<std::int32_t> list(2);
  const TensorView logits = Problem::view(floats, {2, 3}), ids = Problem::view(list, {2, 1});
  Route forward{.logits = logits, .ids = ids, .scores = Problem::view(scores, {2, 1})};
  forward.rounded_logits = TensorView(floats.data(), DType::bfloat16, {2, 3});
  EXPECT_EQ(supports(forward), "route: rounded_logits: must not share memory with logits; pass another tensor");
  const RouteBackward backward{.dscores = Problem::view(dscores, {2, 1}),
                               .scores = Problem::view(scores, {2, 1}),
                               .ids = ids,
                               .logits = logits,
                               .dlogits = logits};
  EXPECT_EQ(supports(backward), "route_backward: dlogits: must not share memory with logits; pass another tensor");
}

TEST(Layer, BackwardRunsOnceAndFreesEverything) {
  Problem p;
  const AllocatorStats before = host_allocator_stats();
  {
    const Layer layer({.experts = p.e});
    const LayerWeights weights{.w_up = {.weight = Problem::view(p.w_up, {p.e, 2 * p.i, p.h})},
                               .w_down = {.weight = Problem::view(p.w_down, {p.e, p.h, p.i})}};
    std::vector<float> dx(p.x.size(), std::nanf("")), dy(p.x.size(), 1.0f);
    const TensorView y = Problem::view(p.y, {p.t, p.h});
    SavedForBackward saved = layer.forward({.x = Problem::view(p.x, {p.t, p.h}),
                                            .ids = Problem::view(p.ids, {p.t, p.k}),
                                            .scores = Problem::view(p.scores, {p.t, p.k})},
                                           weights, y);
    // lists 12R + 4(E+1) and z 4*2RI in float32
    EXPECT_EQ(saved.bytes(), static_cast<std::size_t>(12 * p.r + 4 * (p.e + 1) + 4 * 2 * p.r * p.i));
    layer.backward(saved, Problem::view(dy, {p.t, p.h}), weights, {.dx = Problem::view(dx, {p.t, p.h})});
    for (float v : dx) EXPECT_TRUE(std::isfinite(v));
    EXPECT_THROW(layer.backward(saved, Problem::view(dy, {p.t, p.h}), weights, {.dx = Problem::view(dx, {p.t, p.h})}),
                 InvalidArgument);
  }
  EXPECT_EQ(host_allocator_stats().live, before.live);
}

TEST(Layer, CudaTensorsNeedAnAllocatorOfTheirOwn) {
  Problem p;
  const Layer layer({.experts = p.e});
  const TensorView x(p.x.data(), DType::float32, {p.t, p.h}, {DeviceType::cuda, 0});
  try {
    layer.infer({.x = x, .ids = Problem::view(p.ids, {p.t, p.k})}, {}, x);
    FAIL() << "memory of the host would have been given to the device";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("context.allocator: expected an allocator of device memory"), std::string::npos);
  }
}

TEST(Layer, MeasuredWorkspaceIsThePlannedOne) {
  Problem p;
  set_num_threads(2);
  const LayerForward op = p.forward();
  const Plan plan = plan_layer(
      {.tokens = p.t, .hidden = p.h, .width = p.i, .experts = p.e, .experts_per_token = p.k, .dtype = DType::float32},
      {.threads = num_threads()});
  reset_host_allocator_stats();
  const std::size_t live = host_allocator_stats().live;
  run(op);
  EXPECT_EQ(host_allocator_stats().peak - live, plan.forward_workspace_bytes);
  EXPECT_EQ(workspace_bytes(op), plan.forward_workspace_bytes);
  EXPECT_EQ(host_allocator_stats().count, 1u);
}

}  // namespace
}  // namespace intarsia
