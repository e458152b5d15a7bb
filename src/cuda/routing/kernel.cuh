// What the routing kernels share: launching, views of any stride, elements of any dtype, the lanes of a warp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "base/workspace.h"
#include "cuda/cuda.h"
#include "cuda/launch.h"

namespace intarsia::cuda {

// ---- launching

constexpr int kDefaultSharedBytes = 48 * 1024;  // more needs an opt-in for each kernel and device

/// Launches; an empty grid launches nothing. The current device must be the stream's.
template <class... Parameters, class... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), dim3 grid, int threads, cudaStream_t stream,
            std::size_t shared_bytes, const Arguments&... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  if (shared_bytes > kDefaultSharedBytes)
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)), name);
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  check(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...), name);
}

/// Blocks along one axis of a grid.
inline unsigned blocks(std::int64_t items, std::int64_t per_block) { return static_cast<unsigned>(ceil_div(items, per_block)); }

/// body(Tag<T>) with the device's type of a floating-point dtype.
template <class Body>
decltype(auto) dispatch_device_float(DType dtype, Body&& body) {
  return dispatch_float(
      dtype, [&](auto tag) -> decltype(auto) { return body(Tag<typename OnDevice<typename decltype(tag)::type>::type>{}); });
}

/// float, and double for double: what a T is computed in.
template <class T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

// ---- elements

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }

template <class T, class S>
__device__ __forceinline__ T narrow(S x) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return __float2bfloat16_rn(static_cast<float>(x));
  else if constexpr (std::is_same_v<T, __half>) return __float2half_rn(static_cast<float>(x));
  else return static_cast<T>(x);
}

/// An element whose dtype is known at run time only, as an S.
template <class S>
__device__ __forceinline__ S load_any(const void* data, DType dtype, std::int64_t i) {
  switch (dtype) {
    case DType::float64: return static_cast<S>(static_cast<const double*>(data)[i]);
    case DType::float32: return static_cast<S>(static_cast<const float*>(data)[i]);
    case DType::bfloat16: return static_cast<S>(widen(static_cast<const __nv_bfloat16*>(data)[i]));
    case DType::float16: return static_cast<S>(widen(static_cast<const __half*>(data)[i]));
    case DType::int64: return static_cast<S>(static_cast<const std::int64_t*>(data)[i]);
    case DType::int32: return static_cast<S>(static_cast<const std::int32_t*>(data)[i]);
    case DType::boolean: return static_cast<S>(static_cast<const std::uint8_t*>(data)[i] != 0);
  }
  return S(0);
}

template <class S>
__device__ __forceinline__ void store_any(void* data, DType dtype, std::int64_t i, S value) {
  switch (dtype) {
    case DType::float64: static_cast<double*>(data)[i] = static_cast<double>(value); return;
    case DType::float32: static_cast<float*>(data)[i] = static_cast<float>(value); return;
    case DType::bfloat16: static_cast<__nv_bfloat16*>(data)[i] = narrow<__nv_bfloat16>(value); return;
    case DType::float16: static_cast<__half*>(data)[i] = narrow<__half>(value); return;
    default: return;
  }
}

// ---- views

/// A rank-2 view of known dtype.
template <class T>
struct Rows {
  T* data;
  std::int64_t row_step, step;

  Rows(const TensorView& v) : data(v.as<T>()), row_step(v.rank > 1 ? v.step(0) : 0), step(v.rank > 1 ? v.step(1) : 0) {}
  __device__ __forceinline__ T* at(std::int64_t i, std::int64_t j) const { return data + i * row_step + j * step; }
};

/// A view whose dtype is known at run time only: rank 2, or rank 1 with `row_step` along its axis. Absent: a null pointer.
struct AnyRows {
  void* data;
  DType dtype;
  std::int64_t row_step, step;

