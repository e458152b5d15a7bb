// The parallel loop of the row operations: blocks of every expert's rows, in a workspace of segments and one scratch per
// worker.
#pragma once

#include "base/parallel.h"
#include "base/rows.h"
#include "cpu/blocks.h"
#include "cpu/workspace.h"

namespace intarsia::cpu {

/// What a row operation needs, from its sizes.
class BlockLoop {
 public:
  BlockLoop(const TensorView& expert_offsets, std::int64_t hidden, std::int64_t width, Activation activation, DType dtype)
      : offsets_(expert_offsets),
        blocking_(cpu_blocking({.hidden = hidden,
                                .width = width,
                                .experts = expert_offsets.size(0) - 1,
                                .dtype = dtype,
                                .activation = activation})) {}

  std::size_t workspace_bytes(int workers) const {
    Workspace space;
    space.take<std::int32_t>(blocking_.segment_entries);
    space.take<std::byte>(workers * static_cast<std::int64_t>(blocking_.scratch_bytes));
    return space.bytes();
  }

  /// body(block, scratch) for every block of rows.
  template <class Body>
  void run(const Execution& execution, Body&& body) const {
    Workspace space(execution.workspace);
    Segments segments(space.take<std::int32_t>(blocking_.segment_entries), offsets_, blocking_.block_rows);
    auto* memory = space.take<std::byte>(0);
    segments.take_all();
    parallel_for(segments.tasks(), execution.workers,
                 [&](std::int64_t task, int worker) { body(segments.block(task), Scratch(memory, blocking_, worker)); });
  }

  /// Rows in use, over all experts.
  std::int64_t used_rows() const { return list(offsets_)[offsets_.size(0) - 1]; }

 private:
  TensorView offsets_;
  CpuBlocking blocking_;
};

}  // namespace intarsia::cpu
