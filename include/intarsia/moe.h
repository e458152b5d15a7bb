// The whole layer with its router, forward and backward, each as one operation that is made of those in ops.h: one call, one
// check of devices, one step's workspace after another's. Letters and conventions are those of ops.h; names and types of a
// field are those it has in the operation that it is handed to.
#pragma once

#include "intarsia/ops.h"

namespace intarsia {

/// The whole layer in one call, from x to y: router_logits, route, build_index and layer_forward, in this order, with these
/// fields. Each step checks its own arguments, so when a later one refuses, outputs of the earlier ones may have been written.
/// Without `logits` they are in memory from the context's allocator, given back before the experts run: beside the workspaces
/// of the steps, and not counted as one. So are dscores, dlogits and logits of moe_backward while they are needed.
struct MoeForward {
  static constexpr const char* kName = "moe_forward";
  TensorView x = {};            // (T, H) x
  TensorView w_router = {};     // (E, H) x or f32
  TensorView b_router = {};     // ? (E) x or f32
  TensorView expert_bias = {};  // ? (E) f32; sigmoid_group only
  TensorView token_mask = {};   // ? (T) boolean
  Weights w_up = {};            // (E, G*I, H)
  Weights w_down = {};          // (E, H, I)
  TensorView b_up = {};         // ? (E, G*I)
  TensorView b_down = {};       // ? (E, H)
  TensorView addend = {};       // ? (T, H) x
  RouterScores scores_kind = RouterScores::softmax;
  std::int64_t groups = 1;
  std::int64_t top_groups = 1;
  bool renormalise = true;
  double scale = 1.0;
  DType logits_dtype = DType::float32;  // of logits that are no output: f32 or x
  Activation activation = Activation::swiglu;
  ScorePlacement score_on = ScorePlacement::output;
  // out
  TensorView logits = {};          // ? (T, E) f32 or x
  TensorView rounded_logits = {};  // ? (T, E) bfloat16 or float16, beside float32 logits
  TensorView ids = {};             // (T, K) int32
  TensorView scores = {};          // (T, K) f32
  TensorView raw_scores = {};      // ? (T, K) f32
  TensorView nan_tokens = {};      // ? (1) int32, added to
  TensorView expert_offsets = {};  // (E+1)
  TensorView row_token = {};       // (R)
  TensorView row_slot = {};        // (R)
  TensorView slot_row = {};        // (T, K)
  TensorView expert_counts = {};   // ? (E) int32
  TensorView z = {};               // ? (R, G*I) x
  TensorView y = {};               // (T, H) x
};

/// Every gradient of moe_forward from dy: layer_backward, route_backward and router_logits_backward, in this order, with these
/// fields; the router's part of dx is added where the experts wrote theirs. An absent output is skipped, with all work that
/// only it needs. Softmax's logits are computed again where they were not kept. Refuses as moe_forward does.
struct MoeBackward {
  static constexpr const char* kName = "moe_backward";
  TensorView dy = {};              // (T, H) x
  TensorView x = {};               // (T, H) x
  TensorView w_router = {};        // (E, H) x or f32
  TensorView b_router = {};        // ? (E) x or f32: needed when logits are computed again
  TensorView logits = {};          // ? (T, E); softmax
  TensorView ids = {};             // (T, K) int32
  TensorView scores = {};          // (T, K) f32
  TensorView raw_scores = {};      // ? (T, K) f32; sigmoid_group
  TensorView expert_offsets = {};  // (E+1)
  TensorView row_token = {};       // (R)
  TensorView row_slot = {};        // (R)
  TensorView slot_row = {};        // (T, K)
  Weights w_up = {};               // (E, G*I, H)
  Weights w_down = {};             // (E, H, I)
  TensorView b_up = {};            // ? (E, G*I)
  TensorView b_down = {};          // ? (E, H)
  RouterScores scores_kind = RouterScores::softmax;
  bool renormalise = true;
  double scale = 1.0;
  DType logits_dtype = DType::float32;   // of logits that are computed again: f32 or x
  DType dlogits_dtype = DType::float32;  // of their gradient, which is no output: f32 or x
  Activation activation = Activation::swiglu;
  ScorePlacement score_on = ScorePlacement::output;
  bool overwrite_z = false;
  // in and out
  TensorView z = {};  // ? (R, G*I) x
  // out
  TensorView dx = {};         // ? (T, H) x
  TensorView dw_router = {};  // ? (E, H) dtype of w_router, or f32
  TensorView db_router = {};  // ? (E) x or f32
  Weights dw_up = {};         // ? x or f32
  Weights dw_down = {};       // ? x or f32
  TensorView db_up = {};      // ? x or f32
  TensorView db_down = {};    // ? x or f32
};

/// All compositions, once: X(Struct).
#define INTARSIA_FOR_EACH_COMPOSITION(X) X(MoeForward) X(MoeBackward)

#define INTARSIA_DECLARE(Op)                                                                                    \
  /** Runs its operations on one backend and stream. Throws InvalidArgument or Unsupported. */                  \
  INTARSIA_EXPORT void run(const Op&, const Context& = {});                                                     \
  /** The operations that it is made of, which can be explained one by one: their lists do not exist before. */ \
  INTARSIA_EXPORT std::string explain(const Op&, const Context& = {});
INTARSIA_FOR_EACH_COMPOSITION(INTARSIA_DECLARE)
#undef INTARSIA_DECLARE

}  // namespace intarsia