  AnyRows(const TensorView& v)
      : data(v.defined() ? v.data : nullptr),
        dtype(v.dtype),
        row_step(v.rank > 0 ? v.step(0) : 0),
        step(v.rank > 1 ? v.step(1) : 0) {}
  template <class S>
  __device__ __forceinline__ S load(std::int64_t i, std::int64_t j = 0) const {
    return load_any<S>(data, dtype, i * row_step + j * step);
  }
  template <class S>
  __device__ __forceinline__ void store(S value, std::int64_t i, std::int64_t j = 0) const {
    store_any(data, dtype, i * row_step + j * step, value);
  }
  AnyRows transposed() const {
    AnyRows other = *this;
    std::swap(other.row_step, other.step);
    return other;
  }
};

/// Which tokens take part: token_mask (T), absent = all.
struct TokenMask {
  const std::uint8_t* bytes;
  std::int64_t step;

  TokenMask(const TensorView& v)
      : bytes(v.defined() ? v.as<const std::uint8_t>() : nullptr), step(v.defined() ? v.step(0) : 0) {}
  __device__ __forceinline__ bool operator()(std::int64_t t) const { return !bytes || bytes[t * step] != 0; }
};

/// Expert ids by flat slot, int32 or int64.
struct Ids {
  const void* data;
  bool wide;

  Ids(const TensorView& v) : data(v.defined() ? v.data : nullptr), wide(v.dtype == DType::int64) {}
  /// The expert of a slot, -1 when it is not in [0, experts).
  __device__ __forceinline__ int expert(std::int64_t slot, int experts) const {
    const std::int64_t id =
        wide ? static_cast<const std::int64_t*>(data)[slot] : std::int64_t{static_cast<const std::int32_t*>(data)[slot]};
    return static_cast<std::uint64_t>(id) < static_cast<std::uint64_t>(experts) ? static_cast<int>(id) : -1;
  }
};

// ---- warps and blocks

constexpr int kWarpSize = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

__device__ __forceinline__ int lane_index() { return static_cast<int>(threadIdx.x % kWarpSize); }
__device__ __forceinline__ int warp_index() { return static_cast<int>(threadIdx.x / kWarpSize); }
__device__ __forceinline__ unsigned lanes_below() { return (1u << lane_index()) - 1; }

struct Add {
  template <class V>
  __device__ __forceinline__ V operator()(V a, V b) const {
    return a + b;
  }
};
struct Max {
  template <class V>
  __device__ __forceinline__ V operator()(V a, V b) const {
    return a < b ? b : a;
  }
};

/// The same value, bit for bit, in every lane.
template <class V, class Op>
__device__ __forceinline__ V warp_reduce(V value, Op op) {
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) value = op(value, __shfl_xor_sync(kAllLanes, value, offset));
  return value;
}

template <class V>
__device__ __forceinline__ V warp_inclusive_scan(V value) {
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const V before = __shfl_up_sync(kAllLanes, value, offset);
    if (lane_index() >= offset) value += before;
  }
  return value;
}

/// Over all threads of a block of kWarps warps; every thread gets the sum. Has barriers.
template <int kWarps, class V, class Op>
__device__ V block_reduce(V value, Op op) {
  __shared__ V of_warp[kWarps];
  value = warp_reduce(value, op);
  __syncthreads();
  if (lane_index() == 0) of_warp[warp_index()] = value;
  __syncthreads();
  V result = of_warp[0];
  for (int w = 1; w < kWarps; ++w) result = op(result, of_warp[w]);
  return result;
}

/// The sum of the threads before this one; `total` gets the sum of all. Has barriers.
template <int kWarps, class V>
__device__ V block_exclusive_scan(V value, V& total) {
  __shared__ V of_warp[kWarps];
  const V inclusive = warp_inclusive_scan(value);
  __syncthreads();
  if (lane_index() == kWarpSize - 1) of_warp[warp_index()] = inclusive;
  __syncthreads();
  V before = V(0);
  total = V(0);
  for (int w = 0; w < kWarps; ++w) {
    if (w == warp_index()) before = total;
    total += of_warp[w];
  }
  return before + inclusive - value;
}

}  // namespace intarsia::cuda
