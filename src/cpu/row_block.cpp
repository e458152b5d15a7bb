#include "cpu/row_block.h"

#include <algorithm>

#include "base/rows.h"
#include "cpu/gemm.h"

namespace intarsia::cpu {

Segments::Segments(std::int32_t* memory, const TensorView& expert_offsets, std::int64_t block_rows)
    : offsets_(list(expert_offsets)),
      experts_(expert_offsets.size(0) - 1),
      block_rows_(block_rows),
      begin_(memory),
      end_(memory + experts_),
      first_task_(memory + 2 * experts_) {}

void Segments::take_all() {
  std::copy_n(offsets_, experts_, begin_);
  std::copy_n(offsets_ + 1, experts_, end_);
  count_tasks();
}

void Segments::restart() { std::copy_n(offsets_, experts_, end_); }

void Segments::take_tokens(const std::int32_t* row_token, std::int64_t end_token) {
  for (std::int64_t e = 0; e < experts_; ++e) {
    begin_[e] = end_[e];
    const std::int32_t* end = std::lower_bound(row_token + begin_[e], row_token + offsets_[e + 1], end_token);
    end_[e] = static_cast<std::int32_t>(end - row_token);
  }
  count_tasks();
}

void Segments::count_tasks() {
  first_task_[0] = 0;
  for (std::int64_t e = 0; e < experts_; ++e) {
    const std::int64_t rows = end_[e] - begin_[e];
    first_task_[e + 1] = static_cast<std::int32_t>(first_task_[e] + (rows + block_rows_ - 1) / block_rows_);
  }
}

RowBlock Segments::block(std::int64_t task) const {
  const std::int64_t e = std::upper_bound(first_task_, first_task_ + experts_, task) - first_task_ - 1;
  const std::int64_t rows = end_[e] - begin_[e], blocks = first_task_[e + 1] - first_task_[e];
  // Blocks of about equal size instead of full ones and a rest.
  const std::int64_t size = padded((rows + blocks - 1) / blocks), start = (task - first_task_[e]) * size;
  return {e, begin_[e] + start, std::clamp<std::int64_t>(rows - start, 0, size)};
}

}  // namespace intarsia::cpu
