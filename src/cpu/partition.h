// A length (tokens, rows, experts) cut into blocks by its size alone, never by the number of workers: partial sums of the
// blocks, added in order, are the same on any machine.
#pragma once

#include <algorithm>
#include <cstdint>

namespace intarsia::cpu {

struct Partition {
  std::int64_t length, block, count;

  /// Blocks of `block_`, or longer ones where that would make more than `most` blocks.
  Partition(std::int64_t length_, std::int64_t block_, std::int64_t most = INT64_MAX)
      : length(length_),
        block(std::max<std::int64_t>({1, block_, (length_ - 1) / most + 1})),
        count((length + block - 1) / block) {}
  std::int64_t first(std::int64_t i) const { return i * block; }
  std::int64_t last(std::int64_t i) const { return std::min(length, (i + 1) * block); }
};

/// Blocks of tokens whose partial sums are kept in the workspace.
inline Partition sum_blocks(std::int64_t tokens) { return {tokens, 256, 64}; }

/// Blocks of tokens, each with a row of `width` elements, and nothing to be summed: some microseconds of work.
inline Partition row_blocks(std::int64_t tokens, std::int64_t width) {
  return {tokens, 16384 / std::max<std::int64_t>(1, width)};
}

}  // namespace intarsia::cpu
