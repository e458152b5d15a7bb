// From a Problem to a launch.
#pragma once

#include "cuda/gemm_launch.h"
#include "cuda/sm80/gemm.h"

namespace intarsia::cuda::sm80 {

/// The stages, and (128, 4) floats for the sums of ds.
inline constexpr int kSharedBytes = kStages * kStageBytes + kTile * 4 * static_cast<int>(sizeof(float));
static_assert(kSharedBytes <= 99 * 1024, "more shared memory than a block can have on compute capability 8.6");

template <class Problem>
void launch_gemm(const char* operation, const Problem& problem, int device, void* stream) {
  const std::int64_t m_tiles = Problem::kWeightGradient ? problem.rows.experts * static_cast<std::int64_t>(problem.m_tiles(0))
                                                        : most_row_tiles(problem.rows.capacity, problem.rows.experts, kTile);
  const std::int64_t resident = 2 * device_figures(device).multiprocessors;
  const std::int64_t grid = persistent_grid(operation, m_tiles * problem.n_tiles(), resident);
  if (grid == 0) return;
  allow_shared<&gemm<Problem>>(device, kSharedBytes);
  launch(operation, gemm<Problem>, grid, kThreads, kSharedBytes, stream, problem);
}

/// body(element) for bfloat16 and float16.
template <class Body>
void dispatch_half(DType dtype, Body&& body) {
  if (dtype == DType::float16) body(Tag<__half>{});
  else body(Tag<__nv_bfloat16>{});
}

/// body(activation): Swiglu has kernels of its own, the others choose inside.
template <class Body>
void dispatch_epilogue(Activation activation, Body&& body) {
  if (activation == Activation::swiglu) body(Swiglu{});
  else if (is_gated(activation)) body(AnyGated{activation});
  else body(AnyPlain{activation});
}

template <class T>
T* rows_of(const TensorView& v) {
  return v.defined() ? static_cast<T*>(v.data) : nullptr;
}

}  // namespace intarsia::cuda::sm80
