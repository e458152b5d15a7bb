// Arguments of the router's operations, the losses and the index lists.
#include <algorithm>
#include <utility>
#include "api/lists.h"
#include "api/validate.h"
#include "base/softmax.h"

namespace intarsia {
namespace {

DType check_logits(Checker& c, const TensorView& logits) {
  c.present("logits", logits, "(T, E)");
  c.shape("logits", logits, {{'T'}, {'E'}});
  c.dtype("logits", logits, {DType::float32, DType::bfloat16, DType::float16, DType::float64});
  c.require(c.bound('E') >= 1 && c.bound('E') <= kMaxExperts, "logits", "expected 1 to 4096 experts, got ", c.bound('E'));
  return score_dtype(logits.dtype);
}

void check_choices(const Checker& c) {
  const std::int64_t k = c.bound('K'), e = c.bound('E');
  c.require(k >= 1 && k <= kMaxChoices && k <= e, "K", "expected 1 to min(64, E = ", e, ") experts per token, got ", k);
}

void check_mask(Checker& c, const TensorView& mask) {
  c.shape("token_mask", mask, {{'T'}});
  c.dtype("token_mask", mask, {DType::boolean});
}

void check_ids(Checker& c, const TensorView& ids) {
  c.present("ids", ids, "(T, K)");
  c.shape("ids", ids, {{'T'}, {'K'}});
  c.dtype("ids", ids, {DType::int32, DType::int64});
  c.contiguous("ids", ids);
}

void check_plain(Checker& c, const char* name, const TensorView& v, std::initializer_list<Axis> axes, DType dtype) {
  c.shape(name, v, axes);
  c.dtype(name, v, {dtype});
  c.contiguous(name, v);
}

void check_scalar(Checker& c, const char* name, const TensorView& v, DType dtype) {
  c.present(name, v, "(1)");
  check_plain(c, name, v, {{0, 1, 1}}, dtype);
}

void check_dlogits(Checker& c, const TensorView& dlogits, const TensorView& logits) {
  c.present("dlogits", dlogits, "(T, E)");
  c.shape("dlogits", dlogits, {{'T'}, {'E'}});
  if (logits.defined()) c.dtype("dlogits", dlogits, {score_dtype(logits.dtype), logits.dtype});
  else c.dtype("dlogits", dlogits, {DType::float32, DType::bfloat16, DType::float16, DType::float64});
  c.dense_rows("dlogits", dlogits);
  c.writable("dlogits", dlogits);
}

void check_row_list(Checker& c, const char* name, const TensorView& v, std::int64_t least, DType dtype, const char* what) {
  c.present(name, v, what);
  c.shape(name, v, {{'R'}});
  c.dtype(name, v, {dtype});
  c.contiguous(name, v);
  c.capacity(name, v.size(0), least, what);
}

}  // namespace

void validate(const RouterLogits& o) {
  Checker c(RouterLogits::kName);
  c.present("x", o.x, "(T, H)");
  c.shape("x", o.x, {{'T'}, {'H'}});
  c.dtype("x", o.x, {DType::float32, DType::bfloat16, DType::float16, DType::float64});
  c.present("w_router", o.w_router, "(E, H)");
  c.shape("w_router", o.w_router, {{'E'}, {'H'}});
  check_parameter_dtype(c, "w_router", o.w_router, o.x.dtype);
  c.shape("bias", o.bias, {{'E'}});
  check_parameter_dtype(c, "bias", o.bias, o.x.dtype);
  c.present("logits", o.logits, "(T, E)");
  c.shape("logits", o.logits, {{'T'}, {'E'}});
  check_parameter_dtype(c, "logits", o.logits, o.x.dtype);
  c.dense_rows("logits", o.logits);
  c.writable("logits", o.logits);
}

void validate(const RouterLogitsBackward& o) {
  Checker c(RouterLogitsBackward::kName);
  c.present("x", o.x, "(T, H)");
  c.shape("x", o.x, {{'T'}, {'H'}});
  c.dtype("x", o.x, {DType::float32, DType::bfloat16, DType::float16, DType::float64});
  c.present("w_router", o.w_router, "(E, H)");
  c.shape("w_router", o.w_router, {{'E'}, {'H'}});
  check_parameter_dtype(c, "w_router", o.w_router, o.x.dtype);
  c.present("dlogits", o.dlogits, "(T, E)");
  c.shape("dlogits", o.dlogits, {{'T'}, {'E'}});
  check_parameter_dtype(c, "dlogits", o.dlogits, o.x.dtype);
  c.shape("dx", o.dx, {{'T'}, {'H'}});
  check_activations(c, "dx", o.dx, o.x.dtype);
  c.dense_rows("dx", o.dx);
  c.shape("dw_router", o.dw_router, {{'E'}, {'H'}});
  c.dtype("dw_router", o.dw_router, {o.w_router.dtype, score_dtype(o.x.dtype)});
  c.dense_rows("dw_router", o.dw_router);
  c.shape("dbias", o.dbias, {{'E'}});
  check_parameter_dtype(c, "dbias", o.dbias, o.x.dtype);
  for (const auto& [name, v] : {std::pair{"dx", o.dx}, {"dw_router", o.dw_router}, {"dbias", o.dbias}}) c.writable(name, v);
}

void validate(const Route& o) {
  Checker c(Route::kName);
  const DType scores = check_logits(c, o.logits);
  check_mask(c, o.token_mask);
  check_ids(c, o.ids);
  check_choices(c);
  c.present("scores", o.scores, "(T, K)");
  check_plain(c, "scores", o.scores, {{'T'}, {'K'}}, scores);
  check_plain(c, "raw_scores", o.raw_scores, {{'T'}, {'K'}}, scores);
  check_plain(c, "nan_tokens", o.nan_tokens, {{0, 1, 1}}, DType::int32);
  c.shape("rounded_logits", o.rounded_logits, {{'T'}, {'E'}});
  c.dtype("rounded_logits", o.rounded_logits, {DType::bfloat16, DType::float16});
  c.contiguous("rounded_logits", o.rounded_logits);
  c.distinct("rounded_logits", o.rounded_logits, "logits", o.logits);
  if (o.logits.dtype != DType::float32) c.absent("rounded_logits", o.rounded_logits, "only float32 logits are rounded");
  if (o.scores_kind != RouterScores::sigmoid_group) {
    c.absent("expert_bias", o.expert_bias, "only sigmoid_group chooses with a correction bias");
    return;
  }
  check_plain(c, "expert_bias", o.expert_bias, {{'E'}}, scores);
  const std::int64_t e = c.bound('E'), k = c.bound('K');
  c.require(o.groups >= 1 && e % o.groups == 0, "groups", "must divide E = ", e, ", got ", o.groups);
  c.require(o.top_groups >= 1 && o.top_groups <= o.groups, "top_groups", "expected 1 to groups = ", o.groups, ", got ",
            o.top_groups);
  c.require(k <= o.top_groups * (e / o.groups), "K",
            "expected at most top_groups * E / groups = ", o.top_groups * (e / o.groups), " experts per token, got ", k);
}

void validate(const RouteBackward& o) {
  Checker c(RouteBackward::kName);
  c.present("dlogits", o.dlogits, "(T, E)");
  c.shape("dlogits", o.dlogits, {{'T'}, {'E'}});
  c.shape("logits", o.logits, {{'T'}, {'E'}});
  check_dlogits(c, o.dlogits, o.logits);
  c.distinct("dlogits", o.dlogits, "logits", o.logits);
  c.require(c.bound('E') <= kMaxExperts, "dlogits", "expected at most 4096 experts, got ", c.bound('E'));
  const DType scores = score_dtype(o.scores.dtype);
  c.present("scores", o.scores, "(T, K) or (R)");
  c.present("dscores", o.dscores, "like scores");
  if (o.scores_kind == RouterScores::softmax) c.present("logits", o.logits, "softmax's gradient is dense over E");
  if (o.ids.defined()) {
    check_ids(c, o.ids);
    check_plain(c, "scores", o.scores, {{'T'}, {'K'}}, scores);
    check_plain(c, "dscores", o.dscores, {{'T'}, {'K'}}, scores);
    if (o.scores_kind == RouterScores::sigmoid_group)
      c.present("raw_scores", o.raw_scores, "sigmoid_group's backward needs them");
    check_plain(c, "raw_scores", o.raw_scores, {{'T'}, {'K'}}, scores);
    return;
  }
  c.require(o.scores_kind == RouterScores::softmax, "ids", "is missing: only softmax has a form without ids (token rounding)");
  check_plain(c, "scores", o.scores, {{'R'}}, scores);
  check_plain(c, "dscores", o.dscores, {{'R'}}, scores);
  check_offsets(c, o.expert_offsets, c.bound('R'));
  c.present("token_offsets", o.token_offsets, "(T+1), from round_tokens");
  check_plain(c, "token_offsets", o.token_offsets, {{'T', 1, 1}}, DType::int32);
  c.present("token_rows", o.token_rows, "(R), from round_tokens");
  check_plain(c, "token_rows", o.token_rows, {{'R'}}, DType::int32);
  check_token_rows(c, o.token_offsets, o.token_rows, c.bound('R'));
}

void validate(const LoadBalanceLoss& o) {
  Checker c(LoadBalanceLoss::kName);
  const DType scores = check_logits(c, o.logits);
  check_ids(c, o.ids);
  check_mask(c, o.token_mask);
  check_scalar(c, "loss", o.loss, scores);
  c.present("expert_fraction", o.expert_fraction, "(E)");
  check_plain(c, "expert_fraction", o.expert_fraction, {{'E'}}, scores);
  check_scalar(c, "valid_tokens", o.valid_tokens, scores);
}

void validate(const LoadBalanceLossBackward& o) {
  Checker c(LoadBalanceLossBackward::kName);
  const DType scores = check_logits(c, o.logits);
  check_mask(c, o.token_mask);
  check_scalar(c, "dloss", o.dloss, scores);
  c.present("expert_fraction", o.expert_fraction, "(E), from load_balance_loss");
  check_plain(c, "expert_fraction", o.expert_fraction, {{'E'}}, scores);
  check_scalar(c, "valid_tokens", o.valid_tokens, scores);
  c.require(o.experts_per_token >= 1, "experts_per_token", "must be at least 1, got ", o.experts_per_token);
  check_dlogits(c, o.dlogits, o.logits);
}

void validate(const ZLoss& o) {
  Checker c(ZLoss::kName);
  const DType scores = check_logits(c, o.logits);
  check_mask(c, o.token_mask);
  check_scalar(c, "loss", o.loss, scores);
  check_scalar(c, "valid_tokens", o.valid_tokens, scores);
}

void validate(const ZLossBackward& o) {
  Checker c(ZLossBackward::kName);
  const DType scores = check_logits(c, o.logits);
  check_mask(c, o.token_mask);
  check_scalar(c, "dloss", o.dloss, scores);
  check_scalar(c, "valid_tokens", o.valid_tokens, scores);
  check_dlogits(c, o.dlogits, o.logits);
}

void validate(const UpdateExpertBias& o) {
  Checker c(UpdateExpertBias::kName);
  c.present("counts", o.counts, "(E)");
  c.shape("counts", o.counts, {{'E'}});
  c.dtype("counts", o.counts, {DType::int32, DType::int64, DType::float32, DType::float64});
  c.contiguous("counts", o.counts);
  c.present("bias", o.bias, "(E)");
  c.shape("bias", o.bias, {{'E'}});
  c.dtype("bias", o.bias, {DType::float32, DType::float64});
  c.contiguous("bias", o.bias);
  c.writable("bias", o.bias);
}

void validate(const BuildIndex& o) {
  Checker c(BuildIndex::kName);
  check_ids(c, o.ids);
  check_mask(c, o.token_mask);
  const std::int64_t slots = o.ids.numel();
  c.require(slots < (std::int64_t{1} << 31), "ids", "expected T*K below 2^31, got ", slots, "; split the batch");
  c.present("expert_offsets", o.expert_offsets, "(E+1)");
  check_plain(c, "expert_offsets", o.expert_offsets, {{'E', 1, 1}}, DType::int32);
  c.require(c.bound('E') >= 1, "expert_offsets", "expected at least one expert");
  check_row_list(c, "row_token", o.row_token, slots, DType::int32, "T*K");
  check_row_list(c, "row_slot", o.row_slot, slots, DType::int32, "T*K");
  c.present("slot_row", o.slot_row, "(T, K)");
  check_plain(c, "slot_row", o.slot_row, {{'T'}, {'K'}}, DType::int32);
  check_plain(c, "expert_counts", o.expert_counts, {{'E'}}, DType::int32);
}

void validate(const RoundTokens& o) {
  Checker c(RoundTokens::kName);
  const DType scores = check_logits(c, o.logits);
  check_mask(c, o.token_mask);
  const std::int64_t t = c.bound('T'), e = c.bound('E'), k = o.experts_per_token;
  c.require(k >= 1 && k <= kMaxChoices && k <= e, "experts_per_token", "expected 1 to min(64, E = ", e, "), got ", k);
  c.require(o.tile >= 1, "tile", "must be at least 1, got ", o.tile);
  c.present("expert_offsets", o.expert_offsets, "(E+1)");
  check_plain(c, "expert_offsets", o.expert_offsets, {{'E', 1, 1}}, DType::int32);
  const std::int64_t rows = std::min(t * k + e * (o.tile - 1), t * e);
  c.require(rows < (std::int64_t{1} << 31), "logits", "T*K + E*(tile-1) must be below 2^31, got ", rows, "; split the batch");
  const char* what = "min(T*K + E*(tile-1), T*E)";
  check_row_list(c, "row_token", o.row_token, rows, DType::int32, what);
  check_row_list(c, "row_slot", o.row_slot, rows, DType::int32, what);
  check_row_list(c, "token_rows", o.token_rows, rows, DType::int32, what);
  check_row_list(c, "row_score", o.row_score, rows, scores, what);
  c.present("token_offsets", o.token_offsets, "(T+1)");
  check_plain(c, "token_offsets", o.token_offsets, {{'T', 1, 1}}, DType::int32);
}

}  // namespace intarsia
