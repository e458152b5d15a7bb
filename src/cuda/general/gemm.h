// The one kernel of the general path: for each expert, C (m, n) = left (m, k) right (k, n) in ordinary arithmetic, S = float or
// double. 256 threads, a tile of 64 x 128 in steps of 16 k through shared memory; a thread makes 4 rows x 8 columns.
//
// Operation has
//   kProducts                                     1, or 2: gate and up columns of w_up, two sums in one thread
//   S left(expert, m, k), right(expert, product, n, k)            elements, only asked for inside the extents
//   S store(expert, m, n, const S (&)[kProducts])                 takes one column of one row; returns its part of ds, else 0
//   kRowDots, row_dot(expert, m, tile, sum)                       sum of what store returned over the columns of a tile
#pragma once

#include <type_traits>

#include "cuda/epilogue.h"
#include "cuda/expert_rows.h"
#include "cuda/expert_weights.h"
#include "cuda/gemm_launch.h"

namespace intarsia::cuda::general {

inline constexpr int kTileM = 64, kTileN = 128, kTileK = 16, kThreads = 256;
inline constexpr int kRowsOfThread = 4, kColumnsOfThread = 8;

/// Extents of one launch. Row operations: m is the expert's rows. Weight gradients: k is.
template <class Operation_>
struct Problem {
  using Operation = Operation_;
  static constexpr bool kWeightGradient = Operation::kWeightGradient;
  ExpertRows rows;
  Operation operation;
  int m_size = 0;  ///< weight gradients
  int n_size = 0;
  int k_size = 0;            ///< row operations
  bool skip_empty = false;   ///< weight gradients that add leave experts without rows alone
  bool left_along_k = true;  ///< neighbouring threads read neighbours along k, or along m and n
  bool right_along_k = true;

  __host__ __device__ int n_tiles() const { return (n_size + kTileN - 1) / kTileN; }
  __host__ __device__ int m_tiles(int count) const { return ((kWeightGradient ? m_size : count) + kTileM - 1) / kTileM; }
  __host__ __device__ int tiles(int count) const { return skip_empty && count == 0 ? 0 : m_tiles(count) * n_tiles(); }
};

/// Place of element i of a tile of `lines` x 16 k that the CTA reads together.
struct Place {
  int line, k;
  __device__ Place(int i, int lines, bool along_k)
      : line(along_k ? i / kTileK : i % lines), k(along_k ? i % kTileK : i / lines) {}
};

template <class Problem>
__global__ void __launch_bounds__(kThreads, sizeof(typename Problem::Operation::S) == 8 ? 1 : 2)
    gemm(const __grid_constant__ Problem p) {
  using Operation = typename Problem::Operation;
  using S = typename Operation::S;
  constexpr int kProducts = Operation::kProducts;
  __shared__ S left[kTileK][kTileM + 1];
  __shared__ S right[kProducts][kTileK][kTileN + 1];
  const int thread = static_cast<int>(threadIdx.x), tx = thread % 16, ty = thread / 16;
  const int n_tiles = p.n_tiles();
  TileWalk<Problem> walk(p);
  Expert expert;
  int inside;
  for (int number = static_cast<int>(blockIdx.x); walk.find(number, expert, inside); number += static_cast<int>(gridDim.x)) {
    const int m0 = inside / n_tiles * kTileM, n0 = inside % n_tiles * kTileN;
    const int m_size = Problem::kWeightGradient ? p.m_size : expert.count,
              k_size = Problem::kWeightGradient ? expert.count : p.k_size;
    S c[kProducts][kRowsOfThread][kColumnsOfThread] = {};

    for (int k0 = 0; k0 < k_size; k0 += kTileK) {
      for (int i = thread; i < kTileM * kTileK; i += kThreads) {
        const Place at(i, kTileM, p.left_along_k);
        const bool here = m0 + at.line < m_size && k0 + at.k < k_size;
        left[at.k][at.line] = here ? p.operation.left(expert, m0 + at.line, k0 + at.k) : S(0);
      }
      for (int product = 0; product < kProducts; ++product)
        for (int i = thread; i < kTileN * kTileK; i += kThreads) {
          const Place at(i, kTileN, p.right_along_k);
          const bool here = n0 + at.line < p.n_size && k0 + at.k < k_size;
          right[product][at.k][at.line] = here ? p.operation.right(expert, product, n0 + at.line, k0 + at.k) : S(0);
        }
      __syncthreads();
      for (int k = 0; k < kTileK; ++k) {
        S a[kRowsOfThread];
#pragma unroll
        for (int i = 0; i < kRowsOfThread; ++i) a[i] = left[k][ty * kRowsOfThread + i];
#pragma unroll
        for (int product = 0; product < kProducts; ++product)
#pragma unroll
          for (int j = 0; j < kColumnsOfThread; ++j) {
            const S b = right[product][k][tx + 16 * j];
#pragma unroll
            for (int i = 0; i < kRowsOfThread; ++i) c[product][i][j] += a[i] * b;
          }
      }
      __syncthreads();
    }

#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
      const int m = m0 + ty * kRowsOfThread + i;
      S dot = S(0);
#pragma unroll
      for (int j = 0; j < kColumnsOfThread; ++j) {
        const int n = n0 + tx + 16 * j;
        if (m >= m_size || n >= p.n_size) continue;
        S v[kProducts];
#pragma unroll
        for (int product = 0; product < kProducts; ++product) v[product] = c[product][i][j];
        dot += p.operation.store(expert, m, n, v);
      }
      if constexpr (Operation::kRowDots) {
        for (int step = 8; step > 0; step /= 2) dot += __shfl_xor_sync(0xffffffffu, dot, step);  // the 16 threads of a row
        if (tx == 0 && m < m_size) p.operation.row_dot(expert, m, n0 / kTileN, dot);
      }
    }
  }
}

template <class Problem>
void launch_gemm(const char* operation, const Problem& problem, int device, void* stream) {
  const std::int64_t m_tiles = Problem::kWeightGradient ? problem.rows.experts * static_cast<std::int64_t>(problem.m_tiles(0))
                                                        : most_row_tiles(problem.rows.capacity, problem.rows.experts, kTileM);
  const std::int64_t resident = 4 * device_figures(device).multiprocessors;
  const std::int64_t grid = persistent_grid(operation, m_tiles * problem.n_tiles(), resident);
  if (grid > 0) launch(operation, gemm<Problem>, grid, kThreads, 0, stream, problem);
}

/// body(Element<T, S>{}): element type on the GPU and the type of its sums.
template <class T_, class S_>
struct Element {
  using T = T_;
  using S = S_;
};
template <class Body>
void dispatch_element(DType dtype, Body&& body) {
  dispatch_float(dtype, [&](auto tag) {
    using Host = typename decltype(tag)::type;
    body(Element<typename OnDevice<Host>::type, Accumulator<Host>>{});
  });
}

/// A row buffer of this library: unit stride along a row.
template <class T>
struct RowBuffer {
  T* data = nullptr;
  std::int64_t step = 0;

  RowBuffer() = default;
  explicit RowBuffer(const TensorView& v) : data(v.defined() ? static_cast<T*>(v.data) : nullptr), step(v.step(0)) {}
#if defined(__CUDACC__)
  __device__ T& at(const Expert& expert, int r, int column) const { return data[(expert.begin + r) * step + column]; }
#endif
};

/// Whether reading a weight along k is the contiguous way.
inline bool along_in(const Weights& w) { return w.weight.step(w.transposed ? 1 : 2) <= w.weight.step(w.transposed ? 2 : 1); }

}  // namespace intarsia::cuda::general
