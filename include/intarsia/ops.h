// The operations. Each is a struct of named arguments; `run(op)` checks it, chooses a backend and computes.
//
//   intarsia::run(intarsia::UpForward{.x = x, .expert_offsets = offsets, .row_token = rows, .w_up = w, .z = z, .a = a});
//
// Letters: T tokens, H hidden size, I expert width, E experts, K experts per token, R rows (capacity of the row lists, at
// least T*K), G = 2 for gated activations and 1 for plain ones, so z is (R, G*I). Shapes are written (T, H).
// Dtypes: "x" below is float32, bfloat16, float16 or (reference backend) float64, and all activations and weights of one call
// share it; biases have it too or are float32. "f32" means float32, and float64 when x is float64. Accumulation is fp32 (fp64).
// Lists are int32. Rows at or past expert_offsets[E] are never read; an operation with (R, *) outputs writes only rows below
// it. Fields are inputs until the line "out". Fields marked ? may be left out. Outputs must not overlap inputs unless a line
// says so. Sections cited are those of SonicMoE (arXiv 2512.14080) and MoEBlaze (arXiv 2601.05296).
#pragma once

#include <cstdint>
#include <string>

#include "intarsia/config.h"
#include "intarsia/types.h"

namespace intarsia {

/// Where and how an operation runs.
struct Context {
  Backend backend = Backend::automatic;
  void* stream = nullptr;  ///< CUDA stream of the tensors' device; ignored on the CPU
  /// Where the workspace comes from. Null: host_allocator() on the CPU; on CUDA cudaMallocAsync in the order of `stream`, from
  /// the device's current memory pool. That pool returns its memory to the system at every synchronisation, and mapping it
  /// again takes time, unless its cudaMemPoolAttrReleaseThreshold was raised, which is the program's to decide.
  Allocator* allocator = nullptr;
};

// ---------------------------------------------------------------------------------------------------------- the router

/// logits = x w_router^T + bias, accumulated in fp32 and rounded once to the dtype of `logits` (that choice decides ids).
struct RouterLogits {
  static constexpr const char* kName = "router_logits";
  TensorView x = {};         // (T, H) x
  TensorView w_router = {};  // (E, H) x or f32
  TensorView bias = {};      // ? (E) x or f32
  // out
  TensorView logits = {};  // (T, E) f32 or x
};

/// dx = dlogits w_router, dw_router = dlogits^T x, dbias = column sums of dlogits. Absent outputs are skipped.
/// With `add_to_dx` dx += dlogits w_router: x's gradient through the experts is there already, and no pass over (T, H) adds
/// them (on wgmma rounded before and after the addition, as by a pass of its own). A token whose dlogits are all zero takes no
/// part in dw_router, whatever its x holds.
struct RouterLogitsBackward {
  static constexpr const char* kName = "router_logits_backward";
  TensorView dlogits = {};   // (T, E) f32 or x
  TensorView x = {};         // (T, H) x
  TensorView w_router = {};  // (E, H) x or f32
  bool add_to_dx = false;
  // out
  TensorView dx = {};         // ? (T, H) x
  TensorView dw_router = {};  // ? (E, H) dtype of w_router, or f32
  TensorView dbias = {};      // ? (E) x or f32
};

/// Chooses K experts per token. Ties go to the lowest id; logits are compared with all their bits. A token with a NaN logit, or
/// whose largest logit is infinite, gets ids -1 and scores 0 and is counted; a masked token likewise, uncounted.
/// Chosen in descending order of what the family ranks by. K <= 64, E <= 4096.
/// sigmoid_group: ranks by sigmoid(logit) + expert_bias; experts are cut into `groups` equal groups, a group's worth is the sum
/// of its best two, the best `top_groups` groups stay; scores = sigmoid, over their sum when `renormalise`, times `scale`.
struct Route {
  static constexpr const char* kName = "route";
  TensorView logits = {};       // (T, E) float32, bfloat16, float16, float64
  TensorView expert_bias = {};  // ? (E) f32; sigmoid_group only
  TensorView token_mask = {};   // ? (T) boolean: false = the token is not routed
  RouterScores scores_kind = RouterScores::softmax;
  std::int64_t groups = 1;
  std::int64_t top_groups = 1;
  bool renormalise = true;  // sigmoid_group only
  double scale = 1.0;       // sigmoid_group only
  // out
  TensorView ids = {};         // (T, K) int32 or int64
  TensorView scores = {};      // (T, K) f32
  TensorView raw_scores = {};  // ? (T, K) f32: sigmoid of the chosen logits, what sigmoid_group's backward needs
  TensorView nan_tokens = {};  // ? (1) int32: the number of NaN tokens is added to it
  // ? (T, E) bfloat16 or float16, beside float32 logits: the logits of every token, rounded: what softmax's backward keeps
  TensorView rounded_logits = {};
};

/// dlogits from dscores. Two forms: ids (T, K) with scores and dscores (T, K); or the CSR lists of round_tokens with scores and
/// dscores per row (R), always of kind softmax. dlogits is written whole; tokens without a choice get zeros.
struct RouteBackward {
  static constexpr const char* kName = "route_backward";
  TensorView dscores = {};         // (T, K) or (R) f32
  TensorView scores = {};          // (T, K) or (R) f32, as route or round_tokens gave them
  TensorView ids = {};             // ? (T, K)
  TensorView raw_scores = {};      // ? (T, K) f32; sigmoid_group
  TensorView logits = {};          // ? (T, E); softmax (its gradient is dense over E)
  TensorView expert_offsets = {};  // ? (E+1)  the CSR form
  TensorView token_offsets = {};   // ? (T+1)
  TensorView token_rows = {};      // ? (R)
  RouterScores scores_kind = RouterScores::softmax;
  bool renormalise = true;
  double scale = 1.0;
  // out
  TensorView dlogits = {};  // (T, E) f32 or the logits' dtype
};

/// c * sum_e f_e P_e over the valid tokens (not masked, no NaN): f_e = slots that chose e / valid tokens, P_e = mean
/// probability. Independent of capacity and padding. `kind` sigmoid or sigmoid_group: probability = sigmoid / its sum over E.
/// (HF, Megatron)
struct LoadBalanceLoss {
  static constexpr const char* kName = "load_balance_loss";
  TensorView logits = {};      // (T, E)
  TensorView ids = {};         // (T, K)
  TensorView token_mask = {};  // ? (T) boolean
  RouterScores scores_kind = RouterScores::softmax;
  BalanceNormalisation normalisation = BalanceNormalisation::huggingface;
  // out
  TensorView loss = {};             // (1) f32; 0 without valid tokens
  TensorView expert_fraction = {};  // (E) f32: f_e
  TensorView valid_tokens = {};     // (1) f32
};

/// dlogits = dloss * d(loss)/d(logits); f_e is a constant.
struct LoadBalanceLossBackward {
  static constexpr const char* kName = "load_balance_loss_backward";
  TensorView dloss = {};               // (1) f32
  TensorView logits = {};              // (T, E)
  TensorView token_mask = {};          // ? (T)
  TensorView expert_fraction = {};     // (E) f32
  TensorView valid_tokens = {};        // (1) f32
  std::int64_t experts_per_token = 1;  // K; megatron's normalisation divides by it
  RouterScores scores_kind = RouterScores::softmax;
  BalanceNormalisation normalisation = BalanceNormalisation::huggingface;
  // out
  TensorView dlogits = {};  // (T, E) f32 or the logits' dtype
};

/// mean over the valid tokens of logsumexp(logits)^2. (ST-MoE)
struct ZLoss {
  static constexpr const char* kName = "z_loss";
  TensorView logits = {};      // (T, E)
  TensorView token_mask = {};  // ? (T)
  // out
  TensorView loss = {};          // (1) f32
  TensorView valid_tokens = {};  // (1) f32
};

struct ZLossBackward {
  static constexpr const char* kName = "z_loss_backward";
  TensorView dloss = {};         // (1) f32
  TensorView logits = {};        // (T, E)
  TensorView token_mask = {};    // ? (T)
  TensorView valid_tokens = {};  // (1) f32
  // out
  TensorView dlogits = {};  // (T, E) f32 or the logits' dtype
};

/// bias[e] += rate * sign(mean(counts) - counts[e]), exactly 0 at balance. (DeepSeek-V3, loss-free balancing)
struct UpdateExpertBias {
  static constexpr const char* kName = "update_expert_bias";
  TensorView counts = {};  // (E) int32, int64 or f32: slots that chose each expert
  double rate = 0.001;
  // in and out
  TensorView bias = {};  // (E) f32
};

// ------------------------------------------------------------------------------------------------------ the index lists

/// The lists of design.md section 2 from ids; stable, duplicates allowed, ids outside [0, E) and masked tokens have no row.
/// Row entries at or past expert_offsets[E] are set to -1. (MoEBlaze, section 4)
struct BuildIndex {
  static constexpr const char* kName = "build_index";
  TensorView ids = {};         // (T, K) int32 or int64
  TensorView token_mask = {};  // ? (T) boolean
  // out
  TensorView expert_offsets = {};  // (E+1) first row of each expert
  TensorView row_token = {};       // (R) token of each row: expert by expert, ascending inside an expert
  TensorView row_slot = {};        // (R) flat slot t*K+k of each row
  TensorView slot_row = {};        // (T, K) its inverse; -1 for a slot without a row
  TensorView expert_counts = {};   // ? (E) int32: rows of each expert
};

/// Token rounding (SonicMoE, section 5). Scores are softmax(logits), never renormalised: each token's top-k as `route`
/// (softmax) chooses them; then each expert's count f is rounded to a multiple of `tile` by dropping its lowest-scored rows or
/// adding the unchosen tokens of highest probability (ties to the lowest token), capped at the number of valid tokens. CSR form
/// of the lists: token t owns positions token_offsets[t] .. token_offsets[t+1] of token_rows, in ascending row order. R >=
/// min(T*K + E*(tile-1), T*E). Row entries past the last are -1, row_score 0.
struct RoundTokens {
  static constexpr const char* kName = "round_tokens";
  TensorView logits = {};      // (T, E)
  TensorView token_mask = {};  // ? (T)
  std::int64_t experts_per_token = 1;
  std::int64_t tile = 128;
  Rounding rounding = Rounding::nearest;
  std::int64_t seed = 0;
  // out
  TensorView expert_offsets = {};  // (E+1)
  TensorView row_token = {};       // (R)
  TensorView row_slot = {};        // (R) position of each row in token_rows
  TensorView token_offsets = {};   // (T+1)
  TensorView token_rows = {};      // (R)
  TensorView row_score = {};       // (R) f32
};

// ------------------------------------------------------------------------------------- the six GEMM operations and combine
//
// Row r of expert e is in [expert_offsets[e], expert_offsets[e+1]). With row_token the left operand is gathered: row r reads
// x[row_token[r]]; without it x is (R, H), already sorted by expert, and row r reads x[r].
// Scores s: (T, K) read through row_slot, or (R) per row; without scores s = 1.
// Biases follow the order of the weight's out axis (gate_block; [gate, up] when gate and up are two tensors).

/// z = x[row_token] w_up^T + b_up;  a = act(z), s * act(z) (inside) or act(s * z) (input).
struct UpForward {
  static constexpr const char* kName = "up_forward";
  TensorView x = {};               // (T, H) or (R, H) x
  TensorView expert_offsets = {};  // (E+1)
  TensorView row_token = {};       // ? (R)
  Weights w_up = {};               // (E, G*I, H)
  TensorView b_up = {};            // ? (E, G*I)
  TensorView scores = {};          // ? (T, K) or (R) f32; unused when score_on = output
  TensorView row_slot = {};        // ? (R), with scores (T, K)
  Activation activation = Activation::swiglu;
  ScorePlacement score_on = ScorePlacement::output;
  // out
  TensorView z = {};  // ? (R, G*I) x, always [gate, up]
  TensorView a = {};  // (R, I) x
};

/// rows = a w_down^T + b_down. With scores: output: s * (a w_down^T + b_down); inside: a w_down^T + s * b_down; input: as
/// without. With w_down = any (E, N, M) weight and nothing else this is a bare grouped GEMM.
struct DownForward {
  static constexpr const char* kName = "down_forward";
  TensorView a = {};               // (R, I) x
  TensorView expert_offsets = {};  // (E+1)
  Weights w_down = {};             // (E, H, I)
  TensorView b_down = {};          // ? (E, H)
  TensorView scores = {};          // ? (T, K) or (R) f32
  TensorView row_slot = {};        // ? (R)
  ScorePlacement score_on = ScorePlacement::output;
  // out
  TensorView rows = {};  // (R, H) x
};

/// y[t] = addend[t] + sum over the rows of token t of s * rows[r], in fp32, in ascending slot order, rounded once.
/// Rows of a token come from slot_row (T, K) or from the CSR pair.
struct Combine {
  static constexpr const char* kName = "combine";
  TensorView rows = {};           // (R, H) x
  TensorView slot_row = {};       // ? (T, K)
  TensorView token_offsets = {};  // ? (T+1)
  TensorView token_rows = {};     // ? (R)
  TensorView scores = {};         // ? (T, K) with slot_row, (R) with the CSR pair
  TensorView addend = {};         // ? (T, H) x; may be y itself
  // out
  TensorView y = {};  // (T, H) x
};

/// With da' = dy[row_token] w_down:  ds = <da', a> + <dy, b_down>;  a' = s * a;  dz = act'(z) * (s * da').
/// input: with g = act'(s z) da':  ds = <g, z>;  a' = act(s z);  dz = s * g.  a is recomputed from z. (SonicMoE, section 3)
struct DownBackward {
  static constexpr const char* kName = "down_backward";
  TensorView dy = {};              // (T, H) or (R, H) x
  TensorView z = {};               // (R, G*I) x
  TensorView expert_offsets = {};  // (E+1)
  TensorView row_token = {};       // ? (R)
  Weights w_down = {};             // (E, H, I)
  TensorView b_down = {};          // ? (E, H)
  TensorView scores = {};          // ? (T, K) or (R) f32
  TensorView row_slot = {};        // ? (R)
  Activation activation = Activation::swiglu;
  ScorePlacement score_on = ScorePlacement::output;
  // out
  TensorView dz = {};        // (R, G*I) x, [gate, up]; may be z itself
  TensorView a_scaled = {};  // ? (R, I) x: a'
  TensorView dscores = {};   // ? like scores; 0 for slots without a row and for (R) entries past the last row
};

/// dw_down[e] = grad_scale * dy[row_token]^T a'. Experts without rows: zeros, or untouched when `accumulate`.
/// accumulate: the sum is formed in fp32, added to what is there, rounded once to the buffer's dtype.
struct DownWeightBackward {
  static constexpr const char* kName = "down_weight_backward";
  TensorView dy = {};              // (T, H) or (R, H) x
  TensorView a_scaled = {};        // (R, I) x
  TensorView expert_offsets = {};  // (E+1)
  TensorView row_token = {};       // ? (R)
  bool accumulate = false;
  double grad_scale = 1.0;
  // out
  Weights dw_down = {};  // (E, H, I) x or f32
};

/// dx_rows = dz w_up.
struct UpBackward {
  static constexpr const char* kName = "up_backward";
  TensorView dz = {};              // (R, G*I) x, [gate, up]
  TensorView expert_offsets = {};  // (E+1)
  Weights w_up = {};               // (E, G*I, H)
  // out
  TensorView dx_rows = {};  // (R, H) x
};

/// dw_up[e] = grad_scale * dz^T x[row_token], in the layout of dw_up. `gated`: dz is [gate, up].
struct UpWeightBackward {
  static constexpr const char* kName = "up_weight_backward";
  TensorView dz = {};              // (R, G*I) x
  TensorView x = {};               // (T, H) or (R, H) x
  TensorView expert_offsets = {};  // (E+1)
  TensorView row_token = {};       // ? (R)
  bool accumulate = false;
  double grad_scale = 1.0;
  // out
  Weights dw_up = {};  // (E, G*I, H) x or f32
};

/// db_up[e] = grad_scale * sum dz (in the order of gate_block);  db_down[e] = grad_scale * sum s * dy[row_token] (input: sum
/// dy).
struct BiasBackward {
  static constexpr const char* kName = "bias_backward";
  TensorView dz = {};              // ? (R, G*I) x, with db_up
  TensorView dy = {};              // ? (T, H) or (R, H) x, with db_down
  TensorView expert_offsets = {};  // (E+1)
  TensorView row_token = {};       // ? (R)
  TensorView scores = {};          // ? (T, K) or (R) f32
  TensorView row_slot = {};        // ? (R)
  ScorePlacement score_on = ScorePlacement::output;
  std::int64_t gate_block = 0;
  bool accumulate = false;
  double grad_scale = 1.0;
  // out
  TensorView db_up = {};    // ? (E, G*I) x or f32
  TensorView db_down = {};  // ? (E, H) x or f32
};

// ------------------------------------------------------------------------------------------------------------ the layer

/// The whole expert layer, from lists to y. Three forms, told apart by which lists are there:
///   tokens, fixed K     row_token, row_slot, slot_row;                  scores (T, K); y = addend + sum s * expert(x[t])
///   tokens, varying K   row_token, row_slot, token_offsets, token_rows; scores (R);    the same, at most one row per token and
///   expert sorted rows         expert_offsets alone; x and y are (R, H);       scores ? (R);  y[r] = s * expert(x[r]), 0 past
///   the last row
/// z is written when defined (training with save = preactivation).
struct LayerForward {
  static constexpr const char* kName = "layer_forward";
  TensorView x = {};               // (T, H) or (R, H) x
  TensorView expert_offsets = {};  // (E+1)
  TensorView row_token = {};       // ? (R)
  TensorView row_slot = {};        // ? (R)
  TensorView slot_row = {};        // ? (T, K)
  TensorView token_offsets = {};   // ? (T+1)
  TensorView token_rows = {};      // ? (R)
  TensorView scores = {};          // ? (T, K) or (R) f32; required in the token forms
  Weights w_up = {};               // (E, G*I, H)
  Weights w_down = {};             // (E, H, I)
  TensorView b_up = {};            // ? (E, G*I)
  TensorView b_down = {};          // ? (E, H)
  TensorView addend = {};          // ? (T, H) x: residual or shared expert; token forms only
  Activation activation = Activation::swiglu;
  ScorePlacement score_on = ScorePlacement::output;
  // out
  TensorView z = {};  // ? (R, G*I) x
  TensorView y = {};  // (T, H) or (R, H) x
};

/// Every gradient of the layer; an absent output is skipped, with all work that only it needs.
/// Without z (save = input) it is recomputed. `overwrite_z` lets dz take z's place: afterwards z holds dz.
/// dx = addend + sum of the rows' gradients (the addend carries the router's part of dx).
struct LayerBackward {
  static constexpr const char* kName = "layer_backward";
  TensorView dy = {};              // (T, H) or (R, H) x
  TensorView x = {};               // as in forward
  TensorView expert_offsets = {};  // (E+1)
  TensorView row_token = {};       // ? (R)
  TensorView row_slot = {};        // ? (R)
  TensorView slot_row = {};        // ? (T, K)
  TensorView token_offsets = {};   // ? (T+1)
  TensorView token_rows = {};      // ? (R)
  TensorView scores = {};          // ? (T, K) or (R) f32
  Weights w_up = {};
  Weights w_down = {};
  TensorView b_up = {};    // ? needed when z is recomputed
  TensorView b_down = {};  // ? needed for dscores
  TensorView addend = {};  // ? (T, H) x
  Activation activation = Activation::swiglu;
  ScorePlacement score_on = ScorePlacement::output;
  bool overwrite_z = false;
  bool accumulate = false;  // weight and bias gradients
  double grad_scale = 1.0;  // weight and bias gradients
  // in and out
  TensorView z = {};  // ? (R, G*I) x
  // out
  TensorView dx = {};       // ? (T, H) or (R, H) x
  TensorView dscores = {};  // ? like scores
  Weights dw_up = {};       // ? x or f32
  Weights dw_down = {};     // ? x or f32
  TensorView db_up = {};    // ? x or f32
  TensorView db_down = {};  // ? x or f32
};

/// All operations that backends implement, once: X(Struct). Those that are made of them are in moe.h.
// clang-format off
#define INTARSIA_FOR_EACH_OPERATION(X) \
  X(RouterLogits) X(RouterLogitsBackward) X(Route) X(RouteBackward) X(LoadBalanceLoss) X(LoadBalanceLossBackward) \
  X(ZLoss) X(ZLossBackward) X(UpdateExpertBias) X(BuildIndex) X(RoundTokens) X(UpForward) X(DownForward) X(Combine) \
  X(DownBackward) X(DownWeightBackward) X(UpBackward) X(UpWeightBackward) X(BiasBackward) X(LayerForward) X(LayerBackward)
// clang-format on

#define INTARSIA_DECLARE(Op)                                                                                           \
  /** Checks every argument, then computes. Throws InvalidArgument or Unsupported before anything is written. */       \
  INTARSIA_EXPORT void run(const Op&, const Context& = {});                                                            \
  /** Empty when the operation can run, else the reason in words. */                                                   \
  INTARSIA_EXPORT std::string supports(const Op&, const Context& = {});                                                \
  /** Which backend, kernel and path `run` would take, and why not a faster one. Throws InvalidArgument as it does. */ \
  INTARSIA_EXPORT std::string explain(const Op&, const Context& = {});                                                 \
  /** Bytes that `run` asks of the allocator, at once, for its own use. */                                             \
  INTARSIA_EXPORT std::size_t workspace_bytes(const Op&, const Context& = {});
INTARSIA_FOR_EACH_OPERATION(INTARSIA_DECLARE)
#undef INTARSIA_DECLARE

/// Threads of the CPU backends: OMP_NUM_THREADS or the number of processors, until set. A result never depends on it.
INTARSIA_EXPORT int num_threads();
INTARSIA_EXPORT void set_num_threads(int threads);

/// Lends the library a host program's thread pool instead of its own, so that two pools never compete. `run` must call
/// body(context, worker) once for each worker in [0, workers), concurrently where it can, and return when all have ended.
/// `max_workers` says how many it would use now. Null pointers give the library its own pool back.
struct ThreadPool {
  int (*max_workers)() = nullptr;
  void (*run)(int workers, void (*body)(void* context, int worker), void* context) = nullptr;
};
INTARSIA_EXPORT void set_thread_pool(ThreadPool pool);

}  // namespace intarsia
