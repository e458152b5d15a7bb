// A row of a (T, E) matrix in the registers of the threads that share its token.
#pragma once

#include "cuda/routing/vector.cuh"

namespace intarsia::cuda {

/// kThreads threads share a token: a part of a warp (4, 8, 16), a warp (32), or several, which then are a block. All threads of
/// a warp call these functions together, whatever their tokens are.
template <int kThreads>
struct Team {
  static constexpr int kLanes = std::min(kThreads, kWarpSize), kWarps = kThreads / kLanes;
  static constexpr int kBlockThreads = kWarps > 1 ? kThreads : 256, kTokens = kBlockThreads / kThreads;  // of a block
  static_assert(kLanes * kWarps == kThreads && (kLanes & (kLanes - 1)) == 0);

  __device__ __forceinline__ static int rank() { return static_cast<int>(threadIdx.x % kThreads); }
  __device__ __forceinline__ static int index() { return static_cast<int>(threadIdx.x / kThreads); }  // in the block
  __device__ __forceinline__ static std::int64_t token() { return std::int64_t{blockIdx.x} * kTokens + index(); }

  __device__ __forceinline__ static void sync() {
    if constexpr (kWarps == 1) __syncwarp();
    else __syncthreads();
  }
  /// Whether it holds for any token of the warp.
  __device__ __forceinline__ static bool any_token(bool here) {
    if constexpr (kThreads < kWarpSize) return __any_sync(kAllLanes, here);
    else return here;
  }
  /// The same value, bit for bit, in every thread.
  template <class V, class Op>
  __device__ __forceinline__ static V reduce(V value, Op op) {
    if constexpr (kWarps > 1) {
      return block_reduce<kWarps>(value, op);
    } else {
#pragma unroll
      for (int offset = kLanes / 2; offset > 0; offset /= 2) value = op(value, __shfl_xor_sync(kAllLanes, value, offset));
      return value;
    }
  }
};

/// Thread `rank` of a team has the fours j = 0, 1, ... of a row: elements four_of(j) .. four_of(j) + 3. So neighbouring threads
/// read neighbouring 16 bytes.
template <int kThreads>
__device__ __forceinline__ int four_of(int j) {
  return (j * kThreads + Team<kThreads>::rank()) * 4;
}

/// A (T, E) matrix of any dtype and strides; `whole`: its fours are aligned and contiguous.
struct TeamRows {
  AnyRows rows;
  int columns;
  bool whole;

  TeamRows(const TensorView& v) : rows(v), columns(v.defined() ? static_cast<int>(v.size(1)) : 0) {
    const std::size_t four = std::min<std::size_t>(kVectorBytes, 4 * size_of(v.dtype));
    whole = v.defined() && v.step(1) == 1 && v.step(0) % 4 == 0 && columns % 4 == 0 &&
            reinterpret_cast<std::uintptr_t>(v.data) % four == 0;
  }

  /// x = row t; -inf past its end.
  template <int kThreads, int kFours, class S>
  __device__ __forceinline__ void load(std::int64_t t, S (&x)[kFours][4]) const {
    if constexpr (std::is_same_v<S, double>) return load_as<kThreads, double>(t, x);
    else if (rows.dtype == DType::float32) load_as<kThreads, float>(t, x);
    else if (rows.dtype == DType::bfloat16) load_as<kThreads, __nv_bfloat16>(t, x);
    else load_as<kThreads, __half>(t, x);
  }

  /// Row t = x, rounded.
  template <int kThreads, int kFours, class S>
  __device__ __forceinline__ void store(std::int64_t t, const S (&x)[kFours][4]) const {
    if (rows.dtype == DType::float64) store_as<kThreads, double>(t, x);
    else if (rows.dtype == DType::float32) store_as<kThreads, float>(t, x);
    else if (rows.dtype == DType::bfloat16) store_as<kThreads, __nv_bfloat16>(t, x);
    else store_as<kThreads, __half>(t, x);
  }

 private:
  template <class T>
  static constexpr int kWidth = std::min(4, kVectorBytes / static_cast<int>(sizeof(T)));

  template <int kThreads, class T, int kFours, class S>
  __device__ __forceinline__ void load_as(std::int64_t t, S (&x)[kFours][4]) const {
    constexpr int kPieces = 4 / kWidth<T>;
    const T* const from = static_cast<const T*>(rows.data) + t * rows.row_step;
    Vector<T, kWidth<T>> loaded[kFours][kPieces];  // all of them before the first is looked at
#pragma unroll
    for (int j = 0; j < kFours; ++j)
#pragma unroll
      for (int i = 0; i < kPieces; ++i) loaded[j][i].bits = {};
    if (whole) {
#pragma unroll
      for (int j = 0; j < kFours; ++j)
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
          if (const int e = four_of<kThreads>(j); e < columns) loaded[j][i].load(from + e + i * kWidth<T>);
    } else {
#pragma unroll
      for (int j = 0; j < kFours; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (const int e = four_of<kThreads>(j) + i; e < columns)
            loaded[j][i / kWidth<T>].element[i % kWidth<T>] = from[e * rows.step];
    }
#pragma unroll
    for (int j = 0; j < kFours; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        x[j][i] = four_of<kThreads>(j) + i < columns ? S(loaded[j][i / kWidth<T>][i % kWidth<T>]) : S(-INFINITY);
  }

  template <int kThreads, class T, int kFours, class S>
  __device__ __forceinline__ void store_as(std::int64_t t, const S (&x)[kFours][4]) const {
    T* const to = static_cast<T*>(rows.data) + t * rows.row_step;
#pragma unroll
    for (int j = 0; j < kFours; ++j) {
      const int e = four_of<kThreads>(j);
      if (whole) {
#pragma unroll
        for (int i = 0; i < 4; i += kWidth<T>) {
          Vector<T, kWidth<T>> v;
#pragma unroll
          for (int l = 0; l < kWidth<T>; ++l) v.set(l, x[j][i + l]);
          if (e < columns) v.store(to + e + i);
        }
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (e + i < columns) to[(e + i) * rows.step] = narrow<T>(x[j][i]);
      }
    }
  }
};

/// Blocks of 256 threads that are to fit on a multiprocessor: 64 registers a thread where 16 numbers of a row are in them.
template <class S, int kFours>
constexpr int kResidentBlocks = std::is_same_v<S, float> && kFours <= 4 ? 4 : 1;

/// body(std::integral_constant<int, kThreads>, std::integral_constant<int, kFours>) of the team for rows of so many columns.
/// What a warp does once is shared by its tokens, so few threads a token; 32 registers for a row are the most.
template <class S, class Body>
void dispatch_team(int columns, Body&& body) {
  const auto team = [&]<int kThreads, int kFours>() {
    body(std::integral_constant<int, kThreads>{}, std::integral_constant<int, kFours>{});
  };
  if constexpr (std::is_same_v<S, float>) {
    if (columns <= 16) return team.template operator()<4, 1>();
    if (columns <= 32) return team.template operator()<4, 2>();
    if (columns <= 64) return team.template operator()<8, 2>();
    if (columns <= 128) return team.template operator()<8, 4>();
    if (columns <= 256) return team.template operator()<16, 4>();
    if (columns <= 512) return team.template operator()<32, 4>();
    if (columns <= 1024) return team.template operator()<32, 8>();
    team.template operator()<128, 8>();
  } else {  // two teams will do for float64, with half as many numbers in as many registers
    if (columns <= 128) return team.template operator()<32, 1>();
    team.template operator()<256, 4>();
  }
}

}  // namespace intarsia::cuda
