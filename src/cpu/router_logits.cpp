// router_logits: logits = x w_router^T + bias.   x (T, H), w_router (E, H), bias (E), logits (T, E).
// router_logits_backward: dx = dlogits w_router, dw_router = dlogits^T x, dbias = column sums of dlogits.
// One product for each block of tokens and panel of columns, fp32 sums, one rounding; where two operands differ in dtype the
// narrow one is widened. A token whose dlogits are all zero takes no part in dw_router, whatever its x holds: a NaN token
// touches no weight. dw_router: splits of tokens, numbered by size alone, added in order.
// Verify: intarsia-ops verify router_logits, intarsia-ops verify router_logits_backward
#include "base/parallel.h"
#include "base/rows.h"
#include "cpu/column_sums.h"
#include "cpu/cpu.h"
#include "cpu/gemm.h"
#include "cpu/partition.h"
#include "cpu/row_io.h"
#include "cpu/workspace.h"

namespace intarsia::cpu {
namespace {

constexpr std::int64_t kRows = 256, kColumns = 512, kDepth = 256;  // most of one product, and of one widened tile's depth

/// A worker's tiles, sized to stay in its second-level cache.
struct Tiles {
  WorkerRows<float> c, left, right;
  WorkerRows<std::byte> gemm;

  Tiles(Workspace& workspace, int workers)
      : c(workspace, workers, kRows * kColumns),
        left(workspace, workers, kRows * kDepth),
        right(workspace, workers, kDepth * kColumns),
        gemm(workspace, workers, kGemmScratchBytes) {}
};

struct Operand {
  DType dtype;
  Matrix matrix;

  /// The view's element (i, j) becomes this operand's first; `transposed` exchanges the axes.
  Operand(const TensorView& v, std::int64_t i, std::int64_t j, bool transposed)
      : dtype(v.dtype),
        matrix{
            static_cast<const std::byte*>(v.data) + (i * v.step(0) + j * v.step(1)) * static_cast<std::int64_t>(size_of(dtype)),
            transposed ? v.step(1) : v.step(0), transposed ? v.step(0) : v.step(1)} {}
  Operand(const float* rows, std::int64_t row_step) : dtype(DType::float32), matrix{rows, row_step, 1} {}

