// Arguments of layer_forward and layer_backward.
#include "api/lists.h"
#include "api/validate.h"

namespace intarsia {
namespace {

/// What both passes share: x or dy first (binds T or R, and H), lists, scores, weights, biases.
template <class Layer>
void check_layer(Checker& c, const Layer& o, const char* left_name, const TensorView& left) {
  const std::int64_t g = gate_factor(o.activation);
  check_left_rows(c, left_name, left, o.row_token);
  c.dtype(left_name, left, {DType::float32, DType::bfloat16, DType::float16, DType::float64});
  const DType dtype = left.dtype;
  const bool tokens = o.row_token.defined();
  const std::int64_t rows = tokens ? o.row_token.size(0) : left.size(0);
  check_offsets(c, o.expert_offsets, rows);
  check_row_token(c, o.row_token, o.expert_offsets, left.size(0));
  if (tokens) {
    c.bind('R', rows, "row_token");
    c.present("scores", o.scores, "the token forms weigh each row");
    c.present("row_slot", o.row_slot, "(R), it goes with row_token");
    c.require(o.row_slot.rank == 1 && o.row_slot.size(0) == rows, "row_slot", "expected (R) with R = ", rows,
              " (row_token), got ", o.row_slot);
    check_token_lists(c, o.slot_row, o.token_offsets, o.token_rows);
    if (o.slot_row.defined()) c.require(o.scores.rank == 2, "scores", "expected (T, K) like slot_row, got ", o.scores);
    else c.require(o.scores.rank == 1, "scores", "expected one score per row, (R), with token_offsets, got ", o.scores);
    c.dtype("row_slot", o.row_slot, {DType::int32});
    c.contiguous("row_slot", o.row_slot);
    check_inverse(c, o.expert_offsets, o.row_token, o.row_slot, o.slot_row, o.token_offsets, o.token_rows);
  } else {
    for (const auto& [name, v] : {std::pair{"row_slot", o.row_slot},
                                  {"slot_row", o.slot_row},
                                  {"token_offsets", o.token_offsets},
                                  {"token_rows", o.token_rows},
                                  {"addend", o.addend}})
      c.absent(name, v, "it goes with row_token; without it x holds rows sorted by expert");
    c.require(o.scores.rank <= 1, "scores", "expected one score per row, (R), for sorted rows, got ", o.scores);
  }
  check_scores(c, "scores", o.scores, o.row_slot, o.expert_offsets, rows, dtype);
  c.present("w_up", o.w_up.weight, "(E, G*I, H)");
  check_weights(c, "w_up", o.w_up, 'I', g, 'H');
  check_activations(c, "w_up", o.w_up.weight, dtype);
  c.present("w_down", o.w_down.weight, "(E, H, I)");
  check_weights(c, "w_down", o.w_down, 'H', 1, 'I');
  check_activations(c, "w_down", o.w_down.weight, dtype);
  c.shape("b_up", o.b_up, {{'E'}, {'I', g}});
  check_parameter_dtype(c, "b_up", o.b_up, dtype);
  c.shape("b_down", o.b_down, {{'E'}, {'H'}});
  check_parameter_dtype(c, "b_down", o.b_down, dtype);
  if (o.score_on == ScorePlacement::input)
    c.absent("b_up", o.b_up,
             "score_on = \"input\" scales the product before the activation, where a bias has no defined place");
  c.shape("addend", o.addend, {{'T'}, {'H'}});
  check_activations(c, "addend", o.addend, dtype);
  c.shape("z", o.z, {{'R'}, {'I', g}});
  check_activations(c, "z", o.z, dtype);
  c.dense_rows("z", o.z);
}

void check_output_rows(Checker& c, const char* argument, const TensorView& v, const TensorView& row_token, DType dtype) {
  if (!v.defined()) return;
  check_left_rows(c, argument, v, row_token);
  check_activations(c, argument, v, dtype);
  c.dense_rows(argument, v);
  c.writable(argument, v);
}

}  // namespace

void validate(const LayerForward& o) {
  Checker c(LayerForward::kName);
  check_layer(c, o, "x", o.x);
  c.present("y", o.y, "the output");
  check_output_rows(c, "y", o.y, o.row_token, o.x.dtype);
  c.writable("z", o.z);
  c.distinct("y", o.y, "x", o.x);
  c.distinct("z", o.z, "x", o.x);
}

void validate(const LayerBackward& o) {
  Checker c(LayerBackward::kName);
  check_layer(c, o, "dy", o.dy);
  const DType dtype = o.dy.dtype;
  check_left_rows(c, "x", o.x, o.row_token);
  check_activations(c, "x", o.x, dtype);
  if (o.overwrite_z) {
    c.present("z", o.z, "overwrite_z needs it");
    c.writable("z", o.z);
  }
  check_output_rows(c, "dx", o.dx, o.row_token, dtype);
  c.distinct("dx", o.dx, "dy", o.dy);
  c.distinct("dx", o.dx, "x", o.x);
  check_dscores(c, o.dscores, o.scores);
  const std::int64_t g = gate_factor(o.activation);
  if (o.dw_up.defined()) check_weights(c, "dw_up", o.dw_up, 'I', g, 'H');
  if (o.dw_down.defined()) check_weights(c, "dw_down", o.dw_down, 'H', 1, 'I');
  c.shape("db_up", o.db_up, {{'E'}, {'I', g}});
  c.shape("db_down", o.db_down, {{'E'}, {'H'}});
  for (const auto& [name, v] : {std::pair{"dw_up", o.dw_up.weight},
                                {"dw_up_second", o.dw_up.second},
                                {"dw_down", o.dw_down.weight},
                                {"db_up", o.db_up},
                                {"db_down", o.db_down}}) {
    check_parameter_dtype(c, name, v, dtype);
    c.writable(name, v);
  }
  c.require(!o.addend.defined() || o.dx.defined(), "addend", "is part of dx, which is left out");
}

}  // namespace intarsia
