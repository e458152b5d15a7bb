// Which rows a task works on: every expert's rows, or the part of them that belongs to a chunk of tokens, cut into blocks.
#pragma once

#include <cstdint>

#include "intarsia/types.h"

namespace intarsia::cpu {

/// Rows [first, first + count) of one expert.
struct RowBlock {
  std::int64_t expert, first, count;
};

/// The tasks of one parallel loop over (expert, block of rows). Lives in 3E + 1 int32 of the workspace.
class Segments {
 public:
  static constexpr std::int64_t entries(std::int64_t experts) { return 3 * experts + 1; }

  Segments(std::int32_t* memory, const TensorView& expert_offsets, std::int64_t block_rows);

  /// All rows.
  void take_all();
  /// The rows of the tokens below `end_token` that were not taken yet: chunks are taken in ascending order. Inside an expert
  /// rows ascend by token, so a chunk of tokens is one run of every expert's rows.
  void take_tokens(const std::int32_t* row_token, std::int64_t end_token);
  /// Before the first take_tokens.
  void restart();

  std::int64_t tasks() const { return first_task_[experts_]; }
  RowBlock block(std::int64_t task) const;

 private:
  void count_tasks();

  const std::int32_t* offsets_;
  std::int64_t experts_, block_rows_;
  std::int32_t *begin_, *end_, *first_task_;
};

}  // namespace intarsia::cpu
