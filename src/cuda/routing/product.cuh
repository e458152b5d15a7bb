// C (m, n) = [C +] A (m, k) B (k, n) [+ bias (n)] for operands of any dtype and strides, in fp32 (fp64 for double), plain FMAs.
// k may be cut into slices, one a block: then their sums go to `partial` (slices, m, n) and sum_kernel adds them in order.
#pragma once

#include <algorithm>

#include "cuda/routing/kernel.cuh"

namespace intarsia::cuda {

struct Product {
  AnyRows a, b, c, bias;  // bias (n) as a (1, n) view; a null pointer: none
  std::int64_t m, n, k;
  std::int64_t slice;  // a multiple of what a kernel takes of k at once
  int slices;
  void* partial;                              // fp32, or fp64 where that is computed in
  bool add = false;                           // to C; with one slice only
  const std::int32_t* taking_part = nullptr;  // (k): below 0, that k adds nothing, whatever B holds there

  __device__ __forceinline__ bool takes(std::int64_t k_) const { return taking_part == nullptr || taking_part[k_] >= 0; }

  template <class S>
  __device__ __forceinline__ void store(S value, std::int64_t i, std::int64_t j) const {
    if (slices > 1) {
      static_cast<S*>(partial)[(blockIdx.z * m + i) * n + j] = value;
      return;
    }
    if (bias.data) value += bias.template load<S>(0, j);
    if (add) value += c.template load<S>(i, j);
    c.store(value, i, j);
  }
};

/// Slices of k, so that `tiles` tiles of C give enough blocks; a slice has at least `least` of k, rounded up to 64.
inline void cut_k(Product& p, std::int64_t tiles, std::int64_t least) {
  constexpr std::int64_t kBlocks = 264;  // two for each multiprocessor of an H200
  const std::int64_t most = std::max<std::int64_t>(1, p.k / least), wanted = kBlocks / std::max<std::int64_t>(1, tiles);
  const std::int64_t slices = std::clamp<std::int64_t>(wanted, 1, most);
  p.slice = std::max<std::int64_t>(64, ceil_div(ceil_div(p.k, slices), 64) * 64);
  p.slices = static_cast<int>(std::max<std::int64_t>(1, ceil_div(p.k, p.slice)));
}

// ---- kernels

constexpr int kPlainTile = 64, kPlainDepth = 16, kPlainThreads = 256;

/// Grid (tiles of n, tiles of m, slices); 64 x 64 of C a block, 4 x 4 a thread.
template <class S>
static __global__ void __launch_bounds__(kPlainThreads) plain_product_kernel(const __grid_constant__ Product p) {
  __shared__ S a[kPlainDepth][kPlainTile + 1], b[kPlainDepth][kPlainTile + 1];
  const int thread = static_cast<int>(threadIdx.x), row = thread / 16 * 4, column = thread % 16 * 4;
  const std::int64_t n0 = std::int64_t{blockIdx.x} * kPlainTile,
                     k_end = min((blockIdx.z + 1) * p.slice, static_cast<std::int64_t>(p.k));
  const bool a_along_k = p.a.step == 1,
             b_along_k = p.b.row_step == 1 && p.b.step != 1;  // neighbouring threads, neighbouring memory
  for (std::int64_t m0 = std::int64_t{blockIdx.y} * kPlainTile; m0 < p.m; m0 += std::int64_t{gridDim.y} * kPlainTile) {
    S sum[4][4] = {};
    for (std::int64_t k0 = blockIdx.z * p.slice; k0 < k_end; k0 += kPlainDepth) {
      for (int i = thread; i < kPlainTile * kPlainDepth; i += kPlainThreads) {
        const int ka = a_along_k ? i % kPlainDepth : i / kPlainTile, ma = a_along_k ? i / kPlainDepth : i % kPlainTile;
        a[ka][ma] = k0 + ka < k_end && m0 + ma < p.m ? p.a.load<S>(m0 + ma, k0 + ka) : S(0);
        const int kb = b_along_k ? i % kPlainDepth : i / kPlainTile, nb = b_along_k ? i / kPlainDepth : i % kPlainTile;
        b[kb][nb] = k0 + kb < k_end && n0 + nb < p.n && p.takes(k0 + kb) ? p.b.load<S>(k0 + kb, n0 + nb) : S(0);
      }
      __syncthreads();
#pragma unroll
      for (int k = 0; k < kPlainDepth; ++k) {
        S left[4], right[4];
        for (int i = 0; i < 4; ++i) left[i] = a[k][row + i], right[i] = b[k][column + i];
        for (int i = 0; i < 4; ++i)
          for (int j = 0; j < 4; ++j) sum[i][j] += left[i] * right[j];
      }
      __syncthreads();
    }
    for (int i = 0; i < 4; ++i)
      for (int j = 0; j < 4; ++j)
        if (m0 + row + i < p.m && n0 + column + j < p.n) p.store(sum[i][j], m0 + row + i, n0 + column + j);
  }
}

constexpr int kSumThreads = 256;

/// c = the slices' sums, added in order (+ bias).
template <class S>
static __global__ void __launch_bounds__(kSumThreads) sum_kernel(const __grid_constant__ Product p) {
  const std::int64_t cell = std::int64_t{blockIdx.x} * kSumThreads + threadIdx.x, cells = p.m * p.n;
  if (cell >= cells) return;
  const S* const partial = static_cast<const S*>(p.partial);
  S sum = S(0);
#pragma unroll 8
  for (int i = 0; i < p.slices; ++i) sum += partial[i * cells + cell];
  const std::int64_t j = cell % p.n;
  if (p.bias.data) sum += p.bias.load<S>(0, j);
  p.c.store(sum, cell / p.n, j);
}

// ---- launchers

constexpr unsigned kMaxGridY = 65535;

/// Bytes of `partial`.
template <class S>
std::size_t partial_bytes(const Product& p) {
  return p.slices > 1 ? align_up(static_cast<std::size_t>(p.slices * p.m * p.n) * sizeof(S)) : 0;
}

template <class S>
void launch_sum(const char* name, const Product& p, cudaStream_t stream) {
  if (p.slices > 1) launch(name, sum_kernel<S>, blocks(p.m * p.n, kSumThreads), kSumThreads, stream, 0, p);
}

template <class S>
void launch_plain_product(const char* name, const Product& p, cudaStream_t stream) {
  const dim3 grid(blocks(p.n, kPlainTile), std::min(blocks(p.m, kPlainTile), kMaxGridY), static_cast<unsigned>(p.slices));
  launch(name, plain_product_kernel<S>, grid, kPlainThreads, stream, 0, p);
  launch_sum<S>(name, p, stream);
}

}  // namespace intarsia::cuda
