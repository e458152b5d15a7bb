// The workspace of the layer as the memory plan lays it out, for every backend: one block, buffers by name, no other
// allocation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/execution.h"
#include "intarsia/ops.h"
#include "intarsia/plan.h"

namespace intarsia {

/// Shape of the layer that an operation describes.
template <class Layer>
LayerShape layer_shape(const Layer& op) {
  const std::int64_t columns = op.w_up.weight.size(op.w_up.transposed ? 2 : 1) * (op.w_up.second.defined() ? 2 : 1);
  const bool sorted = !op.row_token.defined();
  return {.tokens = op.x.size(0),
          .hidden = op.x.size(1),
          .width = columns / gate_factor(op.activation),
          .experts = op.expert_offsets.size(0) - 1,
          .experts_per_token = op.slot_row.defined() ? op.slot_row.size(1) : 1,
          .rows = sorted ? op.x.size(0) : op.row_token.size(0),
          .dtype = op.x.dtype,
          .activation = op.activation,
          .token_rows = op.token_offsets.defined(),
          .sorted_rows = sorted};
}

/// plan_layer's plan. A pass asks for it when it is sized and when it runs, a training step again: the latest are kept, for
/// each thread its own, since making one takes as long as launching a kernel.
std::shared_ptr<const Plan> kept_plan(const LayerShape&, const PlanOptions&);

/// One pass of the plan with its memory. Without memory only addresses modulo 256 mean anything, which is what an explanation
/// needs.
class LayerWorkspace {
 public:
  LayerWorkspace(const LayerShape& shape, const PlanOptions& options, bool backward, std::byte* memory, Device device = {})
      : plan_(kept_plan(shape, options)), backward_(backward), memory_(memory), device_(device) {}

  std::size_t bytes() const { return backward_ ? plan_->backward_workspace_bytes : plan_->forward_workspace_bytes; }

  /// A buffer's memory and size; null and 0 when this layer has none of that name.
  std::byte* memory(const char* name) const {
    const Buffer* buffer = find(name);
    return buffer ? address(*buffer) : nullptr;
  }
  std::size_t bytes_of(const char* name) const {
    const Buffer* buffer = find(name);
    return buffer ? align_up(buffer->bytes) : 0;
  }

  /// A rank-2 buffer, or an absent view when this layer has none of that name.
  TensorView matrix(const char* name) const {
    const Buffer* buffer = find(name);
    return buffer ? TensorView(address(*buffer), buffer->dtype, {buffer->shape[0], buffer->shape[1]}, device_) : TensorView{};
  }

 private:
  const Buffer* find(const char* name) const {
    return backward_ ? plan_->backward_workspace(name) : plan_->forward_workspace(name);
  }
  std::byte* address(const Buffer& buffer) const {
    return reinterpret_cast<std::byte*>(reinterpret_cast<std::uintptr_t>(memory_) + buffer.offset);
  }

  std::shared_ptr<const Plan> plan_;
  bool backward_;
  std::byte* memory_;
  Device device_;
};

}  // namespace intarsia
