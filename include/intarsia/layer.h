// The layer for C++ programs: forward and backward of one MoE layer from expert choices, with the memory in between owned for
// you.
//
//   intarsia::Layer layer({.experts = 8});
//   auto saved = layer.forward({.x = x, .ids = ids, .scores = scores}, weights, y);   // y (T, H)
//   layer.backward(saved, dy, weights, {.dx = dx, .dscores = ds, .dw_up = ..., .dw_down = ...});
//
// It is a thin owner over build_index, layer_forward and layer_backward of ops.h; everything there can be called directly.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "intarsia/ops.h"
#include "intarsia/plan.h"

namespace intarsia {

struct LayerConfig {
  std::int64_t experts = 0;  ///< E
  Activation activation = Activation::swiglu;
  ScorePlacement score_on = ScorePlacement::output;
  SaveMode save = SaveMode::preactivation;
};

struct LayerInput {
  TensorView x = {};           // (T, H)
  TensorView ids = {};         // (T, K) int32 or int64; outside [0, E): not here
  TensorView scores = {};      // (T, K) float32 (float64 with float64 x)
  TensorView token_mask = {};  // ? (T) boolean: false = no expert sees the token
  TensorView addend = {};      // ? (T, H): added to y
};

struct LayerWeights {
  Weights w_up = {};       // (E, G*I, H)
  Weights w_down = {};     // (E, H, I)
  TensorView b_up = {};    // ? (E, G*I)
  TensorView b_down = {};  // ? (E, H)
};

/// Gradients to write; what is left out is not computed.
struct LayerGradients {
  TensorView dx = {};       // ? (T, H)
  TensorView dscores = {};  // ? (T, K)
  Weights dw_up = {};       // ?
  Weights dw_down = {};     // ?
  TensorView db_up = {};    // ?
  TensorView db_down = {};  // ?
  TensorView addend = {};   // ? (T, H): added to dx
  bool accumulate = false;  // add to the weight and bias gradients
  double grad_scale = 1.0;  // of the weight and bias gradients
};

/// What forward keeps for backward: the index lists and, with save = preactivation, z. Frees it when destroyed.
/// x and scores are views of the caller's tensors and must stay alive and unchanged until backward.
class INTARSIA_EXPORT SavedForBackward {
 public:
  SavedForBackward() = default;
  explicit SavedForBackward(Allocator& allocator) : allocator_(&allocator) {}
  SavedForBackward(SavedForBackward&& other) noexcept { swap(other); }
  SavedForBackward& operator=(SavedForBackward&& other) noexcept {
    swap(other);
    return *this;
  }
  ~SavedForBackward();

  /// Bytes held here (x and scores not counted).
  std::size_t bytes() const;

 private:
  friend class Layer;
  TensorView allocate(DType dtype, std::initializer_list<std::int64_t> shape, Device device);
  void swap(SavedForBackward& other) noexcept {
    std::swap(allocator_, other.allocator_);
    std::swap(blocks_, other.blocks_);
    std::swap(forward_, other.forward_);
    std::swap(consumed_, other.consumed_);
  }

  Allocator* allocator_ = nullptr;
  std::vector<std::pair<void*, std::size_t>> blocks_;
  LayerForward forward_;
  bool consumed_ = false;
};

class INTARSIA_EXPORT Layer {
 public:
  /// The context's allocator (on the CPU by default host_allocator()) provides what is saved as well as the workspaces.
  explicit Layer(const LayerConfig& config, const Context& context = {});

  /// y = addend + sum over the chosen experts; returns what backward needs.
  SavedForBackward forward(const LayerInput& input, const LayerWeights& weights, TensorView y) const;
  /// The same, keeping nothing.
  void infer(const LayerInput& input, const LayerWeights& weights, TensorView y) const;
  /// Every gradient asked for. dz takes z's place, so this works once per forward; a second call throws InvalidArgument.
  void backward(SavedForBackward& saved, TensorView dy, const LayerWeights& weights, const LayerGradients& gradients) const;

 private:
  SavedForBackward run_forward(const LayerInput& input, const LayerWeights& weights, TensorView y, bool training) const;

  LayerConfig config_;
  Context context_;
};

}  // namespace intarsia
