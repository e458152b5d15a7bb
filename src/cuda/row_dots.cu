// ds[r] = sum over n tiles of parts[tile, r] + <dy[row_token[r]], b_down[e]>, stored where the row's score lies.
// Reads 4 R ceil(I / 128) bytes, and 2 R H more with a bias; a thread a row, or a warp a row with a bias.
#include "cuda/row_dots.h"

#include "cuda/expert_rows.h"
#include "cuda/expert_weights.h"
#include "cuda/gemm_launch.h"

namespace intarsia::cuda {
namespace {

constexpr int kThreads = 256;

template <class T, class S>
struct RowDots {
  ExpertRows rows;
  SourceRows<T> dy;
  int hidden;
  ExpertBias<T> bias;
  ScoreOfRow<S> score;
  const S* parts;
  int n_parts;
  S* dscores;
};

/// The expert that row r belongs to.
__device__ int expert_of(const ExpertRows& rows, int r) {
  int low = 0, high = rows.experts - 1;
  while (low < high) {  // the first expert that ends after r
    const int middle = (low + high) / 2;
    if (rows.offset(middle + 1) > r) high = middle;
    else low = middle + 1;
  }
  return low;
}

/// <dy, b_down> of row r, the same in all lanes.
template <class T, class S>
__device__ S bias_dot(const RowDots<T, S>& p, int r, int lane) {
  const int expert = expert_of(p.rows, r), source = p.dy.find(r);
  S dot = S(0);
  if (source >= 0)
    for (int h = lane; h < p.hidden; h += 32) dot += S(*p.dy.at(source, h)) * p.bias.template at<S>(expert, h);
  for (int step = 16; step > 0; step /= 2) dot += __shfl_xor_sync(0xffffffffu, dot, step);
  return dot;
}

template <class T, class S>
__global__ void __launch_bounds__(kThreads) row_dots(const __grid_constant__ RowDots<T, S> p) {
  const bool warp_per_row = p.bias.data != nullptr;
  const std::int64_t thread = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const std::int64_t r = warp_per_row ? thread / 32 : thread;
  if (r >= p.rows.offset(p.rows.experts)) return;
  const int row = static_cast<int>(r), lane = static_cast<int>(threadIdx.x % 32);
  S ds = warp_per_row ? bias_dot(p, row, lane) : S(0);
  for (int i = 0; i < p.n_parts; ++i) ds += p.parts[static_cast<std::int64_t>(i) * p.rows.capacity + row];
  const std::int64_t place = p.score.find(row);
  if (place >= 0 && (lane == 0 || !warp_per_row)) p.dscores[place] = ds;
}

template <class T, class S>
void launch_row_dots(const DownBackward& op, const void* parts, void* stream) {
  RowDots<T, S> p;
  p.rows = ExpertRows(op.expert_offsets, op.z.size(0));
  p.dy = SourceRows<T>(op.dy, op.row_token);
  p.hidden = static_cast<int>(op.dy.size(1));
  // Scores that act on the input leave the bias outside of their reach.
  p.bias = op.score_on == ScorePlacement::input ? ExpertBias<T>() : ExpertBias<T>(op.b_down);
  p.score = ScoreOfRow<S>(op.scores, op.row_slot);
  p.parts = static_cast<const S*>(parts);
  p.n_parts = static_cast<int>(row_dot_parts(op));
  p.dscores = static_cast<S*>(op.dscores.data);
  const std::int64_t threads = op.z.size(0) * (p.bias.data != nullptr ? 32 : 1);
  if (threads > 0) launch("down_backward", row_dots<T, S>, ceil_div(threads, kThreads), kThreads, 0, stream, p);
}

}  // namespace

void finish_row_dots(const DownBackward& op, const void* parts, void* stream) {
  if (!op.dscores.defined() || op.dscores.numel() == 0) return;
  const std::size_t bytes = static_cast<std::size_t>(op.dscores.numel()) * size_of(op.dscores.dtype);
  check(cudaMemsetAsync(op.dscores.data, 0, bytes, stream_of(stream)), "cudaMemsetAsync");
  dispatch_float(op.dy.dtype, [&](auto tag) {
    using Host = typename decltype(tag)::type;
    launch_row_dots<typename OnDevice<Host>::type, Accumulator<Host>>(op, parts, stream);
  });
}

}  // namespace intarsia::cuda
