// moe_forward and moe_backward are their steps: the same bits, no more memory than the largest of them, and no work for what is
// not asked.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "intarsia/intarsia.h"

namespace intarsia {
namespace {

constexpr std::int64_t T = 37, H = 24, I = 16, E = 6, K = 2;

/// Tensors of one layer; outputs hold NaN until they are written.
struct Memory {
  std::mt19937 random{7};
  std::vector<std::vector<float>> floats;
  std::vector<std::vector<std::int32_t>> integers;

  TensorView normal(std::initializer_list<std::int64_t> shape) {
    std::normal_distribution<float> draw(0, 0.5F);
    TensorView v = out(shape);
    for (std::int64_t i = 0; i < v.numel(); ++i) v.as<float>()[i] = draw(random);
    return v;
  }
  TensorView out(std::initializer_list<std::int64_t> shape) {
    TensorView v(nullptr, DType::float32, shape);
    v.data = floats.emplace_back(static_cast<std::size_t>(v.numel()), std::nanf("")).data();
    return v;
  }
  TensorView list(std::initializer_list<std::int64_t> shape) {
    TensorView v(nullptr, DType::int32, shape);
    v.data = integers.emplace_back(static_cast<std::size_t>(v.numel()), -7).data();
    return v;
  }
};

MoeForward forward(Memory& m) {
  return {.x = m.normal({T, H}),
          .w_router = m.normal({E, H}),
          .b_router = m.normal({E}),
          .w_up = {.weight = m.normal({E, 2 * I, H})},
          .w_down = {.weight = m.normal({E, H, I})},
          .b_up = m.normal({E, 2 * I}),
          .b_down = m.normal({E, H}),
          .addend = m.normal({T, H}),
          .ids = m.list({T, K}),
          .scores = m.out({T, K}),
          .expert_offsets = m.list({E + 1}),
          .row_token = m.list({T * K}),
          .row_slot = m.list({T * K}),
          .slot_row = m.list({T, K}),
          .z = m.out({T * K, 2 * I}),
          .y = m.out({T, H})};
}

MoeBackward backward(Memory& m, const MoeForward& f) {
  return {.dy = m.normal({T, H}),
          .x = f.x,
          .w_router = f.w_router,
          .b_router = f.b_router,
          .ids = f.ids,
          .scores = f.scores,
          .expert_offsets = f.expert_offsets,
          .row_token = f.row_token,
          .row_slot = f.row_slot,
          .slot_row = f.slot_row,
          .w_up = f.w_up,
          .w_down = f.w_down,
          .b_up = f.b_up,
          .b_down = f.b_down,
          .z = f.z,
          .dx = m.out({T, H}),
          .dw_router = m.out({E, H}),
          .db_router = m.out({E}),
          .dw_up = {.weight = m.out({E, 2 * I, H})},
          .dw_down = {.weight = m.out({E, H, I})},
          .db_up = m.out({E, 2 * I}),
          .db_down = m.out({E, H})};
}

template <class T>
std::vector<T> values(const TensorView& v) {
  return {v.as<T>(), v.as<T>() + v.numel()};
}

/// The step of experts with every field that the whole has.
LayerForward experts_of(const MoeForward& f) {
  return {.x = f.x,
          .expert_offsets = f.expert_offsets,
          .row_token = f.row_token,
          .row_slot = f.row_slot,
          .slot_row = f.slot_row,
          .scores = f.scores,
          .w_up = f.w_up,
          .w_down = f.w_down,
          .b_up = f.b_up,
          .b_down = f.b_down,
          .addend = f.addend,
          .z = f.z,
          .y = f.y};
}
LayerBackward experts_of(const MoeBackward& g, TensorView dscores = {}) {
  return {.dy = g.dy,
          .x = g.x,
          .expert_offsets = g.expert_offsets,
          .row_token = g.row_token,
          .row_slot = g.row_slot,
          .slot_row = g.slot_row,
          .scores = g.scores,
          .w_up = g.w_up,
          .w_down = g.w_down,
          .b_up = g.b_up,
          .b_down = g.b_down,
          .z = g.z,
          .dx = g.dx,
          .dscores = dscores,
          .dw_up = g.dw_up,
          .dw_down = g.dw_down,
          .db_up = g.db_up,
          .db_down = g.db_down};
}

TEST(Moe, ForwardIsItsSteps) {
  Memory a, b;
  const MoeForward whole = forward(a), f = forward(b);
  run(whole);
  const TensorView logits = b.out({T, E});
  run(RouterLogits{.x = f.x, .w_router = f.w_router, .bias = f.b_router, .logits = logits});
  run(Route{.logits = logits, .ids = f.ids, .scores = f.scores});
  run(BuildIndex{.ids = f.ids,
                 .expert_offsets = f.expert_offsets,
                 .row_token = f.row_token,
                 .row_slot = f.row_slot,
                 .slot_row = f.slot_row});
  run(experts_of(f));
  EXPECT_EQ(values<float>(whole.y), values<float>(f.y));
  EXPECT_EQ(values<float>(whole.z), values<float>(f.z));
  EXPECT_EQ(values<float>(whole.scores), values<float>(f.scores));
  EXPECT_EQ(values<std::int32_t>(whole.slot_row), values<std::int32_t>(f.slot_row));
  for (const float y : values<float>(whole.y)) EXPECT_TRUE(std::isfinite(y));
}

TEST(Moe, LogitsAreAnOutputOrNobodysBusiness) {
  Memory a, b;
  MoeForward with = forward(a);
  const MoeForward without = forward(b);
  with.logits = a.out({T, E});
  with.rounded_logits = TensorView(a.list({T, E}).data, DType::bfloat16, {T, E});
  run(with);
  run(without);
  EXPECT_EQ(values<float>(with.y), values<float>(without.y));
  for (std::int64_t i = 0; i < T * E; ++i) {
    const std::uint32_t bits = static_cast<std::uint32_t>(with.rounded_logits.as<std::uint16_t>()[i]) << 16;
    float rounded = 0;
    std::memcpy(&rounded, &bits, sizeof rounded);
    EXPECT_NEAR(rounded, with.logits.as<float>()[i], std::abs(rounded) / 256);
  }
}

TEST(Moe, BackwardIsItsSteps) {
  Memory a, b;
  const MoeForward whole_forward = forward(a), f = forward(b);
  const MoeBackward whole = backward(a, whole_forward), g = backward(b, f);
  run(whole_forward);
  run(whole);
  run(f);
  const TensorView dscores = b.out({T, K}), logits = b.out({T, E}), dlogits = b.out({T, E});
  run(experts_of(g, dscores));
  run(RouterLogits{.x = g.x, .w_router = g.w_router, .bias = g.b_router, .logits = logits});
  run(RouteBackward{.dscores = dscores, .scores = g.scores, .ids = g.ids, .logits = logits, .dlogits = dlogits});
  run(RouterLogitsBackward{.dlogits = dlogits,
                           .x = g.x,
                           .w_router = g.w_router,
                           .add_to_dx = true,
                           .dx = g.dx,
                           .dw_router = g.dw_router,
                           .dbias = g.db_router});
  EXPECT_EQ(values<float>(whole.dx), values<float>(g.dx));
  EXPECT_EQ(values<float>(whole.dw_router), values<float>(g.dw_router));
  EXPECT_EQ(values<float>(whole.db_router), values<float>(g.db_router));
  EXPECT_EQ(values<float>(whole.dw_up.weight), values<float>(g.dw_up.weight));
  EXPECT_EQ(values<float>(whole.dw_down.weight), values<float>(g.dw_down.weight));
  EXPECT_EQ(values<float>(whole.db_up), values<float>(g.db_up));
  EXPECT_EQ(values<float>(whole.db_down), values<float>(g.db_down));
}

TEST(Moe, EachGradientAloneHasTheSameBits) {
  Memory m;
  const MoeForward f = forward(m);
  run(f);
  const MoeBackward all = backward(m, f);
  run(all);
  const auto alone = [&](const char* name, auto member, const TensorView& want) {
    MoeBackward op = all;
    op.dx = op.dw_router = op.db_router = op.db_up = op.db_down = {};
    op.dw_up = op.dw_down = {};
    const TensorView got(m.floats.emplace_back(static_cast<std::size_t>(want.numel()), std::nanf("")).data(), DType::float32,
                         {want.size(0), want.numel() / want.size(0)});
    TensorView shaped = want;
    shaped.data = got.data;
    member(op) = shaped;
    run(op);
    EXPECT_EQ(values<float>(got), values<float>(want)) << name;
  };
  alone("dx", [](MoeBackward& o) -> TensorView& { return o.dx; }, all.dx);
  alone("dw_router", [](MoeBackward& o) -> TensorView& { return o.dw_router; }, all.dw_router);
  alone("db_router", [](MoeBackward& o) -> TensorView& { return o.db_router; }, all.db_router);
  alone("dw_up", [](MoeBackward& o) -> TensorView& { return o.dw_up.weight; }, all.dw_up.weight);
  alone("dw_down", [](MoeBackward& o) -> TensorView& { return o.dw_down.weight; }, all.dw_down.weight);
  alone("db_up", [](MoeBackward& o) -> TensorView& { return o.db_up; }, all.db_up);
  alone("db_down", [](MoeBackward& o) -> TensorView& { return o.db_down; }, all.db_down);
}

TEST(Moe, ExpertsAloneNeedNoRouter) {
  Memory m;
  const MoeForward f = forward(m);
  run(f);
  MoeBackward op = backward(m, f);
  op.dx = op.dw_router = op.db_router = {};
  const LayerBackward experts = experts_of(op);
  reset_host_allocator_stats();
  run(experts);
  const AllocatorStats alone = host_allocator_stats();
  reset_host_allocator_stats();
  run(op);
  EXPECT_EQ(host_allocator_stats().count, alone.count);
  EXPECT_EQ(host_allocator_stats().peak, alone.peak);
}

struct Counting final : Allocator {
  std::size_t live = 0, peak = 0;
  void* allocate(std::size_t bytes) override {
    peak = std::max(peak, live += bytes);
    return host_allocator().allocate(bytes);
  }
  void deallocate(void* pointer, std::size_t bytes) noexcept override {
    live -= bytes;
    host_allocator().deallocate(pointer, bytes);
  }
};

TEST(Moe, LogitsDoNotLiveBesideTheExperts) {
  Memory m;
  const MoeForward f = forward(m);
  run(f);
  const LayerForward experts = experts_of(f);
  const RouterLogits router{.x = f.x, .w_router = f.w_router, .logits = m.out({T, E})};
  const std::size_t logits = T * E * sizeof(float);
  Counting counting;
  run(f, {.allocator = &counting});
  EXPECT_EQ(counting.live, 0u);
  EXPECT_EQ(counting.peak, std::max(workspace_bytes(experts), workspace_bytes(router) + logits));
}

TEST(Moe, WorkspacesAreThoseOfTheSteps) {
  Memory m;
  const MoeForward f = forward(m);
  run(f);
  const MoeBackward op = backward(m, f);
  const LayerBackward experts = experts_of(op, m.out({T, K}));
  const std::size_t live = host_allocator_stats().live;
  reset_host_allocator_stats();
  run(op);  // what passes from one step to the next is no workspace
  EXPECT_EQ(host_allocator_stats().peak - live, workspace_bytes(experts));
}

TEST(Moe, RefusalsNameStepAndArgument) {
  Memory m;
  const auto refusal = [](const MoeForward& op) -> std::string {
    try {
      run(op);
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "";
  };
  MoeForward op = forward(m);
  op.w_router = m.normal({E, H + 1});
  EXPECT_NE(refusal(op).find("router_logits: w_router: expected (E, H) with H = 24 (x), got (6, 25)"), std::string::npos);
  op = forward(m);
  op.w_down.weight = m.normal({E, H, I + 1});
  EXPECT_NE(refusal(op).find("layer_forward: w_down"), std::string::npos);
  op = forward(m);
  op.y.device = {DeviceType::cuda, 0};
  EXPECT_NE(refusal(op).find("moe_forward: y: expected a tensor on cpu like x"), std::string::npos);
  EXPECT_NE(refusal(MoeForward{}).find("router_logits: x: is missing"), std::string::npos);
  EXPECT_THROW(run(MoeBackward{}), InvalidArgument);
  EXPECT_NE(explain(op).find("layer_forward"), std::string::npos);
}

}  // namespace
}  // namespace intarsia
