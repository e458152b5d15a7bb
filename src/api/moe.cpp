// moe_forward and moe_backward: the operations that they are made of, one after another, on any backend.
#include "api/choose.h"
#include "api/workspace_block.h"
#include "intarsia/error.h"

namespace intarsia {
namespace {

/// Refuses tensors on several devices, a stream of another one, and devices that nothing can compute on, before memory is asked
/// for.
template <class Op>
Device device_of(const Op& op, const Context& context) {
  const Survey s = survey(op);
  const Choice choice = choose(s, context.backend);
  if (!choice.refusal.empty()) throw Unsupported(std::string(Op::kName) + ": " + choice.refusal);
  check_stream(s, choice, context.stream);
  return s.device;
}

/// A contiguous matrix that lives no longer than this: one of the plan's transients.
class Temporary {
 public:
  Temporary(Device device, const Context& context, DType dtype, std::int64_t rows, std::int64_t columns)
      : view_(nullptr, dtype, {rows, columns}, device),
        block_(device, context, static_cast<std::size_t>(view_.numel()) * size_of(dtype), BlockKind::transient) {
    view_.data = block_.get();
  }
  const TensorView& view() const { return view_; }

 private:
  TensorView view_;
  WorkspaceBlock block_;
};

// ---- forward

void run_router(const MoeForward& op, const TensorView& logits, const Context& context) {
  run(RouterLogits{.x = op.x, .w_router = op.w_router, .bias = op.b_router, .logits = logits}, context);
  run(Route{.logits = logits,
            .expert_bias = op.expert_bias,
            .token_mask = op.token_mask,
            .scores_kind = op.scores_kind,
            .groups = op.groups,
            .top_groups = op.top_groups,
            .renormalise = op.renormalise,
            .scale = op.scale,
            .ids = op.ids,
            .scores = op.scores,
            .raw_scores = op.raw_scores,
            .nan_tokens = op.nan_tokens,
            .rounded_logits = op.rounded_logits},
      context);
}

// ---- backward

void run_experts_backward(const MoeBackward& op, const TensorView& dscores, const Context& context) {
  run(LayerBackward{.dy = op.dy,
                    .x = op.x,
                    .expert_offsets = op.expert_offsets,
                    .row_token = op.row_token,
                    .row_slot = op.row_slot,
                    .slot_row = op.slot_row,
                    .scores = op.scores,
                    .w_up = op.w_up,
                    .w_down = op.w_down,
                    .b_up = op.b_up,
                    .b_down = op.b_down,
                    .activation = op.activation,
                    .score_on = op.score_on,
                    .overwrite_z = op.overwrite_z,
                    .z = op.z,
                    .dx = op.dx,
                    .dscores = dscores,
                    .dw_up = op.dw_up,
                    .dw_down = op.dw_down,
                    .db_up = op.db_up,
                    .db_down = op.db_down},
      context);
}

void run_route_backward(const MoeBackward& op, const TensorView& dscores, const TensorView& logits, const TensorView& dlogits,
                        const Context& context) {
  run(RouteBackward{.dscores = dscores,
                    .scores = op.scores,
                    .ids = op.ids,
                    .raw_scores = op.raw_scores,
                    .logits = logits,
                    .scores_kind = op.scores_kind,
                    .renormalise = op.renormalise,
                    .scale = op.scale,
                    .dlogits = dlogits},
      context);
}

void run_router_backward(const MoeBackward& op, const TensorView& dscores, Device device, const Context& context) {
  const std::int64_t tokens = op.x.size(0), experts = op.w_router.size(0);
  const Temporary dlogits(device, context, op.dlogits_dtype, tokens, experts);
  if (op.scores_kind == RouterScores::softmax && !op.logits.defined()) {
    const Temporary logits(device, context, op.logits_dtype, tokens, experts);
    run(RouterLogits{.x = op.x, .w_router = op.w_router, .bias = op.b_router, .logits = logits.view()}, context);
    run_route_backward(op, dscores, logits.view(), dlogits.view(), context);
  } else {
    run_route_backward(op, dscores, op.logits, dlogits.view(), context);
  }
  run(RouterLogitsBackward{.dlogits = dlogits.view(),
                           .x = op.x,
                           .w_router = op.w_router,
                           .add_to_dx = op.dx.defined(),
                           .dx = op.dx,
                           .dw_router = op.dw_router,
                           .dbias = op.db_router},
      context);
}

}  // namespace

void run(const MoeForward& op, const Context& context) {
  const Device device = device_of(op, context);
  if (op.logits.defined()) run_router(op, op.logits, context);
  else run_router(op, Temporary(device, context, op.logits_dtype, op.x.size(0), op.w_router.size(0)).view(), context);
  run(BuildIndex{.ids = op.ids,
                 .expert_offsets = op.expert_offsets,
                 .row_token = op.row_token,
                 .row_slot = op.row_slot,
                 .slot_row = op.slot_row,
                 .expert_counts = op.expert_counts},
      context);
  run(LayerForward{.x = op.x,
                   .expert_offsets = op.expert_offsets,
                   .row_token = op.row_token,
                   .row_slot = op.row_slot,
                   .slot_row = op.slot_row,
                   .scores = op.scores,
                   .w_up = op.w_up,
                   .w_down = op.w_down,
                   .b_up = op.b_up,
                   .b_down = op.b_down,
                   .addend = op.addend,
                   .activation = op.activation,
                   .score_on = op.score_on,
                   .z = op.z,
                   .y = op.y},
      context);
}

void run(const MoeBackward& op, const Context& context) {
  const Device device = device_of(op, context);
  if (!op.dx.defined() && !op.dw_router.defined() && !op.db_router.defined()) return run_experts_backward(op, {}, context);
  const Temporary dscores(device, context, op.scores.dtype, op.scores.size(0), op.scores.size(1));
  run_experts_backward(op, dscores.view(), context);
  run_router_backward(op, dscores.view(), device, context);
}

std::string explain(const MoeForward&, const Context&) {
  return "moe_forward: runs router_logits, route, build_index and layer_forward; ask for each of them";
}

std::string explain(const MoeBackward&, const Context&) {
  return "moe_backward: runs layer_backward, route_backward and router_logits_backward; ask for each of them";
}

}  // namespace intarsia
