#include "intarsia/layer.h"

#include <string>

#include "intarsia/error.h"

namespace intarsia {

SavedForBackward::~SavedForBackward() {
  for (const auto& [pointer, bytes] : blocks_) allocator_->deallocate(pointer, bytes);
}

std::size_t SavedForBackward::bytes() const {
  std::size_t total = 0;
  for (const auto& block : blocks_) total += block.second;
  return total;
}

TensorView SavedForBackward::allocate(DType dtype, std::initializer_list<std::int64_t> shape, Device device) {
  TensorView v(nullptr, dtype, shape, device);
  const std::size_t bytes = static_cast<std::size_t>(v.numel()) * size_of(dtype);
  if (bytes == 0) return v;
  blocks_.reserve(blocks_.size() + 1);
  v.data = allocator_->allocate(bytes);
  blocks_.emplace_back(v.data, bytes);
  return v;
}

Layer::Layer(const LayerConfig& config, const Context& context) : config_(config), context_(context) {
  if (config_.experts < 1) throw InvalidArgument("Layer: experts must be at least 1, got " + std::to_string(config_.experts));
}

SavedForBackward Layer::run_forward(const LayerInput& input, const LayerWeights& weights, TensorView y, bool training) const {
  if (input.ids.rank != 2)
    throw InvalidArgument("Layer: ids: expected (T, K), got a tensor of rank " + std::to_string(input.ids.rank));
  if (input.x.rank != 2)
    throw InvalidArgument("Layer: x: expected (T, H), got a tensor of rank " + std::to_string(input.x.rank));
  const std::int64_t t = input.ids.size(0), k = input.ids.size(1);
  const Device device = input.x.device;
  if (device.type == DeviceType::cuda && context_.allocator == nullptr)
    throw InvalidArgument("Layer: context.allocator: expected an allocator of device memory, since x is on CUDA, got none");
  SavedForBackward saved(context_.allocator ? *context_.allocator : host_allocator());
  BuildIndex index{.ids = input.ids, .token_mask = input.token_mask};
  index.expert_offsets = saved.allocate(DType::int32, {config_.experts + 1}, device);
  index.row_token = saved.allocate(DType::int32, {t * k}, device);
  index.row_slot = saved.allocate(DType::int32, {t * k}, device);
  index.slot_row = saved.allocate(DType::int32, {t, k}, device);
  run(index, context_);

  LayerForward& forward = saved.forward_;
  forward = {.x = input.x,
             .expert_offsets = index.expert_offsets,
             .row_token = index.row_token,
             .row_slot = index.row_slot,
             .slot_row = index.slot_row,
             .scores = input.scores,
             .w_up = weights.w_up,
             .w_down = weights.w_down,
             .b_up = weights.b_up,
             .b_down = weights.b_down,
             .addend = input.addend,
             .activation = config_.activation,
             .score_on = config_.score_on,
             .y = y};
  if (training && config_.save == SaveMode::preactivation) {
    const Weights& w = weights.w_up;
    if (w.weight.rank != 3)
      throw InvalidArgument("Layer: w_up: expected (E, G*I, H), got a tensor of rank " + std::to_string(w.weight.rank));
    const std::int64_t out = w.weight.size(w.transposed ? 2 : 1) * (w.second.defined() ? 2 : 1);
    forward.z = saved.allocate(input.x.dtype, {t * k, out}, device);
  }
  run(forward, context_);
  return saved;
}

SavedForBackward Layer::forward(const LayerInput& input, const LayerWeights& weights, TensorView y) const {
  return run_forward(input, weights, y, true);
}

void Layer::infer(const LayerInput& input, const LayerWeights& weights, TensorView y) const {
  run_forward(input, weights, y, false);
}

void Layer::backward(SavedForBackward& saved, TensorView dy, const LayerWeights& weights,
                     const LayerGradients& gradients) const {
  if (saved.consumed_)
    throw InvalidArgument("Layer: backward ran already on this forward, and dz took z's place; run forward again");
  const LayerForward& f = saved.forward_;
  run(LayerBackward{.dy = dy,
                    .x = f.x,
                    .expert_offsets = f.expert_offsets,
                    .row_token = f.row_token,
                    .row_slot = f.row_slot,
                    .slot_row = f.slot_row,
                    .scores = f.scores,
                    .w_up = weights.w_up,
                    .w_down = weights.w_down,
                    .b_up = weights.b_up,
                    .b_down = weights.b_down,
                    .addend = gradients.addend,
                    .activation = f.activation,
                    .score_on = f.score_on,
                    .overwrite_z = f.z.defined(),
                    .accumulate = gradients.accumulate,
                    .grad_scale = gradients.grad_scale,
                    .z = f.z,
                    .dx = gradients.dx,
                    .dscores = gradients.dscores,
                    .dw_up = gradients.dw_up,
                    .dw_down = gradients.dw_down,
                    .db_up = gradients.db_up,
                    .db_down = gradients.db_down},
      context_);
  saved.consumed_ = true;
}

}  // namespace intarsia
