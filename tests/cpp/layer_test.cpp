// Properties of the expert operations that no comparison of backends can show: the operations chained are the layer, literal
// numbers by hand, and what accumulation leaves alone.
#include <gtest/gtest.h>

#include <cmath>

#include "cases/problem.h"

namespace intarsia::cases {
namespace {

constexpr Backend kBackends[] = {Backend::reference, Backend::cpu};

void expect_near(const char* name, const TensorView& actual, const TensorView& expected, double tolerance) {
  for (std::int64_t i = 0; i < expected.numel(); ++i)
    ASSERT_NEAR(element(actual, i), element(expected, i), tolerance * (1 + std::abs(element(expected, i)))) << name << ' ' << i;
}

/// Forward and backward of one problem in float64 by the single operations, against the dense layer.
void expect_chain_is_layer(const Problem& p) {
  SCOPED_TRACE(p.name);
  constexpr DType d = DType::float64;
  constexpr Context context{.backend = Backend::reference};
  Tensors t(11, Precision::stored);
  Experts experts(t, p, d);
  const Lists& l = experts.lists();
  const std::int64_t z_width = experts.gates() * p.width;
  const TensorView x = experts.token_rows(), dy = experts.token_rows(), s = experts.scores();
  const Weights w_up = experts.w_up(), w_down = experts.w_down();
  const TensorView b_up = experts.b_up(), b_down = experts.b_down();
  const TensorView z = experts.out_rows(z_width), a = experts.out_rows(p.width), rows = experts.out_rows(p.hidden);
  const TensorView y = t.out(d, {l.tokens, p.hidden}), expected_y = t.out(d, {l.tokens, p.hidden}),
                   layer_z = experts.out_rows(z_width);
  const bool on_output = p.score_on == ScorePlacement::output;

  run(UpForward{.x = x,
                .expert_offsets = l.expert_offsets,
                .row_token = l.row_token,
                .w_up = w_up,
                .b_up = b_up,
                .scores = s,
                .row_slot = l.row_slot,
                .activation = p.activation,
                .score_on = p.score_on,
                .z = z,
                .a = a},
      context);
  run(DownForward{.a = a,
                  .expert_offsets = l.expert_offsets,
                  .w_down = w_down,
                  .b_down = b_down,
                  .scores = on_output ? TensorView{} : s,
                  .row_slot = l.row_slot,
                  .score_on = p.score_on,
                  .rows = rows},
      context);
  run(Combine{.rows = rows,
              .slot_row = l.slot_row,
              .token_offsets = l.token_offsets,
              .token_rows = l.token_rows,
              .scores = on_output ? s : TensorView{},
              .y = y},
      context);
  run(LayerForward{.x = x,
                   .expert_offsets = l.expert_offsets,
                   .row_token = l.row_token,
                   .row_slot = l.row_slot,
                   .slot_row = l.slot_row,
                   .token_offsets = l.token_offsets,
                   .token_rows = l.token_rows,
                   .scores = s,
                   .w_up = w_up,
                   .w_down = w_down,
                   .b_up = b_up,
                   .b_down = b_down,
                   .activation = p.activation,
                   .score_on = p.score_on,
                   .z = layer_z,
                   .y = expected_y},
      context);
  expect_near("y", y, expected_y, 1e-12);

  const TensorView dz = experts.out_rows(z_width), a_scaled = experts.out_rows(p.width), dx_rows = experts.out_rows(p.hidden);
  const TensorView dscores = experts.like_scores(), dx = t.out(d, {l.tokens, p.hidden});
  const Weights dw_up = experts.dw_up(), dw_down = experts.dw_down();
  const TensorView db_up = b_up.defined() ? experts.db_up() : TensorView{}, db_down = experts.db_down();
  run(DownBackward{.dy = dy,
                   .z = z,
                   .expert_offsets = l.expert_offsets,
                   .row_token = l.row_token,
                   .w_down = w_down,
                   .b_down = b_down,
                   .scores = s,
                   .row_slot = l.row_slot,
                   .activation = p.activation,
                   .score_on = p.score_on,
                   .dz = dz,
                   .a_scaled = a_scaled,
                   .dscores = dscores},
      context);
  run(
      DownWeightBackward{
          .dy = dy, .a_scaled = a_scaled, .expert_offsets = l.expert_offsets, .row_token = l.row_token, .dw_down = dw_down},
      context);
  run(UpWeightBackward{.dz = dz, .x = x, .expert_offsets = l.expert_offsets, .row_token = l.row_token, .dw_up = dw_up},
      context);
  run(BiasBackward{.dz = dz,
                   .dy = dy,
                   .expert_offsets = l.expert_offsets,
                   .row_token = l.row_token,
                   .scores = s,
                   .row_slot = l.row_slot,
                   .score_on = p.score_on,
                   .gate_block = p.weights.gate_block,
                   .db_up = db_up,
                   .db_down = db_down},
      context);
  run(UpBackward{.dz = dz, .expert_offsets = l.expert_offsets, .w_up = w_up, .dx_rows = dx_rows}, context);
  run(Combine{.rows = dx_rows, .slot_row = l.slot_row, .token_offsets = l.token_offsets, .token_rows = l.token_rows, .y = dx},
      context);

  LayerBackward layer{.dy = dy,
                      .x = x,
                      .expert_offsets = l.expert_offsets,
                      .row_token = l.row_token,
                      .row_slot = l.row_slot,
                      .slot_row = l.slot_row,
                      .token_offsets = l.token_offsets,
                      .token_rows = l.token_rows,
                      .scores = s,
                      .w_up = w_up,
                      .w_down = w_down,
                      .b_up = b_up,
                      .b_down = b_down,
                      .activation = p.activation,
                      .score_on = p.score_on,
                      .z = layer_z,
                      .dx = t.out(d, {l.tokens, p.hidden}),
                      .dscores = experts.like_scores(),
                      .dw_up = experts.dw_up(),
                      .dw_down = experts.dw_down(),
                      .db_up = b_up.defined() ? experts.db_up() : TensorView{},
                      .db_down = experts.db_down()};
  run(layer, context);
  expect_near("dx", dx, layer.dx, 1e-12);
  expect_near("dscores", dscores, layer.dscores, 1e-12);
  expect_near("dw_up", dw_up.weight, layer.dw_up.weight, 1e-12);
  expect_near("dw_up_second", dw_up.second, layer.dw_up.second, 1e-12);
  expect_near("dw_down", dw_down.weight, layer.dw_down.weight, 1e-12);
  expect_near("db_up", db_up, layer.db_up, 1e-12);
  expect_near("db_down", db_down, layer.db_down, 1e-12);
}

TEST(Layer, IsItsOperationsInARow) {
  for (const ScorePlacement s : {ScorePlacement::output, ScorePlacement::inside, ScorePlacement::input}) {
    const std::string on(to_string(s));
    expect_chain_is_layer({.name = "slots_" + on, .routing = Routing::sentinels, .score_on = s, .biases = true});
    expect_chain_is_layer({.name = "csr_" + on, .form = Form::csr, .slack = 3, .score_on = s, .biases = true});
    expect_chain_is_layer(
        {.name = "interleaved_" + on, .score_on = s, .weights = {.gate_block = 1, .transposed = true}, .biases = true});
    expect_chain_is_layer({.name = "two_tensors_" + on, .score_on = s, .weights = {.two_tensors = true}});
  }
  for (int a = 0; a <= static_cast<int>(Activation::relu2); ++a)
    expect_chain_is_layer(
        {.name = std::string(to_string(static_cast<Activation>(a))), .activation = static_cast<Activation>(a), .biases = true});
}

/// One token, two experts of one relu unit: y = 0.5 (2 relu(3) + 10) + 0.25 (4 relu(-3) + 20) = 8 + 5.
TEST(Layer, ByHand) {
  for (const Backend backend : kBackends) {
    Tensors t(1, Precision::stored);
    const DType f = DType::float32, i = DType::int32;
    const TensorView offsets = t.values(i, {3}, {0, 1, 2}), tokens = t.values(i, {2}, {0, 0}), slots = t.values(i, {2}, {0, 1});
    const TensorView x = t.values(f, {1, 1}, {3}), scores = t.values(f, {1, 2}, {0.5, 0.25});
    const Weights w_up{.weight = t.values(f, {2, 1, 1}, {1, -1})}, w_down{.weight = t.values(f, {2, 1, 1}, {2, 4})};
    const TensorView b_down = t.values(f, {2, 1}, {10, 20}), slot_row = t.values(i, {1, 2}, {0, 1});
    const LayerForward forward{.x = x,
                               .expert_offsets = offsets,
                               .row_token = tokens,
                               .row_slot = slots,
                               .slot_row = slot_row,
                               .scores = scores,
                               .w_up = w_up,
                               .w_down = w_down,
                               .b_down = b_down,
                               .activation = Activation::relu,
                               .z = t.out(f, {2, 1}),
                               .y = t.out(f, {1, 1})};
    run(forward, {.backend = backend});
    EXPECT_EQ(element(forward.y, 0), 13);
    EXPECT_EQ(element(forward.z, 0), 3);
    EXPECT_EQ(element(forward.z, 1), -3);

    const LayerBackward backward{.dy = t.values(f, {1, 1}, {1}),
                                 .x = x,
                                 .expert_offsets = offsets,
                                 .row_token = tokens,
                                 .row_slot = slots,
                                 .slot_row = slot_row,
                                 .scores = scores,
                                 .w_up = w_up,
                                 .w_down = w_down,
                                 .b_down = b_down,
                                 .activation = Activation::relu,
                                 .z = forward.z,
                                 .dx = t.out(f, {1, 1}),
                                 .dscores = t.out(f, {1, 2}),
                                 .dw_up = {.weight = t.out(f, {2, 1, 1})},
                                 .dw_down = {.weight = t.out(f, {2, 1, 1})},
                                 .db_up = t.out(f, {2, 1}),
                                 .db_down = t.out(f, {2, 1})};
    run(backward, {.backend = backend});
    EXPECT_EQ(element(backward.dx, 0), 1);        // 0.5 * 2 * 1, the other unit is off
    EXPECT_EQ(element(backward.dscores, 0), 16);  // 2 * 3 + 10
    EXPECT_EQ(element(backward.dscores, 1), 20);
    EXPECT_EQ(element(backward.dw_up.weight, 0), 3);  // 0.5 * 2 * x
    EXPECT_EQ(element(backward.dw_up.weight, 1), 0);
    EXPECT_EQ(element(backward.dw_down.weight, 0), 1.5);  // 0.5 * 3
    EXPECT_EQ(element(backward.dw_down.weight, 1), 0);
    EXPECT_EQ(element(backward.db_up, 0), 1);
    EXPECT_EQ(element(backward.db_up, 1), 0);
    EXPECT_EQ(element(backward.db_down, 0), 0.5);
    EXPECT_EQ(element(backward.db_down, 1), 0.25);
  }
}

/// Biases of 1 under scores that sum to 1 shift y by exactly 1 (not by K).
TEST(Layer, OutputBiasIsWeighted) {
  for (const Backend backend : kBackends) {
    Tensors t(3, Precision::stored);
    const Problem p{.name = "", .experts = 4, .choices = 4};
    Experts experts(t, p, DType::float32);
    const Lists& l = experts.lists();
    const TensorView scores = t.constant(DType::float32, {l.tokens, 4}, 0.25);
    LayerForward op{.x = experts.token_rows(),
                    .expert_offsets = l.expert_offsets,
                    .row_token = l.row_token,
                    .row_slot = l.row_slot,
                    .slot_row = l.slot_row,
                    .scores = scores,
                    .w_up = experts.w_up(),
                    .w_down = experts.w_down(),
                    .y = t.out(DType::float32, {l.tokens, p.hidden})};
    run(op, {.backend = backend});
    const TensorView without = op.y;
    op.b_down = t.constant(DType::float32, {4, p.hidden}, 1);
    op.y = t.out(DType::float32, {l.tokens, p.hidden});
    run(op, {.backend = backend});
    for (std::int64_t i = 0; i < op.y.numel(); ++i) ASSERT_NEAR(element(op.y, i) - element(without, i), 1, 1e-5);
  }
}

/// Preset to 7: overwriting gives 0 for an expert without rows, accumulating leaves exactly 7.
TEST(WeightGradients, OfEmptyExperts) {
  for (const Backend backend : kBackends) {
    for (const DType dtype : {DType::float32, DType::bfloat16}) {
      for (const bool accumulate : {false, true}) {
        Tensors t(4, Precision::stored);
        const Problem p{.name = "", .counts = {3, 0, 5, 0}};
        Experts experts(t, p, dtype);
        const Lists& l = experts.lists();
        const Weights dw_up{.weight = t.constant(dtype, {4, 2 * p.width, p.hidden}, 7)};
        const Weights dw_down{.weight = t.constant(dtype, {4, p.hidden, p.width}, 7)};
        const TensorView db_up = t.constant(dtype, {4, 2 * p.width}, 7), db_down = t.constant(dtype, {4, p.hidden}, 7);
        const TensorView dy = experts.token_rows(), x = experts.token_rows(), z = experts.expert_rows(2 * p.width);
        run(LayerBackward{.dy = dy,
                          .x = x,
                          .expert_offsets = l.expert_offsets,
                          .row_token = l.row_token,
                          .row_slot = l.row_slot,
                          .slot_row = l.slot_row,
                          .scores = experts.scores(),
                          .w_up = experts.w_up(),
                          .w_down = experts.w_down(),
                          .accumulate = accumulate,
                          .z = z,
                          .dw_up = dw_up,
                          .dw_down = dw_down,
                          .db_up = db_up,
                          .db_down = db_down},
            {.backend = backend});
        for (const TensorView& g : {dw_up.weight, dw_down.weight, db_up, db_down}) {
          const std::int64_t per_expert = g.numel() / 4;
          double moved = 0;
          for (std::int64_t i = 0; i < g.numel(); ++i) {
            const std::int64_t e = i / per_expert;
            if (e % 2 == 1) ASSERT_EQ(element(g, i), accumulate ? 7 : 0) << "expert " << e;
            else moved += std::abs(element(g, i) - 7);
          }
          EXPECT_GT(moved, 0);
        }
      }
    }
  }
}

/// The worked example of design.md section 2, from ids to y: every token's y is the sum over its experts.
TEST(WorkedExample, ListsAndCombine) {
  for (const Backend backend : kBackends) {
    Tensors t(5, Precision::stored);
    const DType i = DType::int32, f = DType::float32;
    const BuildIndex index{.ids = t.values(i, {5, 2}, {2, 3, 0, 1, 0, 3, 1, 2, 0, 3}),
                           .expert_offsets = t.out(i, {5}),
                           .row_token = t.out(i, {10}),
                           .row_slot = t.out(i, {10}),
                           .slot_row = t.out(i, {5, 2})};
    run(index, {.backend = backend});
    const auto expect_list = [](const TensorView& v, const std::vector<double>& expected) {
      for (std::size_t n = 0; n < expected.size(); ++n) EXPECT_EQ(element(v, static_cast<std::int64_t>(n)), expected[n]) << n;
    };
    expect_list(index.expert_offsets, {0, 3, 5, 7, 10});
    expect_list(index.row_token, {1, 2, 4, 1, 3, 0, 3, 0, 2, 4});
    expect_list(index.slot_row, {5, 7, 0, 3, 1, 8, 4, 6, 2, 9});

    const TensorView rows = t.values(f, {10, 1}, {1, 2, 4, 8, 16, 32, 64, 128, 256, 512}), y = t.out(f, {5, 1});
    run(Combine{.rows = rows, .slot_row = index.slot_row, .y = y}, {.backend = backend});
    expect_list(y, {32 + 128, 1 + 8, 2 + 256, 16 + 64, 4 + 512});
  }
}

}  // namespace
}  // namespace intarsia::cases
