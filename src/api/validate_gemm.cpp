// Arguments of the six GEMM operations, the bias gradient and combine.
#include <algorithm>
#include <utility>
#include "api/lists.h"
#include "api/validate.h"

namespace intarsia {
namespace {

void check_float(const Checker& c, const char* argument, const TensorView& v) {
  c.dtype(argument, v, {DType::float32, DType::bfloat16, DType::float16, DType::float64});
}

/// A buffer of rows that this library writes and reads: (R, width), unit stride along a row.
void check_rows(Checker& c, const char* argument, const TensorView& v, Axis width, DType dtype, bool output) {
  if (!v.defined()) return;
  c.shape(argument, v, {{'R'}, width});
  check_activations(c, argument, v, dtype);
  c.dense_rows(argument, v);
  if (output) c.writable(argument, v);
}

void check_weight_operand(Checker& c, const char* argument, const Weights& w, char out, std::int64_t factor, char in,
                          DType dtype) {
  c.present(argument, w.weight, "(E, out, in) expert weights");
  check_weights(c, argument, w, out, factor, in);
  check_activations(c, argument, w.weight, dtype);
}

void check_weight_gradient(Checker& c, const char* argument, const Weights& w, char out, std::int64_t factor, char in,
                           DType dtype) {
  c.present(argument, w.weight, "the gradient to write");
  check_weights(c, argument, w, out, factor, in);
  check_parameter_dtype(c, argument, w.weight, dtype);
  c.writable(argument, w.weight);
  c.writable(argument, w.second);
}

void check_bias(Checker& c, const char* argument, const TensorView& b, Axis width, DType dtype) {
  c.shape(argument, b, {{'E'}, width});
  check_parameter_dtype(c, argument, b, dtype);
}

void check_input_placement(const Checker& c, ScorePlacement score_on, const TensorView& b_up) {
  if (score_on == ScorePlacement::input)
    c.absent("b_up", b_up, "score_on = \"input\" scales the product before the activation, where a bias has no defined place");
}

}  // namespace

void validate(const UpForward& o) {
  Checker c(UpForward::kName);
  const std::int64_t g = gate_factor(o.activation);
  check_left_rows(c, "x", o.x, o.row_token);
  check_float(c, "x", o.x);
  const DType dtype = o.x.dtype;
  const std::int64_t rows = o.row_token.defined() ? o.row_token.size(0) : o.x.size(0);
  check_offsets(c, o.expert_offsets, rows);
  check_row_token(c, o.row_token, o.expert_offsets, o.x.size(0));
  check_weight_operand(c, "w_up", o.w_up, 'I', g, 'H', dtype);
  check_bias(c, "b_up", o.b_up, {'I', g}, dtype);
  check_input_placement(c, o.score_on, o.b_up);
  check_scores(c, "scores", o.scores, o.row_slot, o.expert_offsets, rows, dtype);
  check_rows(c, "z", o.z, {'I', g}, dtype, true);
  c.present("a", o.a, "(R, I)");
  check_rows(c, "a", o.a, {'I'}, dtype, true);
  c.distinct("a", o.a, "z", o.z);
  c.distinct("a", o.a, "x", o.x);
}

void validate(const DownForward& o) {
  Checker c(DownForward::kName);
  c.present("a", o.a, "(R, I)");
  check_float(c, "a", o.a);
  const DType dtype = o.a.dtype;
  check_rows(c, "a", o.a, {'I'}, dtype, false);
  check_offsets(c, o.expert_offsets, o.a.size(0));
  check_weight_operand(c, "w_down", o.w_down, 'H', 1, 'I', dtype);
  check_bias(c, "b_down", o.b_down, {'H'}, dtype);
  check_scores(c, "scores", o.scores, o.row_slot, o.expert_offsets, o.a.size(0), dtype);
  c.present("rows", o.rows, "(R, H)");
  check_rows(c, "rows", o.rows, {'H'}, dtype, true);
  c.distinct("rows", o.rows, "a", o.a);
}

void validate(const Combine& o) {
  Checker c(Combine::kName);
  c.present("rows", o.rows, "(R, H)");
  check_float(c, "rows", o.rows);
  const DType dtype = o.rows.dtype;
  check_rows(c, "rows", o.rows, {'H'}, dtype, false);
  c.present("y", o.y, "(T, H)");
  c.shape("y", o.y, {{'T'}, {'H'}});
  check_activations(c, "y", o.y, dtype);
  c.dense_rows("y", o.y);
  c.writable("y", o.y);
  c.shape("addend", o.addend, {{'T'}, {'H'}});
  check_activations(c, "addend", o.addend, dtype);
  check_token_lists(c, o.slot_row, o.token_offsets, o.token_rows);
  if (o.scores.defined()) {
    c.dtype("scores", o.scores, {score_dtype(dtype)});
    c.contiguous("scores", o.scores);
    if (o.slot_row.defined()) c.shape("scores", o.scores, {{'T'}, {'K'}});
    else c.shape("scores", o.scores, {{'R'}});
  }
  c.distinct("y", o.y, "rows", o.rows);
}

void validate(const DownBackward& o) {
  Checker c(DownBackward::kName);
  const std::int64_t g = gate_factor(o.activation);
  check_left_rows(c, "dy", o.dy, o.row_token);
  check_float(c, "dy", o.dy);
  const DType dtype = o.dy.dtype;
  c.present("z", o.z, "(R, G*I)");
  const std::int64_t rows = o.z.size(0);
  check_offsets(c, o.expert_offsets, rows);
  check_row_token(c, o.row_token, o.expert_offsets, o.dy.size(0));
  check_rows(c, "z", o.z, {'I', g}, dtype, false);
  check_weight_operand(c, "w_down", o.w_down, 'H', 1, 'I', dtype);
  check_bias(c, "b_down", o.b_down, {'H'}, dtype);
  check_scores(c, "scores", o.scores, o.row_slot, o.expert_offsets, rows, dtype);
  c.present("dz", o.dz, "(R, G*I)");
  check_rows(c, "dz", o.dz, {'I', g}, dtype, true);
  check_rows(c, "a_scaled", o.a_scaled, {'I'}, dtype, true);
  check_dscores(c, o.dscores, o.scores);
  c.distinct("dz", o.dz, "dy", o.dy);
  c.distinct("a_scaled", o.a_scaled, "dz", o.dz);
}

void validate(const DownWeightBackward& o) {
  Checker c(DownWeightBackward::kName);
  check_left_rows(c, "dy", o.dy, o.row_token);
  check_float(c, "dy", o.dy);
  c.present("a_scaled", o.a_scaled, "(R, I)");
  check_rows(c, "a_scaled", o.a_scaled, {'I'}, o.dy.dtype, false);
  check_offsets(c, o.expert_offsets, o.a_scaled.size(0));
  check_row_token(c, o.row_token, o.expert_offsets, o.dy.size(0));
  check_weight_gradient(c, "dw_down", o.dw_down, 'H', 1, 'I', o.dy.dtype);
}

void validate(const UpBackward& o) {
  Checker c(UpBackward::kName);
  c.present("dz", o.dz, "(R, G*I)");
  check_float(c, "dz", o.dz);
  c.present("w_up", o.w_up.weight, "(E, G*I, H)");
  // G is not an argument: with two tensors it is 2, else the product over the whole out axis is the same either way.
  const std::int64_t g = o.w_up.second.defined() || o.w_up.gate_block > 0 ? 2 : 1;
  check_rows(c, "dz", o.dz, {'I', g}, o.dz.dtype, false);
  check_offsets(c, o.expert_offsets, o.dz.size(0));
  check_weight_operand(c, "w_up", o.w_up, 'I', g, 'H', o.dz.dtype);
  c.present("dx_rows", o.dx_rows, "(R, H)");
  check_rows(c, "dx_rows", o.dx_rows, {'H'}, o.dz.dtype, true);
  c.distinct("dx_rows", o.dx_rows, "dz", o.dz);
}

void validate(const UpWeightBackward& o) {
  Checker c(UpWeightBackward::kName);
  const std::int64_t g = o.dw_up.second.defined() || o.dw_up.gate_block > 0 ? 2 : 1;
  check_left_rows(c, "x", o.x, o.row_token);
  check_float(c, "x", o.x);
  c.present("dz", o.dz, "(R, G*I)");
  check_rows(c, "dz", o.dz, {'I', g}, o.x.dtype, false);
  check_offsets(c, o.expert_offsets, o.dz.size(0));
  check_row_token(c, o.row_token, o.expert_offsets, o.x.size(0));
  check_weight_gradient(c, "dw_up", o.dw_up, 'I', g, 'H', o.x.dtype);
}

void validate(const BiasBackward& o) {
  Checker c(BiasBackward::kName);
  c.require(o.db_up.defined() || o.db_down.defined(), "db_up", "or db_down must be given");
  if (o.db_up.defined()) c.present("dz", o.dz, "db_up is its column sum");
  if (o.db_down.defined()) c.present("dy", o.dy, "db_down is its column sum");
  const DType dtype = o.dz.defined() ? o.dz.dtype : o.dy.dtype;
  std::int64_t rows = 0;
  if (o.dz.defined()) {
    check_float(c, "dz", o.dz);
    check_rows(c, "dz", o.dz, {'I'}, dtype, false);
    rows = o.dz.size(0);
  }
  if (o.dy.defined()) {
    check_left_rows(c, "dy", o.dy, o.row_token);
    check_activations(c, "dy", o.dy, dtype);
    if (!o.dz.defined()) rows = o.row_token.defined() ? o.row_token.size(0) : o.dy.size(0);
  }
  check_offsets(c, o.expert_offsets, rows);
  if (o.dy.defined()) check_row_token(c, o.row_token, o.expert_offsets, o.dy.size(0));
  check_scores(c, "scores", o.scores, o.row_slot, o.expert_offsets, rows, dtype);
  check_bias(c, "db_up", o.db_up, {'I'}, dtype);
  check_bias(c, "db_down", o.db_down, {'H'}, dtype);
  if (o.gate_block > 0 && o.dz.defined())
    c.require(c.bound('I') % (2 * o.gate_block) == 0, "gate_block", "must divide I, got ", o.gate_block);
  c.writable("db_up", o.db_up);
  c.writable("db_down", o.db_down);
}

}  // namespace intarsia
