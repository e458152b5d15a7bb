// Parallel over (expert, tile of its gradient). A task reads all rows of its expert in blocks of kGradientDepth, in order, sums
// in fp32 scratch and rounds once, so the result depends neither on the threads nor on the tiles.
#include "cpu/weight_gradient.h"

#include <algorithm>
#include <cstring>

#include "base/parallel.h"
#include "base/rows.h"
#include "cpu/blocks.h"
#include "cpu/gemm.h"
#include "cpu/row_io.h"
#include "cpu/workspace.h"

namespace intarsia::cpu {
namespace {

std::int64_t tiles(std::int64_t length, std::int64_t tile) { return (length + tile - 1) / tile; }

/// How the gradient of one expert is cut into tasks. An expert with a large share of all rows is cut finer, so that one busy
/// expert occupies all threads.
struct Grid {
  std::int64_t out_tile, in_tile, out_tiles, in_tiles;

  Grid(std::int64_t out, std::int64_t in, std::int64_t rows, std::int64_t all_rows) {
    constexpr std::int64_t kTasks = 24, kSmallest = 64;
    const std::int64_t wanted = all_rows > 0 ? (rows * kTasks + all_rows - 1) / all_rows : 1;
    out_tile = kGradientOut;
    in_tile = kGradientIn;
    while (tiles(out, out_tile) * tiles(in, in_tile) < wanted && std::max(out_tile, in_tile) > kSmallest)
      (in_tile > out_tile ? in_tile : out_tile) /= 2;
    out_tiles = tiles(out, out_tile);
    in_tiles = tiles(in, in_tile);
  }
  std::int64_t tasks() const { return out_tiles * in_tiles; }
};

/// A rectangle of dw: columns of left and of right.
struct Tile {
  std::int64_t first_out, outs, first_in, ins;
};

/// Columns of listed rows as a contiguous (padded(count), n) matrix; the padding is zeros, which add nothing to a sum over
/// rows.
void gather_columns(const ListedRows& from, std::int64_t first_row, std::int64_t count, std::int64_t column, std::int64_t n,
                    std::byte* to) {
  TensorView part = from.rows;
  part.data = static_cast<std::byte*>(part.data) + column * part.step(1) * static_cast<std::int64_t>(size_of(part.dtype));
  part.shape[1] = n;
  gather(part, from.row_token, {.expert = 0, .first = first_row, .count = count}, to);
}

/// sum (outs, ins), or its transpose (ins, outs), which is what a transposed weight is written from.
void sum_rows(const WeightGradient& g, std::int64_t first, std::int64_t last, const Tile& t, bool transposed,
              const Scratch& scratch) {
  for (std::int64_t row = first; row < last; row += kGradientDepth) {
    const std::int64_t count = std::min(kGradientDepth, last - row), depth = padded(count);
    gather_columns(g.left, row, count, t.first_out, t.outs, scratch.left);
    gather_columns(g.right, row, count, t.first_in, t.ins, scratch.right);
    const DType dtype = g.left.rows.dtype;
    if (transposed)
      gemm(dtype, t.ins, t.outs, depth, {scratch.right, 1, t.ins}, {scratch.left, t.outs, 1}, scratch.product, t.outs,
           row > first, scratch.packing);
    else
      gemm(dtype, t.outs, t.ins, depth, {scratch.left, 1, t.outs}, {scratch.right, t.ins, 1}, scratch.product, t.ins,
           row > first, scratch.packing);
  }
}

/// Rounds a run of sums into a run of dw.
template <class D>
void store_run(const WeightGradient& g, float* sums, std::int64_t n, D* out, std::int64_t step) {
  const auto scale = static_cast<float>(g.grad_scale);
  float run[kProductColumns];
  if (g.accumulate) widen(out, step, n, run);
  else std::fill_n(run, n, 0.0f);
  add_scaled(scale, sums, 1, n, run);
  narrow(run, n, out, step);
}

/// Runs of the out axis, [gate, up], that lie at one stride in the caller's tensor: body(first, n, tensor, place, step).
template <class Body>
void for_each_run(const WeightGradient& g, std::int64_t first, std::int64_t count, std::int64_t width, Body&& body) {
  const GateOrder order(g.dw.gate_block, width);
  for (std::int64_t i = first; i < first + count;) {
    const std::int64_t half_end = !g.gated || i >= width ? first + count : std::min(first + count, width);
    const std::int64_t gate = g.gated && i >= width ? i - width : i;
    if (!g.gated || g.dw.second.defined()) {
      body(i, half_end - i, gate == i ? g.dw.weight : g.dw.second, gate, 1);
      i = half_end;
      continue;
    }
    const std::int64_t place = i < width ? order.gate(gate) : order.up(gate);
    const std::int64_t n = order.block == 1 ? half_end - i : std::min(half_end - i, order.block - gate % order.block);
    body(i, n, g.dw.weight, place, order.block == 1 ? 2 : 1);
    i += n;
  }
}

void store_tile(const WeightGradient& g, std::int64_t expert, const Tile& t, std::int64_t width, bool transposed, float* sums) {
  dispatch_element(g.dw.weight.dtype, [&](auto tag) {
    using D = typename decltype(tag)::type;
    for_each_run(g, t.first_out, t.outs, width,
                 [&](std::int64_t out, std::int64_t n, const TensorView& tensor, std::int64_t place, std::int64_t stride) {
                   const WeightMatrix w = expert_weight(tensor, g.dw.transposed, expert);
                   D* corner = reinterpret_cast<D*>(w.data) + place * w.out_step + t.first_in * w.in_step;
                   float* first = sums + (out - t.first_out) * (transposed ? 1 : t.ins);
                   if (transposed)
                     for (std::int64_t j = 0; j < t.ins; ++j)
                       store_run(g, first + j * t.outs, n, corner + j * w.in_step, stride * w.out_step);
                   else
                     for (std::int64_t i = 0; i < n; ++i)
                       store_run(g, first + i * t.ins, t.ins, corner + i * stride * w.out_step, w.in_step);
                 });
  });
}

CpuBlocking blocking_of(const WeightGradient& g) {
  return cpu_blocking({.hidden = 1, .width = 1, .experts = g.expert_offsets.size(0) - 1, .dtype = g.left.rows.dtype});
}

}  // namespace

void weight_gradient(const WeightGradient& g, const CpuBlocking& blocking, std::int32_t* segments, std::byte* memory,
                     int workers) {
  const std::int32_t* offsets = list(g.expert_offsets);
  const std::int64_t experts = g.expert_offsets.size(0) - 1, out = g.left.rows.size(1), in = g.right.rows.size(1);
  const auto rows = [&](std::int64_t e) { return std::int64_t{offsets[e + 1]} - offsets[e]; };
  const auto grid = [&](std::int64_t e) { return Grid(out, in, rows(e), offsets[experts]); };
  segments[0] = 0;
  for (std::int64_t e = 0; e < experts; ++e) {
    const bool untouched = g.accumulate && rows(e) == 0;
    segments[e + 1] = static_cast<std::int32_t>(segments[e] + (untouched ? 0 : grid(e).tasks()));
  }
  const bool transposed = std::abs(expert_weight(g.dw.weight, g.dw.transposed, 0).out_step) <
                          std::abs(expert_weight(g.dw.weight, g.dw.transposed, 0).in_step);
  parallel_for(segments[experts], workers, [&](std::int64_t task, int worker) {
    const Scratch scratch(memory, blocking, worker);
    const std::int64_t e = std::upper_bound(segments, segments + experts, task) - segments - 1;
    const Grid cut = grid(e);
    const std::int64_t place = task - segments[e], i = place % cut.out_tiles * cut.out_tile,
                       j = place / cut.out_tiles * cut.in_tile;
    const Tile tile{i, std::min(cut.out_tile, out - i), j, std::min(cut.in_tile, in - j)};
    if (rows(e) == 0) std::fill_n(scratch.product, tile.outs * tile.ins, 0.0f);
    else sum_rows(g, offsets[e], offsets[e + 1], tile, transposed, scratch);
    store_tile(g, e, tile, g.gated ? out / 2 : out, transposed, scratch.product);
  });
}

std::size_t weight_gradient_bytes(const WeightGradient& g, int workers) {
  const CpuBlocking blocking = blocking_of(g);
  Workspace space;
  space.take<std::int32_t>(blocking.segment_entries);
  space.take<std::byte>(workers * static_cast<std::int64_t>(blocking.scratch_bytes));
  return space.bytes();
}

void weight_gradient(const WeightGradient& g, const Execution& execution) {
  const CpuBlocking blocking = blocking_of(g);
  Workspace space(execution.workspace);
  auto* segments = space.take<std::int32_t>(blocking.segment_entries);
  weight_gradient(g, blocking, segments, space.take<std::byte>(0), execution.workers);
}

}  // namespace intarsia::cpu
