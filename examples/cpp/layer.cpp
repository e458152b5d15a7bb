// One MoE layer, forward and backward, without Python: route the tokens, build the index lists, run the layer, and check
// its gradient against a finite difference.
#include <intarsia/error.h>
#include <intarsia/ops.h>
#include <intarsia/version.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

namespace {

constexpr std::int64_t T = 64, H = 48, I = 40, E = 6, K = 2, R = T * K;
using intarsia::DType;
using intarsia::TensorView;

std::vector<float> random_values(std::int64_t count, float scale) {
  static std::mt19937 generator(1);
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) value = normal(generator);
  return values;
}

double dot(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += static_cast<double>(a[i]) * b[i];
  return sum;
}

int train_step() {
  std::vector<float> x = random_values(T * H, 1.0f), dy = random_values(T * H, 1.0f);
  std::vector<float> w_router = random_values(E * H, 0.3f);
  std::vector<float> w_up = random_values(E * 2 * I * H, 0.15f), w_down = random_values(E * H * I, 0.15f);

  // The router: logits, then K experts per token with their scores.
  std::vector<float> logits(T * E), scores(T * K);
  std::vector<std::int32_t> ids(T * K);
  const TensorView x_view(x.data(), DType::float32, {T, H});
  const TensorView logits_view(logits.data(), DType::float32, {T, E});
  const TensorView ids_view(ids.data(), DType::int32, {T, K});
  const TensorView scores_view(scores.data(), DType::float32, {T, K});
  intarsia::run(intarsia::RouterLogits{
      .x = x_view, .w_router = TensorView(w_router.data(), DType::float32, {E, H}), .logits = logits_view});
  intarsia::run(intarsia::Route{
      .logits = logits_view, .scores_kind = intarsia::RouterScores::softmax_renorm, .ids = ids_view, .scores = scores_view});

  // The index lists: all that is kept of the dispatch.
  std::vector<std::int32_t> expert_offsets(E + 1), row_token(R), row_slot(R), slot_row(R);
  const TensorView offsets_view(expert_offsets.data(), DType::int32, {E + 1});
  const TensorView row_token_view(row_token.data(), DType::int32, {R});
  const TensorView row_slot_view(row_slot.data(), DType::int32, {R});
  const TensorView slot_row_view(slot_row.data(), DType::int32, {T, K});
  intarsia::run(intarsia::BuildIndex{.ids = ids_view,
                                     .expert_offsets = offsets_view,
                                     .row_token = row_token_view,
                                     .row_slot = row_slot_view,
                                     .slot_row = slot_row_view});

  // Forward keeps z, the pre-activations, for backward.
  std::vector<float> z(R * 2 * I), y(T * H);
  const intarsia::Weights up{.weight = TensorView(w_up.data(), DType::float32, {E, 2 * I, H})};
  const intarsia::Weights down{.weight = TensorView(w_down.data(), DType::float32, {E, H, I})};
  const TensorView z_view(z.data(), DType::float32, {R, 2 * I});
  const intarsia::LayerForward forward{.x = x_view,
                                       .expert_offsets = offsets_view,
                                       .row_token = row_token_view,
                                       .row_slot = row_slot_view,
                                       .slot_row = slot_row_view,
                                       .scores = scores_view,
                                       .w_up = up,
                                       .w_down = down,
                                       .z = z_view,
                                       .y = TensorView(y.data(), DType::float32, {T, H})};
  intarsia::run(forward);

  std::vector<float> dx(T * H), dscores(T * K), dw_up(w_up.size()), dw_down(w_down.size());
  intarsia::run(intarsia::LayerBackward{.dy = TensorView(dy.data(), DType::float32, {T, H}),
                                        .x = x_view,
                                        .expert_offsets = offsets_view,
                                        .row_token = row_token_view,
                                        .row_slot = row_slot_view,
                                        .slot_row = slot_row_view,
                                        .scores = scores_view,
                                        .w_up = up,
                                        .w_down = down,
                                        .overwrite_z = true,
                                        .z = z_view,
                                        .dx = TensorView(dx.data(), DType::float32, {T, H}),
                                        .dscores = TensorView(dscores.data(), DType::float32, {T, K}),
                                        .dw_up = {.weight = TensorView(dw_up.data(), DType::float32, {E, 2 * I, H})},
                                        .dw_down = {.weight = TensorView(dw_down.data(), DType::float32, {E, H, I})}});

  // Along a direction of x and w_up, <dy, y> changes as the gradients say.
  const std::vector<float> along_x = random_values(T * H, 1.0f), along_w = random_values(E * 2 * I * H, 0.15f);
  const float step = 3e-3f;
  const auto loss_at = [&](float distance) {
    for (std::size_t i = 0; i < x.size(); ++i) x[i] += distance * along_x[i];
    for (std::size_t i = 0; i < w_up.size(); ++i) w_up[i] += distance * along_w[i];
    intarsia::run(forward);
    return dot(dy, y);
  };
  const double ahead = loss_at(step), behind = loss_at(-2 * step);
  const double measured = (ahead - behind) / (2 * static_cast<double>(step));
  const double expected = dot(dx, along_x) + dot(dw_up, along_w);
  std::printf("intarsia %s: <dy, y> changes by %.5f per step, the gradients say %.5f\n", INTARSIA_VERSION, measured, expected);
  return std::abs(measured - expected) <= 0.005 * std::abs(expected) ? 0 : 1;
}

}  // namespace

int main() {
  try {
    return train_step();
  } catch (const intarsia::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