  Operand from(std::int64_t i, std::int64_t j) const {
    Operand moved = *this;
    moved.matrix.data = static_cast<const std::byte*>(matrix.data) +
                        (i * matrix.row_step + j * matrix.column_step) * static_cast<std::int64_t>(size_of(dtype));
    return moved;
  }
};

/// The first (rows, columns) elements as fp32: where they lie, or widened into `memory`.
Operand widened(const Operand& x, std::int64_t rows, std::int64_t columns, float* memory) {
  return dispatch_element(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (std::is_same_v<T, float>) return x;
    for (std::int64_t i = 0; i < rows; ++i)
      widen(static_cast<const T*>(x.matrix.data) + i * x.matrix.row_step, x.matrix.column_step, columns, memory + i * columns);
    return Operand(memory, columns);
  });
}

/// The worker's c (m, n) = left (m, k) right (k, n), or += when `accumulate`; m <= kRows, n <= kColumns.
void multiply(const Tiles& tiles, int worker, std::int64_t m, std::int64_t n, std::int64_t k, const Operand& left,
              const Operand& right, bool accumulate) {
  float* const c = tiles.c(worker);
  if (left.dtype == right.dtype)
    return gemm(left.dtype, m, n, k, left.matrix, right.matrix, c, kColumns, accumulate, tiles.gemm(worker));
  for (std::int64_t p = 0; p < k; p += kDepth) {
    const std::int64_t depth = std::min(kDepth, k - p);
    const Operand a = widened(left.from(0, p), m, depth, tiles.left(worker));
    const Operand b = widened(right.from(p, 0), depth, n, tiles.right(worker));
    gemm(DType::float32, m, n, depth, a.matrix, b.matrix, c, kColumns, accumulate || p > 0, tiles.gemm(worker));
  }
}

/// Blocks of tokens: enough of them for many threads, none too small for a product.
Partition product_blocks(std::int64_t tokens) { return {tokens, std::clamp<std::int64_t>(padded(tokens / 64), 32, kRows)}; }

/// out = left w, or out += left w, block by block; `bias` (columns) may be null.
void multiply_rows(const Tiles& tiles, int workers, const TensorView& left, const TensorView& w, bool w_transposed,
                   const float* bias, bool accumulate, const TensorView& out) {
  const Partition blocks = product_blocks(out.size(0)), panels(out.size(1), kColumns);
  parallel_for(blocks.count * panels.count, workers, [&](std::int64_t task, int worker) {
    const std::int64_t t = blocks.first(task / panels.count), column = panels.first(task % panels.count);
    const std::int64_t m = blocks.last(task / panels.count) - t, n = panels.last(task % panels.count) - column;
    const Operand right(w, w_transposed ? column : 0, w_transposed ? 0 : column, w_transposed);
    for (std::int64_t i = 0; i < m && accumulate; ++i) widen_row(out, t + i, column, n, tiles.c(worker) + i * kColumns);
    multiply(tiles, worker, m, n, left.size(1), Operand(left, t, 0, false), right, accumulate);
    for (std::int64_t i = 0; i < m; ++i) {
      float* const row = tiles.c(worker) + i * kColumns;
      if (bias) add_scaled(1.0f, bias + column, 1, n, row);
      narrow_row(row, out, t + i, column, n);
    }
  });
}

/// How dw_router (E, H) is cut: tiles of it, and so many splits of the tokens that there is work for 64 threads.
struct WeightCut {
  Partition experts, columns, tokens;
  explicit WeightCut(const RouterLogitsBackward& op)
      : experts(op.dlogits.size(1), kRows),
        columns(op.x.size(1), kColumns),
        tokens(op.x.size(0), 2048, std::max<std::int64_t>(1, 64 / std::max<std::int64_t>(1, experts.count * columns.count))) {}
  std::int64_t splits() const { return std::max<std::int64_t>(1, tokens.count); }
};

struct BackwardScratch {
  Tiles tiles;
  WeightCut cut;
  Partition bias_blocks;
  float *weight_sums, *bias_sums;  // (splits, E, H), (blocks, E)

