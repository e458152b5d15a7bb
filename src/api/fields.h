// The fields of every operation, once: names, direction and order. The torch schemas, the C API, the command line and the
// argument checks are all made from these lists, so a name is spelled in ops.h and here and nowhere else.
//
// A visitor has: in(name, TensorView&), optional_in, out, optional_out, inout, optional_inout (the same), and
// value(name, T&) for bool, std::int64_t, double and the enums.
#pragma once

#include "intarsia/moe.h"

namespace intarsia {

namespace detail {

// Weights are two tensors and two numbers, prefixed by the field's name: w_up, w_up_second, w_up_gate_block, w_up_transposed.
template <class V>
void weights_in(V& v, const char* name, const char* second, const char* gate_block, const char* transposed, Weights& w) {
  v.in(name, w.weight);
  if (second) v.optional_in(second, w.second);
  if (gate_block) v.value(gate_block, w.gate_block);
  v.value(transposed, w.transposed);
}

template <class V>
void weights_out(V& v, const char* name, const char* second, const char* gate_block, const char* transposed, Weights& w) {
  v.optional_out(name, w.weight);
  if (second) v.optional_out(second, w.second);
  if (gate_block) v.value(gate_block, w.gate_block);
  v.value(transposed, w.transposed);
}

template <class V>
void w_up_in(V& v, Weights& w) {
  weights_in(v, "w_up", "w_up_second", "w_up_gate_block", "w_up_transposed", w);
}
template <class V>
void w_down_in(V& v, Weights& w) {
  weights_in(v, "w_down", nullptr, nullptr, "w_down_transposed", w);
}
template <class V>
void dw_up_out(V& v, Weights& w) {
  weights_out(v, "dw_up", "dw_up_second", "dw_up_gate_block", "dw_up_transposed", w);
}
template <class V>
void dw_down_out(V& v, Weights& w) {
  weights_out(v, "dw_down", nullptr, nullptr, "dw_down_transposed", w);
}

}  // namespace detail

template <class V>
void fields(V& v, RouterLogits& o) {
  v.in("x", o.x);
  v.in("w_router", o.w_router);
  v.optional_in("bias", o.bias);
  v.out("logits", o.logits);
}

template <class V>
void fields(V& v, RouterLogitsBackward& o) {
  v.in("dlogits", o.dlogits);
  v.in("x", o.x);
  v.in("w_router", o.w_router);
  v.value("add_to_dx", o.add_to_dx);
  v.optional_out("dx", o.dx);
  v.optional_out("dw_router", o.dw_router);
  v.optional_out("dbias", o.dbias);
}

template <class V>
void fields(V& v, Route& o) {
  v.in("logits", o.logits);
  v.optional_in("expert_bias", o.expert_bias);
  v.optional_in("token_mask", o.token_mask);
  v.value("scores_kind", o.scores_kind);
  v.value("groups", o.groups);
  v.value("top_groups", o.top_groups);
  v.value("renormalise", o.renormalise);
  v.value("scale", o.scale);
  v.out("ids", o.ids);
  v.out("scores", o.scores);
  v.optional_out("raw_scores", o.raw_scores);
  v.optional_inout("nan_tokens", o.nan_tokens);
  v.optional_out("rounded_logits", o.rounded_logits);
}

template <class V>
void fields(V& v, RouteBackward& o) {
  v.in("dscores", o.dscores);
  v.in("scores", o.scores);
  v.optional_in("ids", o.ids);
  v.optional_in("raw_scores", o.raw_scores);
  v.optional_in("logits", o.logits);
  v.optional_in("expert_offsets", o.expert_offsets);
  v.optional_in("token_offsets", o.token_offsets);
  v.optional_in("token_rows", o.token_rows);
  v.value("scores_kind", o.scores_kind);
  v.value("renormalise", o.renormalise);
  v.value("scale", o.scale);
  v.out("dlogits", o.dlogits);
}

template <class V>
void fields(V& v, LoadBalanceLoss& o) {
  v.in("logits", o.logits);
  v.in("ids", o.ids);
  v.optional_in("token_mask", o.token_mask);
  v.value("scores_kind", o.scores_kind);
  v.value("normalisation", o.normalisation);
  v.out("loss", o.loss);
  v.out("expert_fraction", o.expert_fraction);
  v.out("valid_tokens", o.valid_tokens);
}

template <class V>
void fields(V& v, LoadBalanceLossBackward& o) {
  v.in("dloss", o.dloss);
  v.in("logits", o.logits);
  v.optional_in("token_mask", o.token_mask);
  v.in("expert_fraction", o.expert_fraction);
  v.in("valid_tokens", o.valid_tokens);
  v.value("experts_per_token", o.experts_per_token);
  v.value("scores_kind", o.scores_kind);
  v.value("normalisation", o.normalisation);
  v.out("dlogits", o.dlogits);
}

template <class V>
void fields(V& v, ZLoss& o) {
  v.in("logits", o.logits);
  v.optional_in("token_mask", o.token_mask);
  v.out("loss", o.loss);
  v.out("valid_tokens", o.valid_tokens);
}

template <class V>
void fields(V& v, ZLossBackward& o) {
  v.in("dloss", o.dloss);
  v.in("logits", o.logits);
  v.optional_in("token_mask", o.token_mask);
  v.in("valid_tokens", o.valid_tokens);
  v.out("dlogits", o.dlogits);
}

template <class V>
void fields(V& v, UpdateExpertBias& o) {
  v.in("counts", o.counts);
  v.value("rate", o.rate);
  v.inout("bias", o.bias);
}

template <class V>
void fields(V& v, BuildIndex& o) {
  v.in("ids", o.ids);
  v.optional_in("token_mask", o.token_mask);
  v.out("expert_offsets", o.expert_offsets);
  v.out("row_token", o.row_token);
  v.out("row_slot", o.row_slot);
  v.out("slot_row", o.slot_row);
  v.optional_out("expert_counts", o.expert_counts);
}

template <class V>
void fields(V& v, RoundTokens& o) {
  v.in("logits", o.logits);
  v.optional_in("token_mask", o.token_mask);
  v.value("experts_per_token", o.experts_per_token);
  v.value("tile", o.tile);
  v.value("rounding", o.rounding);
  v.value("seed", o.seed);
  v.out("expert_offsets", o.expert_offsets);
  v.out("row_token", o.row_token);
  v.out("row_slot", o.row_slot);
  v.out("token_offsets", o.token_offsets);
  v.out("token_rows", o.token_rows);
  v.out("row_score", o.row_score);
}

template <class V>
void fields(V& v, UpForward& o) {
  v.in("x", o.x);
  v.in("expert_offsets", o.expert_offsets);
  v.optional_in("row_token", o.row_token);
  detail::w_up_in(v, o.w_up);
  v.optional_in("b_up", o.b_up);
  v.optional_in("scores", o.scores);
  v.optional_in("row_slot", o.row_slot);
  v.value("activation", o.activation);
  v.value("score_on", o.score_on);
  v.optional_out("z", o.z);
  v.out("a", o.a);
}

template <class V>
void fields(V& v, DownForward& o) {
  v.in("a", o.a);
  v.in("expert_offsets", o.expert_offsets);
  detail::w_down_in(v, o.w_down);
  v.optional_in("b_down", o.b_down);
  v.optional_in("scores", o.scores);
  v.optional_in("row_slot", o.row_slot);
  v.value("score_on", o.score_on);
  v.out("rows", o.rows);
}

template <class V>
void fields(V& v, Combine& o) {
  v.in("rows", o.rows);
  v.optional_in("slot_row", o.slot_row);
  v.optional_in("token_offsets", o.token_offsets);
  v.optional_in("token_rows", o.token_rows);
  v.optional_in("scores", o.scores);
  v.optional_in("addend", o.addend);
  v.out("y", o.y);
}

template <class V>
void fields(V& v, DownBackward& o) {
  v.in("dy", o.dy);
  v.in("z", o.z);
  v.in("expert_offsets", o.expert_offsets);
  v.optional_in("row_token", o.row_token);
  detail::w_down_in(v, o.w_down);
  v.optional_in("b_down", o.b_down);
  v.optional_in("scores", o.scores);
  v.optional_in("row_slot", o.row_slot);
  v.value("activation", o.activation);
  v.value("score_on", o.score_on);
  v.out("dz", o.dz);
  v.optional_out("a_scaled", o.a_scaled);
  v.optional_out("dscores", o.dscores);
}

template <class V>
void fields(V& v, DownWeightBackward& o) {
  v.in("dy", o.dy);
  v.in("a_scaled", o.a_scaled);
  v.in("expert_offsets", o.expert_offsets);
  v.optional_in("row_token", o.row_token);
  v.value("accumulate", o.accumulate);
  v.value("grad_scale", o.grad_scale);
  detail::dw_down_out(v, o.dw_down);
}

template <class V>
void fields(V& v, UpBackward& o) {
  v.in("dz", o.dz);
  v.in("expert_offsets", o.expert_offsets);
  detail::w_up_in(v, o.w_up);
  v.out("dx_rows", o.dx_rows);
}

template <class V>
void fields(V& v, UpWeightBackward& o) {
  v.in("dz", o.dz);
  v.in("x", o.x);
  v.in("expert_offsets", o.expert_offsets);
  v.optional_in("row_token", o.row_token);
  v.value("accumulate", o.accumulate);
  v.value("grad_scale", o.grad_scale);
  detail::dw_up_out(v, o.dw_up);
}

template <class V>
void fields(V& v, BiasBackward& o) {
  v.optional_in("dz", o.dz);
  v.optional_in("dy", o.dy);
  v.in("expert_offsets", o.expert_offsets);
  v.optional_in("row_token", o.row_token);
  v.optional_in("scores", o.scores);
  v.optional_in("row_slot", o.row_slot);
  v.value("score_on", o.score_on);
  v.value("gate_block", o.gate_block);
  v.value("accumulate", o.accumulate);
  v.value("grad_scale", o.grad_scale);
  v.optional_out("db_up", o.db_up);
  v.optional_out("db_down", o.db_down);
}

template <class V>
void fields(V& v, LayerForward& o) {
  v.in("x", o.x);
  v.in("expert_offsets", o.expert_offsets);
  v.optional_in("row_token", o.row_token);
  v.optional_in("row_slot", o.row_slot);
  v.optional_in("slot_row", o.slot_row);
  v.optional_in("token_offsets", o.token_offsets);
  v.optional_in("token_rows", o.token_rows);
  v.optional_in("scores", o.scores);
  detail::w_up_in(v, o.w_up);
  detail::w_down_in(v, o.w_down);
  v.optional_in("b_up", o.b_up);
  v.optional_in("b_down", o.b_down);
  v.optional_in("addend", o.addend);
  v.value("activation", o.activation);
  v.value("score_on", o.score_on);
  v.optional_out("z", o.z);
  v.out("y", o.y);
}

template <class V>
void fields(V& v, LayerBackward& o) {
  v.in("dy", o.dy);
  v.in("x", o.x);
  v.in("expert_offsets", o.expert_offsets);
  v.optional_in("row_token", o.row_token);
  v.optional_in("row_slot", o.row_slot);
  v.optional_in("slot_row", o.slot_row);
  v.optional_in("token_offsets", o.token_offsets);
  v.optional_in("token_rows", o.token_rows);
  v.optional_in("scores", o.scores);
  detail::w_up_in(v, o.w_up);
  detail::w_down_in(v, o.w_down);
  v.optional_in("b_up", o.b_up);
  v.optional_in("b_down", o.b_down);
  v.optional_in("addend", o.addend);
  v.value("activation", o.activation);
  v.value("score_on", o.score_on);
  v.value("overwrite_z", o.overwrite_z);
  v.value("accumulate", o.accumulate);
  v.value("grad_scale", o.grad_scale);
  v.optional_inout("z", o.z);
  v.optional_out("dx", o.dx);
  v.optional_out("dscores", o.dscores);
  detail::dw_up_out(v, o.dw_up);
  detail::dw_down_out(v, o.dw_down);
  v.optional_out("db_up", o.db_up);
  v.optional_out("db_down", o.db_down);
}

template <class V>
void fields(V& v, MoeForward& o) {
  v.in("x", o.x);
  v.in("w_router", o.w_router);
  v.optional_in("b_router", o.b_router);
  v.optional_in("expert_bias", o.expert_bias);
  v.optional_in("token_mask", o.token_mask);
  detail::w_up_in(v, o.w_up);
  detail::w_down_in(v, o.w_down);
  v.optional_in("b_up", o.b_up);
  v.optional_in("b_down", o.b_down);
  v.optional_in("addend", o.addend);
  v.value("scores_kind", o.scores_kind);
  v.value("groups", o.groups);
  v.value("top_groups", o.top_groups);
  v.value("renormalise", o.renormalise);
  v.value("scale", o.scale);
  v.value("logits_dtype", o.logits_dtype);
  v.value("activation", o.activation);
  v.value("score_on", o.score_on);
  v.optional_out("logits", o.logits);
  v.optional_out("rounded_logits", o.rounded_logits);
  v.out("ids", o.ids);
  v.out("scores", o.scores);
  v.optional_out("raw_scores", o.raw_scores);
  v.optional_inout("nan_tokens", o.nan_tokens);
  v.out("expert_offsets", o.expert_offsets);
  v.out("row_token", o.row_token);
  v.out("row_slot", o.row_slot);
  v.out("slot_row", o.slot_row);
  v.optional_out("expert_counts", o.expert_counts);
  v.optional_out("z", o.z);
  v.out("y", o.y);
}

template <class V>
void fields(V& v, MoeBackward& o) {
  v.in("dy", o.dy);
  v.in("x", o.x);
  v.in("w_router", o.w_router);
  v.optional_in("b_router", o.b_router);
  v.optional_in("logits", o.logits);
  v.in("ids", o.ids);
  v.in("scores", o.scores);
  v.optional_in("raw_scores", o.raw_scores);
  v.in("expert_offsets", o.expert_offsets);
  v.in("row_token", o.row_token);
  v.in("row_slot", o.row_slot);
  v.in("slot_row", o.slot_row);
  detail::w_up_in(v, o.w_up);
  detail::w_down_in(v, o.w_down);
  v.optional_in("b_up", o.b_up);
  v.optional_in("b_down", o.b_down);
  v.value("scores_kind", o.scores_kind);
  v.value("renormalise", o.renormalise);
  v.value("scale", o.scale);
  v.value("logits_dtype", o.logits_dtype);
  v.value("dlogits_dtype", o.dlogits_dtype);
  v.value("activation", o.activation);
  v.value("score_on", o.score_on);
  v.value("overwrite_z", o.overwrite_z);
  v.optional_inout("z", o.z);
  v.optional_out("dx", o.dx);
  v.optional_out("dw_router", o.dw_router);
  v.optional_out("db_router", o.db_router);
  detail::dw_up_out(v, o.dw_up);
  detail::dw_down_out(v, o.dw_down);
  v.optional_out("db_up", o.db_up);
  v.optional_out("db_down", o.db_down);
}

}  // namespace intarsia
