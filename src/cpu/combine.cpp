// combine: y[t] = addend[t] + sum over the rows r of token t of s * rows[r], in slot order, in fp32, rounded once.
// rows (R, H), y (T, H); the rows of a token come from slot_row (T, K) with scores (T, K), or from the CSR pair with scores
// (R). Moves R*H + T*H elements (and T*H of the addend), each once. No workspace. Verify: intarsia-ops verify combine
#include "base/parallel.h"
#include "base/rows.h"
#include "cpu/combine_token.h"
#include "cpu/cpu.h"
#include "cpu/partition.h"

namespace intarsia::cpu {
namespace {

template <class T>
ScaledRow<T> scaled_row(const Combine& op, std::int64_t row, const float* score) {
  if (row < 0) return {};
  return {op.rows.as<const T>() + row * op.rows.step(0), score ? *score : 1.0f};
}

template <class T>
void combine_one(const Combine& op, std::int64_t t) {
  const bool scored = op.scores.defined();
  const auto sum = [&](std::int64_t terms, auto&& term) {
    const T* addend = op.addend.defined() ? op.addend.as<const T>() + t * op.addend.step(0) : nullptr;
    combine_token<T>(op.y.size(1), terms, term, op.rows.step(1), addend, addend ? op.addend.step(1) : 0,
                     op.y.as<T>() + t * op.y.step(0), op.y.step(1));
  };
  if (op.slot_row.defined()) {
    sum(op.slot_row.size(1), [&](std::int64_t k) {
      return scaled_row<T>(op, *at<const std::int32_t>(op.slot_row, t, k), scored ? at<const float>(op.scores, t, k) : nullptr);
    });
  } else {
    const std::int32_t first = list(op.token_offsets)[t], last = list(op.token_offsets)[t + 1];
    sum(last - first, [&](std::int64_t i) {
      const std::int64_t row = list(op.token_rows)[first + i];
      return scaled_row<T>(op, row, scored ? op.scores.as<const float>() + row * op.scores.step(0) : nullptr);
    });
  }
}

}  // namespace

std::size_t workspace_bytes(const Combine&, int) { return 0; }

void run(const Combine& op, const Execution& execution) {
  const Partition blocks = row_blocks(op.y.size(0), op.y.size(1));
  dispatch_element(op.y.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    parallel_for(blocks.count, execution.workers, [&](std::int64_t block, int) {
      for (std::int64_t t = blocks.first(block); t < blocks.last(block); ++t) combine_one<T>(op, t);
    });
  });
}

}  // namespace intarsia::cpu
