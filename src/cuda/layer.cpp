// layer_forward and layer_backward on the GPU: the operations in the order of the memory plan, in one workspace.
//   forward   up_forward: z, a    down_forward: rows    combine: y
//   backward  (up_forward: z, where it was not kept)    down_backward: dz, a', ds    down_weight_backward    up_weight_backward
//             bias_backward    up_backward: dx_rows    combine: dx
// Sorted rows need no combine: rows go straight to y, and dx_rows to dx, with zeros past the last row.
#include "cuda/cuda.h"
#include "cuda/launch.h"
#include "cuda/zero_rows.h"
#include "plan/layer_workspace.h"

namespace intarsia::cuda {
namespace {

PlanOptions plan_options(const LayerForward&) { return {.training = false, .backend = Backend::cuda}; }
PlanOptions plan_options(const LayerBackward& op) {
  return {.save = op.z.defined() ? SaveMode::preactivation : SaveMode::input,
          .overwrite_z = op.overwrite_z,
          .weight_gradient = op.dw_down.defined(),
          .bias_gradient = op.db_up.defined() || op.db_down.defined(),
          .backend = Backend::cuda};
}

/// The pass's memory: a forward operation's, or a backward one's.
LayerWorkspace layer_workspace(const LayerForward& op, std::byte* memory) {
  return {layer_shape(op), plan_options(op), false, memory, op.x.device};
}
LayerWorkspace layer_workspace(const LayerBackward& op, std::byte* memory) {
  return {layer_shape(op), plan_options(op), true, memory, op.x.device};
}

// Every pass is a list of operations; visit(op, workspace, bytes of it) runs, or describes, each.

template <class Visit>
void forward_operations(const LayerForward& op, const LayerWorkspace& space, Visit&& visit) {
  const bool sorted = !op.row_token.defined();
  // The token forms leave a score on the output to the sum.
  const bool score_in_sum = !sorted && op.score_on == ScorePlacement::output;
  const TensorView a = space.matrix("a"), rows = sorted ? op.y : space.matrix("rows");
  visit(UpForward{.x = op.x,
                  .expert_offsets = op.expert_offsets,
                  .row_token = op.row_token,
                  .w_up = op.w_up,
                  .b_up = op.b_up,
                  .scores = op.scores,
                  .row_slot = op.row_slot,
                  .activation = op.activation,
                  .score_on = op.score_on,
                  .z = op.z,
                  .a = a});
  visit(DownForward{.a = a,
                    .expert_offsets = op.expert_offsets,
                    .w_down = op.w_down,
                    .b_down = op.b_down,
                    .scores = score_in_sum ? TensorView{} : op.scores,
                    .row_slot = op.row_slot,
                    .score_on = op.score_on,
                    .rows = rows});
  if (!sorted)
    visit(Combine{.rows = rows,
                  .slot_row = op.slot_row,
                  .token_offsets = op.token_offsets,
                  .token_rows = op.token_rows,
                  .scores = score_in_sum ? op.scores : TensorView{},
                  .addend = op.addend,
                  .y = op.y});
}

template <class Visit>
void backward_operations(const LayerBackward& op, const LayerWorkspace& space, Visit&& visit) {
  const TensorView z = op.z.defined() ? op.z : space.matrix("z");
  const TensorView dz = op.z.defined() && !op.overwrite_z ? space.matrix("dz") : z;
  const TensorView a_scaled = space.matrix("a_scaled");
  const bool wants_dz = op.overwrite_z || op.dx.defined() || op.dw_up.defined() || op.db_up.defined();
  if (wants_dz || op.dscores.defined() || op.dw_down.defined()) {
    if (!op.z.defined())
      visit(UpForward{.x = op.x,
                      .expert_offsets = op.expert_offsets,
                      .row_token = op.row_token,
                      .w_up = op.w_up,
                      .b_up = op.b_up,
                      .activation = op.activation,
                      .z = z,
                      .a = a_scaled});  // not what a' will be, but a place for it
    visit(DownBackward{.dy = op.dy,
                       .z = z,
                       .expert_offsets = op.expert_offsets,
                       .row_token = op.row_token,
                       .w_down = op.w_down,
                       .b_down = op.b_down,
                       .scores = op.scores,
                       .row_slot = op.row_slot,
                       .activation = op.activation,
                       .score_on = op.score_on,
                       .dz = dz,
                       .a_scaled = op.dw_down.defined() ? a_scaled : TensorView{},
                       .dscores = op.dscores},
          space.memory("row_dots"), space.bytes_of("row_dots"));
  }
  if (op.dw_down.defined())
    visit(DownWeightBackward{.dy = op.dy,
                             .a_scaled = a_scaled,
                             .expert_offsets = op.expert_offsets,
                             .row_token = op.row_token,
                             .accumulate = op.accumulate,
                             .grad_scale = op.grad_scale,
                             .dw_down = op.dw_down});
  if (op.dw_up.defined())
    visit(UpWeightBackward{.dz = dz,
                           .x = op.x,
                           .expert_offsets = op.expert_offsets,
                           .row_token = op.row_token,
                           .accumulate = op.accumulate,
                           .grad_scale = op.grad_scale,
                           .dw_up = op.dw_up});
  if (op.db_up.defined() || op.db_down.defined())
    visit(BiasBackward{.dz = op.db_up.defined() ? dz : TensorView{},
                       .dy = op.db_down.defined() ? op.dy : TensorView{},
                       .expert_offsets = op.expert_offsets,
                       .row_token = op.row_token,
                       .scores = op.scores,
                       .row_slot = op.row_slot,
                       .score_on = op.score_on,
                       .gate_block = op.w_up.second.defined() ? 0 : op.w_up.gate_block,
                       .accumulate = op.accumulate,
                       .grad_scale = op.grad_scale,
                       .db_up = op.db_up,
                       .db_down = op.db_down},
          space.memory("bias_sums"), space.bytes_of("bias_sums"));
  if (!op.dx.defined()) return;
  const bool sorted = !op.row_token.defined();
  const TensorView dx_rows = sorted ? op.dx : space.matrix("dx_rows");
  visit(UpBackward{.dz = dz, .expert_offsets = op.expert_offsets, .w_up = op.w_up, .dx_rows = dx_rows});
  if (!sorted)
    visit(Combine{.rows = dx_rows,
                  .slot_row = op.slot_row,
                  .token_offsets = op.token_offsets,
                  .token_rows = op.token_rows,
                  .addend = op.addend,
                  .y = op.dx});
}

struct Runner {
  const Execution& execution;
  template <class Op>
  void operator()(const Op& op, std::byte* workspace = nullptr, std::size_t bytes = 0) const {
    if (const std::size_t needed = cuda::workspace_bytes(op); needed > bytes)
      throw Error(std::string(Op::kName) + ": needs " + std::to_string(needed) + " bytes of workspace where the plan has " +
                  std::to_string(bytes));
    cuda::run(op, Execution{execution.stream, workspace, execution.workers});
  }
};

struct Describer {
  std::string text;
  template <class Op>
  void operator()(const Op& op, std::byte* = nullptr, std::size_t = 0) {
    text += (text.empty() ? "" : "\n") + std::string(Op::kName) + ": " + cuda::explain(op);
  }
};

}  // namespace

std::size_t workspace_bytes(const LayerForward& op) { return layer_workspace(op, nullptr).bytes(); }

std::size_t workspace_bytes(const LayerBackward& op) { return layer_workspace(op, nullptr).bytes(); }

std::string explain(const LayerForward& op) {
  Describer describer;
  forward_operations(op, layer_workspace(op, nullptr), describer);
  return describer.text;
}

std::string explain(const LayerBackward& op) {
  Describer describer;
  backward_operations(op, layer_workspace(op, nullptr), describer);
  return describer.text;
}

void run(const LayerForward& op, const Execution& execution) {
  const DeviceGuard guard(op.x.device.index);
  forward_operations(op, layer_workspace(op, execution.workspace), Runner{execution});
  if (!op.row_token.defined()) zero_rows_past_last(op.y, op.expert_offsets, execution.stream);
}

void run(const LayerBackward& op, const Execution& execution) {
  const DeviceGuard guard(op.x.device.index);
  backward_operations(op, layer_workspace(op, execution.workspace), Runner{execution});
  if (!op.row_token.defined() && op.dx.defined()) zero_rows_past_last(op.dx, op.expert_offsets, execution.stream);
}

}  // namespace intarsia::cuda