  BackwardScratch(Workspace& workspace, const RouterLogitsBackward& op, int workers)
      : tiles(workspace, workers),
        cut(op),
        bias_blocks(sum_blocks(op.dlogits.size(0))),
        weight_sums(workspace.take<float>(op.dw_router.defined() ? cut.splits() * op.dw_router.numel() : 0)),
        bias_sums(workspace.take<float>(op.dbias.defined() ? bias_blocks.count * op.dbias.numel() : 0)) {}
};

/// x[t .. t + depth, h .. h + n], with zeros for the tokens whose dlogits are zero for the experts e .. e + m.
Operand contributing_rows(const RouterLogitsBackward& op, std::int64_t t, std::int64_t depth, std::int64_t e, std::int64_t m,
                          std::int64_t h, std::int64_t n, float* memory) {
  float dlogits[kRows];
  bool zero[kDepth], any = false;
  for (std::int64_t i = 0; i < depth; ++i) {
    widen_row(op.dlogits, t + i, e, m, dlogits);
    zero[i] = std::all_of(dlogits, dlogits + m, [](float value) { return value == 0.0f; });
    any = any || zero[i];
  }
  if (!any) return Operand(op.x, t, h, false);
  for (std::int64_t i = 0; i < depth; ++i) {
    if (zero[i]) std::fill_n(memory + i * n, n, 0.0f);
    else widen_row(op.x, t + i, h, n, memory + i * n);
  }
  return Operand(memory, n);
}

void weight_backward(const RouterLogitsBackward& op, const BackwardScratch& s, int workers) {
  const Partition &experts = s.cut.experts, &columns = s.cut.columns, &tokens = s.cut.tokens;
  const std::int64_t hidden = op.x.size(1), plane = op.dw_router.numel(), splits = s.cut.splits();
  parallel_for(splits * experts.count * columns.count, workers, [&](std::int64_t task, int worker) {
    const std::int64_t split = task % splits, tile = task / splits;
    const std::int64_t e = experts.first(tile / columns.count), m = experts.last(tile / columns.count) - e;
    const std::int64_t h = columns.first(tile % columns.count), n = columns.last(tile % columns.count) - h;
    float* const c = s.tiles.c(worker);
    std::fill_n(c, m * kColumns, 0.0f);
    for (std::int64_t t = tokens.first(split); t < tokens.last(split); t += kDepth) {
      const std::int64_t depth = std::min(kDepth, tokens.last(split) - t);
      const Operand right = contributing_rows(op, t, depth, e, m, h, n, s.tiles.right(worker));
      multiply(s.tiles, worker, m, n, depth, Operand(op.dlogits, t, e, true), right, true);
    }
    for (std::int64_t i = 0; i < m; ++i) std::copy_n(c + i * kColumns, n, s.weight_sums + split * plane + (e + i) * hidden + h);
  });
  parallel_for(op.dw_router.size(0), workers, [&](std::int64_t e, int) {
    float* const row = s.weight_sums + e * hidden;
    for (std::int64_t split = 1; split < splits; ++split) add_scaled(1.0f, row + split * plane, 1, hidden, row);
    narrow_row(row, op.dw_router, e, 0, hidden);
  });
}

void bias_backward(const RouterLogitsBackward& op, const BackwardScratch& s, int workers) {
  const std::int64_t experts = op.dlogits.size(1);
  const Partition blocks = s.bias_blocks, panels(experts, kSumColumns);
  dispatch_element(op.dlogits.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    parallel_for(blocks.count * panels.count, workers, [&](std::int64_t task, int) {
      const std::int64_t block = task / panels.count, e = panels.first(task % panels.count);
      sum_rows<T>(
          blocks.first(block), blocks.last(block), op.dlogits.step(1), panels.last(task % panels.count) - e,
          [&](std::int64_t t) { return at<const T>(op.dlogits, t, e); }, [](std::int64_t) { return 1.0f; },
          s.bias_sums + block * experts + e);
    });
  });
  dispatch_element(op.dbias.dtype, [&](auto tag) {
    using D = typename decltype(tag)::type;
    for (std::int64_t e = 0; e < experts; ++e) {
      float sum = 0.0f;
      for (std::int64_t block = 0; block < blocks.count; ++block) sum += s.bias_sums[block * experts + e];
      op.dbias.as<D>()[e * op.dbias.step(0)] = D(sum);
    }
  });
}

struct ForwardScratch {
  Tiles tiles;
  float* bias;

  ForwardScratch(Workspace& workspace, const RouterLogits& op, int workers)
      : tiles(workspace, workers), bias(op.bias.defined() ? workspace.take<float>(op.bias.size(0)) : nullptr) {}
};

}  // namespace

std::size_t workspace_bytes(const RouterLogits& op, int workers) {
  Workspace workspace;
  const ForwardScratch scratch(workspace, op, workers);
  return workspace.bytes();
}

std::size_t workspace_bytes(const RouterLogitsBackward& op, int workers) {
  Workspace workspace;
  const BackwardScratch scratch(workspace, op, workers);
  return workspace.bytes();
}

void run(const RouterLogits& op, const Execution& execution) {
  Workspace workspace(execution.workspace);
  const ForwardScratch s(workspace, op, execution.workers);
  if (op.bias.defined()) {
    dispatch_element(op.bias.dtype, [&](auto tag) {
      widen(op.bias.as<const typename decltype(tag)::type>(), op.bias.step(0), op.bias.size(0), s.bias);
    });
  }
  multiply_rows(s.tiles, execution.workers, op.x, op.w_router, true, s.bias, false, op.logits);
}

void run(const RouterLogitsBackward& op, const Execution& execution) {
  Workspace workspace(execution.workspace);
  const BackwardScratch s(workspace, op, execution.workers);
  if (op.dx.defined()) multiply_rows(s.tiles, execution.workers, op.dlogits, op.w_router, false, nullptr, op.add_to_dx, op.dx);
  if (op.dw_router.defined()) weight_backward(op, s, execution.workers);
  if (op.dbias.defined()) bias_backward(op, s, execution.workers);
}

}  // namespace intarsia::cpu
