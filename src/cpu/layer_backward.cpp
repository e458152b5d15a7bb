// layer_backward: every gradient of the layer; an absent output is skipped with all work that only it needs.
//   1  z recomputed where it was not kept; down_backward: dz, ds, a'      every row
//   2  down_weight_backward, up_weight_backward, bias_backward            every expert
//   3  up_backward and combine: dx                                        a chunk of tokens at a time
// dz (R, G*I) lies over z, or over the recomputed z, or in the workspace; a' (R, I) only where dw_down is wanted.
// 12 R I H flops (gated), 16 with z recomputed.
// Verify: intarsia-ops verify layer_backward
#include <algorithm>

#include "base/parallel.h"
#include "cpu/blocks.h"
#include "cpu/cpu.h"
#include "cpu/token_chunks.h"
#include "cpu/weight_gradient.h"
#include "plan/blocking.h"
#include "plan/layer_workspace.h"

namespace intarsia::cpu {
namespace {

PlanOptions options(const LayerBackward& op, int workers) {
  return {.save = op.z.defined() ? SaveMode::preactivation : SaveMode::input,
          .overwrite_z = op.overwrite_z,
          .weight_gradient = op.dw_down.defined(),
          .threads = workers};
}

class Backward {
 public:
  Backward(const LayerBackward& op, const Execution& execution)
      : op_(op),
        execution_(execution),
        shape_(layer_shape(op)),
        blocking_(cpu_blocking(shape_)),
        space_(shape_, options(op, execution.workers), true, execution.workspace),
        segments_(reinterpret_cast<std::int32_t*>(space_.memory("segments")), op.expert_offsets, blocking_.block_rows),
        z_(op.z.defined() ? op.z : space_.matrix("z")),
        dz_(op.z.defined() && !op.overwrite_z ? space_.matrix("dz") : z_) {}

  void run() {
    row_gradients();
    weight_gradients();
    if (op_.dx.defined()) {
      if (shape_.sorted_rows) input_gradient_of_rows();
      else input_gradient_of_tokens();
    }
  }

 private:
  bool wants_dz() const { return op_.overwrite_z || op_.dx.defined() || op_.dw_up.defined() || op_.db_up.defined(); }

  /// body(block, scratch) for every block of the current segments.
  template <class Body>
  void for_each_block(Body&& body) {
    std::byte* memory = space_.memory("scratch");
    parallel_for(segments_.tasks(), execution_.workers,
                 [&](std::int64_t task, int worker) { body(segments_.block(task), Scratch(memory, blocking_, worker)); });
  }

  void row_gradients() {
    if (op_.dscores.defined()) std::fill_n(op_.dscores.as<float>(), op_.dscores.numel(), 0.0f);
    if (!wants_dz() && !op_.dscores.defined() && !op_.dw_down.defined()) return;
    const UpForward recompute{.x = op_.x,
                              .expert_offsets = op_.expert_offsets,
                              .row_token = op_.row_token,
                              .w_up = op_.w_up,
                              .b_up = op_.b_up,
                              .activation = op_.activation,
                              .z = z_};
    const DownBackward down{.dy = op_.dy,
                            .z = z_,
                            .expert_offsets = op_.expert_offsets,
                            .row_token = op_.row_token,
                            .w_down = op_.w_down,
                            .b_down = op_.b_down,
                            .scores = op_.scores,
                            .row_slot = op_.row_slot,
                            .activation = op_.activation,
                            .score_on = op_.score_on,
                            .dz = wants_dz() ? dz_ : TensorView{},
                            .a_scaled = space_.matrix("a_scaled"),
                            .dscores = op_.dscores};
    segments_.take_all();
    for_each_block([&](const RowBlock& block, const Scratch& scratch) {
      if (!op_.z.defined()) up_forward_block(recompute, block, {}, scratch);
      down_backward_block(down, block, scratch);
    });
  }

  void weight_gradients() {
    auto* segments = reinterpret_cast<std::int32_t*>(space_.memory("segments"));
    const auto compute = [&](const WeightGradient& gradient) {
      weight_gradient(gradient, blocking_, segments, space_.memory("scratch"), execution_.workers);
    };
    if (op_.dw_down.defined())
      compute(down_weight_gradient({.dy = op_.dy,
                                    .a_scaled = space_.matrix("a_scaled"),
                                    .expert_offsets = op_.expert_offsets,
                                    .row_token = op_.row_token,
                                    .accumulate = op_.accumulate,
                                    .grad_scale = op_.grad_scale,
                                    .dw_down = op_.dw_down}));
    if (op_.dw_up.defined())
      compute(up_weight_gradient({.dz = dz_,
                                  .x = op_.x,
                                  .expert_offsets = op_.expert_offsets,
                                  .row_token = op_.row_token,
                                  .accumulate = op_.accumulate,
                                  .grad_scale = op_.grad_scale,
                                  .dw_up = op_.dw_up}));
    if (!op_.db_up.defined() && !op_.db_down.defined()) return;
    const BiasBackward bias{.dz = op_.db_up.defined() ? dz_ : TensorView{},
                            .dy = op_.db_down.defined() ? op_.dy : TensorView{},
                            .expert_offsets = op_.expert_offsets,
                            .row_token = op_.row_token,
                            .scores = op_.scores,
                            .row_slot = op_.row_slot,
                            .score_on = op_.score_on,
                            .gate_block = op_.w_up.second.defined() ? 0 : op_.w_up.gate_block,
                            .accumulate = op_.accumulate,
                            .grad_scale = op_.grad_scale,
                            .db_up = op_.db_up,
                            .db_down = op_.db_down};
    intarsia::cpu::run(bias, execution_);  // has no workspace of its own
  }

  void input_gradient(const RowTarget& target) {
    const UpBackward up{.dz = dz_, .expert_offsets = op_.expert_offsets, .w_up = op_.w_up};
    for_each_block([&](const RowBlock& block, const Scratch& scratch) { up_backward_block(up, block, target, scratch); });
  }

  void input_gradient_of_tokens() {
    const TokenLists lists(op_, shape_.tokens);
    const TensorView rows = space_.matrix("dx_rows");
    const ChunkCombine combine{lists, rows, {}, op_.addend, op_.dx};
    segments_.restart();
    for (std::int64_t token = 0; token < shape_.tokens;) {
      const TokenChunk chunk = lists.chunk(token, blocking_.chunk_rows);
      segments_.take_tokens(lists.row_token, chunk.end_token);
      input_gradient({.rows = rows, .position = lists.row_slot, .origin = chunk.first_slot});
      combine.run(chunk, execution_.workers);
      token = chunk.end_token;
    }
  }

  void input_gradient_of_rows() {
    segments_.take_all();
    input_gradient({.rows = op_.dx});
    zero_rows_from(op_.dx, list(op_.expert_offsets)[shape_.experts]);
  }

  const LayerBackward& op_;
  const Execution& execution_;
  LayerShape shape_;
  CpuBlocking blocking_;
  LayerWorkspace space_;
  Segments segments_;
  TensorView z_, dz_;
};

}  // namespace

std::size_t workspace_bytes(const LayerBackward& op, int workers) {
  return LayerWorkspace(layer_shape(op), options(op, workers), true, nullptr).bytes();
}

void run(const LayerBackward& op, const Execution& execution) { Backward(op, execution).run(); }

}  // namespace intarsia::cpu
