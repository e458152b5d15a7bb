// bias_backward: db_up[e] = grad_scale * sum dz;  db_down[e] = grad_scale * sum s * dy[row_token] (input: sum dy).
// dz (R, G*I) [gate, up], dy (T, H) or (R, H), db_up (E, G*I) in the order of gate_block, db_down (E, H).
// Parallel over (expert, panel of columns); inside, rows ascending. Experts without rows: zeros, or untouched when
// `accumulate`. No workspace. Verify: intarsia-ops verify bias_backward
#include <algorithm>

#include "base/parallel.h"
#include "base/rows.h"
#include "cpu/column_sums.h"
#include "cpu/cpu.h"

namespace intarsia::cpu {
namespace {

/// The score of a row, whichever form the scores have.
class RowScore {
 public:
  RowScore(const TensorView& scores, const TensorView& row_slot) : scores_(scores), slot_(list(row_slot)) {}
  float operator()(std::int64_t row) const {
    if (!scores_.defined()) return 1.0f;
    if (scores_.rank == 1) return scores_.as<const float>()[row * scores_.step(0)];
    return *at<const float>(scores_, slot_[row] / scores_.size(1), slot_[row] % scores_.size(1));
  }

 private:
  TensorView scores_;
  const std::int32_t* slot_;
};

template <class T, class Source, class Score, class Place>
void bias_gradient(const BiasBackward& op, const TensorView& db, std::int64_t step, Source&& source, Score&& score,
                   Place&& place, int workers) {
  const std::int64_t columns = db.size(1), panels = (columns + kSumColumns - 1) / kSumColumns;
  const std::int32_t* offsets = list(op.expert_offsets);
  const auto scale = static_cast<float>(op.grad_scale);
  parallel_for((op.expert_offsets.size(0) - 1) * panels, workers, [&](std::int64_t task, int) {
    const std::int64_t e = task / panels, column = task % panels * kSumColumns, n = std::min(kSumColumns, columns - column);
    if (op.accumulate && offsets[e] == offsets[e + 1]) return;
    float total[kSumColumns];
    sum_rows<T>(offsets[e], offsets[e + 1], step, n, [&](std::int64_t r) { return source(r) + column * step; }, score, total);
    dispatch_element(db.dtype, [&](auto tag) {
      using D = typename decltype(tag)::type;
      for (std::int64_t c = 0; c < n; ++c) {
        D& out = *at<D>(db, e, place(column + c));
        out = D(op.accumulate ? static_cast<float>(out) + scale * total[c] : scale * total[c]);
      }
    });
  });
}

void up_bias(const BiasBackward& op, int workers) {
  const std::int64_t width = op.db_up.size(1) / 2;
  const GateOrder order(op.gate_block, width);
  const auto place = [&](std::int64_t c) {
    if (op.gate_block == 0) return c;
    return c < width ? order.gate(c) : order.up(c - width);
  };
  dispatch_element(op.dz.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    bias_gradient<T>(
        op, op.db_up, op.dz.step(1), [&](std::int64_t r) { return op.dz.as<const T>() + r * op.dz.step(0); },
        [](std::int64_t) { return 1.0f; }, place, workers);
  });
}

void down_bias(const BiasBackward& op, int workers) {
  const std::int32_t* token = list(op.row_token);
  const RowScore score(op.score_on == ScorePlacement::input ? TensorView{} : op.scores, op.row_slot);
  dispatch_element(op.dy.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    bias_gradient<T>(
        op, op.db_down, op.dy.step(1),
        [&](std::int64_t r) { return op.dy.as<const T>() + (token ? token[r] : r) * op.dy.step(0); }, score,
        [](std::int64_t c) { return c; }, workers);
  });
}

}  // namespace

std::size_t workspace_bytes(const BiasBackward&, int) { return 0; }

void run(const BiasBackward& op, const Execution& execution) {
  if (op.db_up.defined()) up_bias(op, execution.workers);
  if (op.db_down.defined()) down_bias(op, execution.workers);
}

}  // namespace intarsia::cpu
