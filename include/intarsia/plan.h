// The memory plan: every buffer of a layer's forward and backward, with bytes and lifetime, from shapes alone. Pure arithmetic,
// and the same arithmetic that places the buffers when the layer runs: planned bytes are measured bytes.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "intarsia/config.h"
#include "intarsia/export.h"

namespace intarsia {

/// What the plan needs to know about a layer and how it is run.
struct LayerShape {
  std::int64_t tokens = 0;             // T
  std::int64_t hidden = 0;             // H
  std::int64_t width = 0;              // I
  std::int64_t experts = 0;            // E
  std::int64_t experts_per_token = 1;  // K
  std::int64_t rows = 0;               // R: capacity of the row lists; 0 means T*K
  DType dtype = DType::bfloat16;
  Activation activation = Activation::swiglu;
  bool token_rows = false;   // CSR lists (token rounding)
  bool sorted_rows = false;  // the caller's rows are sorted by expert: no gather, no combine

  friend bool operator==(const LayerShape&, const LayerShape&) = default;
};

struct PlanOptions {
  SaveMode save = SaveMode::preactivation;
  RouterScores router = RouterScores::softmax_renorm;
  bool training = true;              // false: nothing requires a gradient
  bool overwrite_z = true;           // dz takes z's place
  bool router_keeps_logits = false;  // 2TE in bf16 instead of recomputing them (families that need logits)
  bool has_router = false;           // count ids, scores and what route's backward needs
  bool weight_gradient = true;       // false: experts are frozen
  bool bias_gradient = false;        // db_up or db_down is wanted
  Backend backend = Backend::cpu;
  int threads = 1;

  friend bool operator==(const PlanOptions&, const PlanOptions&) = default;
};

///   saved      kept between forward and backward
///   workspace  part of the one block that layer_forward or layer_backward allocates and frees
///   transient  a tensor that passes from one operation to the next: y, logits and their gradient
enum class BufferKind : std::uint8_t { saved, workspace, transient };

/// One buffer, alive from step `first` to step `last` (indices into Plan::steps), both included.
struct Buffer {
  std::string name;
  std::vector<std::int64_t> shape;
  DType dtype = DType::float32;
  std::size_t bytes = 0;
  BufferKind kind = BufferKind::workspace;
  int first = 0;           ///< step that writes it
  int last = 0;            ///< last step that reads it
  std::size_t offset = 0;  ///< place in the workspace of its pass; workspace buffers only
};

struct Plan {
  std::vector<std::string> steps;  ///< names of the operations in order
  int border = 0;                  ///< steps before it are forward
  std::vector<Buffer> buffers;
  std::size_t saved_bytes = 0;               ///< held between forward and backward, x included
  std::size_t forward_workspace_bytes = 0;   ///< one allocation, made and freed by layer_forward
  std::size_t backward_workspace_bytes = 0;  ///< the same for layer_backward
  std::size_t peak_bytes = 0;                ///< most bytes live at once above x, weights and the gradients of both

  /// The workspace buffer of that name in that pass, or null when this layer has none.
  INTARSIA_EXPORT const Buffer* forward_workspace(std::string_view name) const;
  INTARSIA_EXPORT const Buffer* backward_workspace(std::string_view name) const;
};

INTARSIA_EXPORT Plan plan_layer(const LayerShape&, const PlanOptions& = {});
/// {"steps": [..], "border": n, "saved_bytes": n, "forward_workspace_bytes": n, "backward_workspace_bytes": n, "peak_bytes": n,
///  "buffers": [{"name", "shape", "dtype", "bytes", "kind", "lifetime": ["first step", "last step"]}]}
INTARSIA_EXPORT std::string to_json(const Plan&);
/// The same as a table for people.
INTARSIA_EXPORT std::string to_table(const Plan&);

}  // namespace intarsia
