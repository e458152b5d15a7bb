// rows[r] = 0 for r >= expert_offsets[E]. A block a row at a time; rows in use cost one comparison.
#include "cuda/zero_rows.h"

#include <algorithm>

#include "cuda/expert_rows.h"
#include "cuda/gemm_launch.h"

namespace intarsia::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
struct ZeroRows {
  ExpertRows rows;
  T* data;
  std::int64_t step;
  int columns;
};

template <class T>
__global__ void __launch_bounds__(kThreads) zero_rows(const __grid_constant__ ZeroRows<T> p) {
  const std::int64_t first = p.rows.offset(p.rows.experts);
  for (std::int64_t r = first + blockIdx.x; r < p.rows.capacity; r += gridDim.x)
    for (int c = static_cast<int>(threadIdx.x); c < p.columns; c += kThreads) p.data[r * p.step + c] = T(0.0f);
}

}  // namespace

void zero_rows_past_last(const TensorView& rows, const TensorView& expert_offsets, void* stream) {
  if (rows.numel() == 0) return;
  dispatch_float(rows.dtype, [&](auto tag) {
    using T = typename OnDevice<typename decltype(tag)::type>::type;
    const ZeroRows<T> p{ExpertRows(expert_offsets, rows.size(0)), static_cast<T*>(rows.data), rows.step(0),
                        static_cast<int>(rows.size(1))};
    launch("layer", zero_rows<T>, std::min<std::int64_t>(rows.size(0), 1024), kThreads, 0, stream, p);
  });
}

}  // namespace intarsia::cuda
