#include "cpu/token_chunks.h"

#include <algorithm>
#include <string>

#include "base/parallel.h"
#include "base/rows.h"

namespace intarsia::cpu {

TokenChunk TokenLists::chunk(std::int64_t token, std::int64_t chunk_rows) const {
  TokenChunk chunk{token, token, first_slot(token)};
  if (!token_offsets) {
    chunk.end_token = std::min(tokens, token + chunk_rows / slots_per_token);
    return chunk;
  }
  const std::int32_t* last = std::upper_bound(token_offsets + token, token_offsets + tokens + 1, chunk.first_slot + chunk_rows);
  chunk.end_token = last - token_offsets - 1;
  if (chunk.end_token == token)
    throw InvalidArgument("token_offsets: token " + std::to_string(token) + " has more than " + std::to_string(chunk_rows) +
                          " rows, more than there are experts; build the lists with round_tokens");
  return chunk;
}

namespace {

template <class T>
void combine_chunk_token(const ChunkCombine& c, const TokenChunk& chunk, std::int64_t t) {
  const std::int64_t first = c.lists.first_slot(t), terms = c.lists.first_slot(t + 1) - first;
  const T* addend = c.addend.defined() ? c.addend.as<const T>() + t * c.addend.step(0) : nullptr;
  const auto term = [&](std::int64_t i) -> ScaledRow<T> {
    const std::int64_t slot = first + i, row = c.lists.row_of_slot(slot);
    if (row < 0) return {};
    const float* scores = c.scores.defined() ? c.scores.as<const float>() : nullptr;
    return {c.rows.as<const T>() + (slot - chunk.first_slot) * c.rows.step(0),
            scores ? scores[c.scores.rank == 1 ? row : slot] : 1.0f};
  };
  combine_token<T>(c.y.size(1), terms, term, c.rows.step(1), addend, addend ? c.addend.step(1) : 0,
                   c.y.as<T>() + t * c.y.step(0), c.y.step(1));
}

}  // namespace

void ChunkCombine::run(const TokenChunk& chunk, int workers) const {
  const std::int64_t block = std::max<std::int64_t>(1, 16384 / y.size(1));  // 64 KiB of y in fp32
  const std::int64_t tokens = chunk.end_token - chunk.first_token;
  dispatch_element(y.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    parallel_for((tokens + block - 1) / block, workers, [&](std::int64_t task, int) {
      const std::int64_t first = chunk.first_token + task * block;
      for (std::int64_t t = first; t < std::min(chunk.end_token, first + block); ++t) combine_chunk_token<T>(*this, chunk, t);
    });
  });
}

}  // namespace intarsia::cpu
