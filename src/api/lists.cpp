#include "api/lists.h"

#include "base/rows.h"

namespace intarsia {
namespace {

bool readable(const TensorView& v) { return v.defined() && v.device.type == DeviceType::cpu; }

/// Rows in use: the last offset, when the host may read it.
std::int64_t used_rows(const TensorView& expert_offsets) { return list(expert_offsets)[expert_offsets.size(0) - 1]; }

void check_range(const Checker& c, const char* argument, const TensorView& v, std::int64_t count, std::int64_t limit,
                 const char* what) {
  const std::int32_t* values = list(v);
  for (std::int64_t i = 0; i < count; ++i)
    if (values[i] < 0 || values[i] >= limit)
      c.fail(argument, "expected values in [0, " + std::to_string(limit) + ") (" + what + "), got " +
                           std::to_string(values[i]) + " at row " + std::to_string(i) +
                           "; build the lists with build_index or round_tokens");
}

}  // namespace

void check_activations(const Checker& c, const char* argument, const TensorView& v, DType dtype) {
  if (v.defined() && v.dtype != dtype)
    c.fail(argument, "expected dtype " + std::string(to_string(dtype)) + " like the other activations and weights, got " +
                         std::string(to_string(v.dtype)) + "; convert it first");
}

void check_parameter_dtype(const Checker& c, const char* argument, const TensorView& v, DType dtype) {
  if (dtype == DType::float64) c.dtype(argument, v, {DType::float64});
  else if (dtype == DType::float32) c.dtype(argument, v, {DType::float32});
  else c.dtype(argument, v, {dtype, DType::float32});
}

void check_offsets(Checker& c, const TensorView& expert_offsets, std::int64_t rows) {
  const char* name = "expert_offsets";
  c.present(name, expert_offsets, "(E+1) int32, from build_index or round_tokens");
  c.shape(name, expert_offsets, {{'E', 1, 1}});
  c.dtype(name, expert_offsets, {DType::int32});
  c.contiguous(name, expert_offsets);
  c.require(c.bound('E') >= 1, name, "expected at least one expert");
  if (!readable(expert_offsets)) return;
  const std::int32_t* offsets = list(expert_offsets);
  c.require(offsets[0] == 0, name, "expected 0 first, got ", offsets[0]);
  for (std::int64_t e = 0; e < c.bound('E'); ++e)
    if (offsets[e] > offsets[e + 1])
      c.fail(name, "expected ascending offsets, got " + std::to_string(offsets[e]) + " then " + std::to_string(offsets[e + 1]) +
                       " at expert " + std::to_string(e));
  if (offsets[c.bound('E')] > rows)
    c.fail(name,
           "expected a last offset of at most " + std::to_string(rows) + " rows, got " + std::to_string(offsets[c.bound('E')]));
}

void check_row_token(Checker& c, const TensorView& row_token, const TensorView& expert_offsets, std::int64_t tokens) {
  if (!row_token.defined()) return;
  c.shape("row_token", row_token, {{'R'}});
  c.dtype("row_token", row_token, {DType::int32});
  c.contiguous("row_token", row_token);
  if (!readable(row_token)) return;
  check_range(c, "row_token", row_token, used_rows(expert_offsets), tokens, "tokens");
}

void check_scores(Checker& c, const char* argument, const TensorView& scores, const TensorView& row_slot,
                  const TensorView& expert_offsets, std::int64_t rows, DType dtype) {
  if (!scores.defined()) return;
  c.dtype(argument, scores, {score_dtype(dtype)});
  c.contiguous(argument, scores);
  if (scores.rank == 1) {
    c.capacity(argument, scores.size(0), rows, "one score per row");
    return;
  }
  c.shape(argument, scores, {{'T'}, {'K'}});
  c.present("row_slot", row_slot, "scores of shape (T, K) are read through it");
  c.require(row_slot.rank == 1 && row_slot.size(0) >= rows, "row_slot", "expected (R) with R = ", rows, ", got ", row_slot);
  c.dtype("row_slot", row_slot, {DType::int32});
  c.contiguous("row_slot", row_slot);
  if (readable(row_slot)) check_range(c, "row_slot", row_slot, used_rows(expert_offsets), scores.numel(), "slots of scores");
}

void check_dscores(Checker& c, const TensorView& dscores, const TensorView& scores) {
  if (!dscores.defined()) return;
  c.present("scores", scores, "dscores is their gradient");
  c.require(dscores.rank == scores.rank && dscores.shape == scores.shape, "dscores", "expected the shape of scores, ", scores,
            ", got ", dscores);
  c.dtype("dscores", dscores, {scores.dtype});
  c.contiguous("dscores", dscores);
  c.writable("dscores", dscores);
  c.distinct("dscores", dscores, "scores", scores);
}

void check_token_rows(const Checker& c, const TensorView& token_offsets, const TensorView& token_rows, std::int64_t rows) {
  if (!readable(token_offsets)) return;
  const std::int32_t* offsets = list(token_offsets);
  const std::int64_t tokens = token_offsets.size(0) - 1;
  c.require(offsets[0] == 0, "token_offsets", "expected 0 first, got ", offsets[0]);
  for (std::int64_t t = 0; t < tokens; ++t)
    if (offsets[t] > offsets[t + 1]) c.fail("token_offsets", "expected ascending offsets, at token " + std::to_string(t));
  if (offsets[tokens] > token_rows.size(0))
    c.fail("token_offsets", "expected a last offset of at most " + std::to_string(token_rows.size(0)) + ", got " +
                                std::to_string(offsets[tokens]));
  check_range(c, "token_rows", token_rows, offsets[tokens], rows, "rows");
}

void check_token_lists(Checker& c, const TensorView& slot_row, const TensorView& token_offsets, const TensorView& token_rows) {
  c.require(slot_row.defined() != token_offsets.defined(), "slot_row",
            "expected either slot_row or token_offsets with token_rows");
  const std::int64_t rows = c.bound('R');
  if (token_offsets.defined()) {
    c.shape("token_offsets", token_offsets, {{'T', 1, 1}});
    c.present("token_rows", token_rows, "it goes with token_offsets");
    c.require(token_rows.rank == 1, "token_rows", "expected (R), got ", token_rows);
    for (const auto& [name, v] : {std::pair{"token_offsets", token_offsets}, {"token_rows", token_rows}}) {
      c.dtype(name, v, {DType::int32});
      c.contiguous(name, v);
    }
    check_token_rows(c, token_offsets, token_rows, rows);
    return;
  }
  c.absent("token_rows", token_rows, "it goes with token_offsets");
  c.shape("slot_row", slot_row, {{'T'}, {'K'}});
  c.dtype("slot_row", slot_row, {DType::int32});
  c.contiguous("slot_row", slot_row);
  if (!readable(slot_row)) return;
  const std::int32_t* values = list(slot_row);
  for (std::int64_t i = 0; i < slot_row.numel(); ++i)
    if (values[i] < -1 || values[i] >= rows)
      c.fail("slot_row", "expected -1 or rows in [0, " + std::to_string(rows) + "), got " + std::to_string(values[i]) +
                             " at slot " + std::to_string(i));
}

void check_inverse(const Checker& c, const TensorView& expert_offsets, const TensorView& row_token, const TensorView& row_slot,
                   const TensorView& slot_row, const TensorView& token_offsets, const TensorView& token_rows) {
  if (!readable(expert_offsets)) return;
  const std::int32_t *offsets = list(expert_offsets), *tokens = list(row_token), *slots = list(row_slot);
  for (std::int64_t e = 0; e + 1 < expert_offsets.size(0); ++e)
    for (std::int64_t r = offsets[e] + 1; r < offsets[e + 1]; ++r)
      if (tokens[r - 1] > tokens[r])
        c.fail("row_token", "expected ascending tokens inside an expert, at row " + std::to_string(r));
  const bool csr = token_offsets.defined();
  const std::int32_t* inverse = csr ? list(token_rows) : list(slot_row);
  if (csr)
    for (std::int64_t t = 0; t + 1 < token_offsets.size(0); ++t)
      if (const std::int64_t n = list(token_offsets)[t + 1] - list(token_offsets)[t]; n >= expert_offsets.size(0))
        c.fail("token_offsets", "expected at most one row per expert and token, got " + std::to_string(n) + " rows for token " +
                                    std::to_string(t));
  const std::int64_t count = csr ? list(token_offsets)[token_offsets.size(0) - 1] : slot_row.numel();
  std::int64_t used = 0;
  for (std::int64_t i = 0; i < count; ++i) used += inverse[i] >= 0;
  if (used != used_rows(expert_offsets))
    c.fail(csr ? "token_rows" : "slot_row",
           "names " + std::to_string(used) + " rows where expert_offsets has " + std::to_string(used_rows(expert_offsets)));
  for (std::int64_t r = 0; r < used; ++r) {
    const std::int64_t slot = slots[r];
    const bool in_range = slot >= 0 && slot < count && inverse[slot] == r;
    const std::int64_t t = tokens[r];
    const bool of_token =
        in_range && (csr ? slot >= list(token_offsets)[t] && slot < list(token_offsets)[t + 1] : slot / slot_row.size(1) == t);
    if (!of_token)
      c.fail("row_slot", "is not the inverse of " + std::string(csr ? "token_rows" : "slot_row") + " at row " +
                             std::to_string(r) + "; build the lists with build_index or round_tokens");
  }
}

void check_left_rows(Checker& c, const char* argument, const TensorView& v, const TensorView& row_token) {
  c.present(argument, v, "(T, H), or (R, H) rows sorted by expert");
  if (row_token.defined()) c.shape(argument, v, {{'T'}, {'H'}});
  else c.shape(argument, v, {{'R'}, {'H'}});
}

void check_gate_block(const Checker& c, const char* argument, std::int64_t gate_block, std::int64_t factor,
                      std::int64_t width) {
  const std::string name = std::string(argument) + "_gate_block";
  c.require(gate_block >= 0, name, "expected 0 ([gate; up]) or the rows of a block, got ", gate_block);
  if (gate_block == 0) return;
  c.require(factor == 2, name, "must be 0 for a plain activation, got ", gate_block);
  c.require(width % gate_block == 0, name, "must divide I = ", width, ", got ", gate_block);
}

void check_weights(Checker& c, const char* argument, const Weights& w, char out_letter, std::int64_t factor, char in_letter) {
  const auto shape = [&](const char* name, const TensorView& v, std::int64_t n) {
    if (w.transposed) c.shape(name, v, {{'E'}, {in_letter}, {out_letter, n}});
    else c.shape(name, v, {{'E'}, {out_letter, n}, {in_letter}});
  };
  const std::string second = std::string(argument) + "_second";
  if (w.second.defined()) {
    c.require(factor == 2, second, "must be left out: the activation is not gated");
    c.require(w.gate_block == 0, second, "gate and up as two tensors have no gate_block; set it to 0");
    c.require(w.second.dtype == w.weight.dtype, second, "expected the dtype of ", argument);
    shape(argument, w.weight, 1);
    shape(second.c_str(), w.second, 1);
  } else {
    shape(argument, w.weight, factor);
  }
  if (w.defined()) check_gate_block(c, argument, w.gate_block, factor, c.bound(out_letter));
}

}  // namespace intarsia
