// Checks shared by the operations that read index lists, scores, weights and biases.
#pragma once

#include "api/check.h"
#include "intarsia/ops.h"

namespace intarsia {

/// float32, or float64 when the call's activations are float64: routing scores, statistics, losses.
inline DType score_dtype(DType x) { return x == DType::float64 ? DType::float64 : DType::float32; }

void check_activations(const Checker& c, const char* argument, const TensorView& v, DType dtype);
/// dtype of the activations, or fp32.
void check_parameter_dtype(const Checker& c, const char* argument, const TensorView& v, DType dtype);

/// expert_offsets (E+1): int32, contiguous; on the CPU 0 = first <= ... <= last <= rows.
void check_offsets(Checker& c, const TensorView& expert_offsets, std::int64_t rows);
/// row_token (R): on the CPU ids of rows below expert_offsets[E] in [0, tokens).
void check_row_token(Checker& c, const TensorView& row_token, const TensorView& expert_offsets, std::int64_t tokens);
/// scores (T, K) with row_slot, or (R); row_slot entries in range on the CPU.
void check_scores(Checker& c, const char* argument, const TensorView& scores, const TensorView& row_slot,
                  const TensorView& expert_offsets, std::int64_t rows, DType dtype);
/// dscores: like scores, contiguous.
void check_dscores(Checker& c, const TensorView& dscores, const TensorView& scores);
/// Exactly one of slot_row (T, K) and the CSR pair; on the CPU their entries name rows below R.
void check_token_lists(Checker& c, const TensorView& slot_row, const TensorView& token_offsets, const TensorView& token_rows);
/// On the CPU: token_offsets ascending from 0 to at most `rows`, token_rows below `rows`.
void check_token_rows(const Checker& c, const TensorView& token_offsets, const TensorView& token_rows, std::int64_t rows);
/// On the CPU: row_token ascends inside an expert, and row_slot is the inverse of slot_row or of the CSR pair.
void check_inverse(const Checker& c, const TensorView& expert_offsets, const TensorView& row_token, const TensorView& row_slot,
                   const TensorView& slot_row, const TensorView& token_offsets, const TensorView& token_rows);

/// The rows of x or dy: (T, H) with row_token, (R, H) without. Returns the row count of that tensor.
void check_left_rows(Checker& c, const char* argument, const TensorView& v, const TensorView& row_token);

/// A weight or its gradient: `out_letter` times `factor` by `in_letter`; two tensors when `second` is there.
void check_weights(Checker& c, const char* argument, const Weights& w, char out_letter, std::int64_t factor, char in_letter);
void check_gate_block(const Checker& c, const char* argument, std::int64_t gate_block, std::int64_t factor, std::int64_t width);

}  // namespace intarsia
