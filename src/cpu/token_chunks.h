// The layer's walk over chunks of tokens. A chunk has a buffer with one row for each slot of its tokens; row r of the lists
// lives at row_slot[r] minus the chunk's first slot, so the sum of a token reads neighbouring rows in slot order. With CSR
// lists a slot is a position in token_rows, and everything else is the same.
#pragma once

#include <cstdint>

#include "base/rows.h"
#include "cpu/combine_token.h"
#include "intarsia/ops.h"

namespace intarsia::cpu {

/// Tokens [first_token, end_token) and their slots.
struct TokenChunk {
  std::int64_t first_token, end_token, first_slot;
};

/// The lists by which rows and tokens find each other, of layer_forward or layer_backward.
struct TokenLists {
  const std::int32_t *row_token, *row_slot, *slot_row, *token_offsets, *token_rows;
  std::int64_t tokens, slots_per_token;

  template <class Layer>
  TokenLists(const Layer& op, std::int64_t tokens_)
      : row_token(list(op.row_token)),
        row_slot(list(op.row_slot)),
        slot_row(list(op.slot_row)),
        token_offsets(list(op.token_offsets)),
        token_rows(list(op.token_rows)),
        tokens(tokens_),
        slots_per_token(op.slot_row.defined() ? op.slot_row.size(1) : 0) {}

  std::int64_t first_slot(std::int64_t token) const { return token_offsets ? token_offsets[token] : token * slots_per_token; }
  std::int64_t row_of_slot(std::int64_t slot) const { return token_offsets ? token_rows[slot] : slot_row[slot]; }

  /// The chunk that starts at `token`, of at most `chunk_rows` slots.
  TokenChunk chunk(std::int64_t token, std::int64_t chunk_rows) const;
};

/// y[t] = addend[t] + sum of s * rows over the slots of t, for the tokens of a chunk. Without scores s = 1.
struct ChunkCombine {
  const TokenLists& lists;
  TensorView rows;    // of the chunk
  TensorView scores;  // ? per slot (T, K), or per row with CSR lists
  TensorView addend;  // ? (T, H)
  TensorView y;       // (T, H)

  void run(const TokenChunk& chunk, int workers) const;
};

}  // namespace intarsia::cpu
