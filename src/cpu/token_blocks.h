// Tokens cut into blocks by their number alone, never by the number of workers: partial sums of the blocks, added in order,
// are the same on any machine.
#pragma once

#include <algorithm>
#include <cstdint>

namespace intarsia::cpu {

struct TokenBlocks {
  std::int64_t tokens, block, count;

  /// Blocks of `block_` tokens, or of more where that would make more than `most` blocks.
  TokenBlocks(std::int64_t tokens_, std::int64_t block_, std::int64_t most = INT64_MAX)
      : tokens(tokens_), block(std::max<std::int64_t>({1, block_, (tokens_ - 1) / most + 1})), count((tokens + block - 1) / block) {}
  std::int64_t first(std::int64_t i) const { return i * block; }
  std::int64_t last(std::int64_t i) const { return std::min(tokens, (i + 1) * block); }
};

/// Blocks whose partial sums are kept in the workspace.
inline TokenBlocks sum_blocks(std::int64_t tokens) { return {tokens, 256, 64}; }

/// Blocks of rows of `width` elements with nothing to be summed: about 16384 elements, a few microseconds of work.
inline TokenBlocks row_blocks(std::int64_t tokens, std::int64_t width) { return {tokens, 16384 / std::max<std::int64_t>(1, width)}; }

}  // namespace intarsia::cpu
