// A few neighbouring elements of a row, moved at once.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "cuda/routing/kernel.cuh"

namespace intarsia::cuda {

constexpr int kVectorBytes = 16;

template <int kBytes>
struct Storage;
template <>
struct Storage<16> {
  using type = uint4;
};
template <>
struct Storage<8> {
  using type = uint2;
};
template <>
struct Storage<4> {
  using type = std::uint32_t;
};
template <>
struct Storage<2> {
  using type = std::uint16_t;
};

template <class T, int kWidth>
struct Vector {
  using Bits = typename Storage<kWidth* static_cast<int>(sizeof(T))>::type;
  union {
    Bits bits;
    T element[kWidth];
  };
  __device__ __forceinline__ Vector() {}
  __device__ __forceinline__ void load(const T* p) { bits = *reinterpret_cast<const Bits*>(p); }
  __device__ __forceinline__ void store(T* p) const { *reinterpret_cast<Bits*>(p) = bits; }
  __device__ __forceinline__ Wide<T> operator[](int i) const { return widen(element[i]); }
  template <class S>
  __device__ __forceinline__ void set(int i, S value) {
    element[i] = narrow<T>(value);
  }
};

/// Rows of a matrix that vectors are to be read from: first element and step between rows, both in elements.
struct VectorRows {
  const void* data;
  std::int64_t row_step;
};

/// Elements that may be moved at once from every one of these matrices (absent ones: null) of `columns` columns: 16 bytes'
/// worth, 4 bytes' worth, or one.
template <class T>
int widest_vector(std::int64_t columns, std::initializer_list<VectorRows> matrices) {
  constexpr int kSize = sizeof(T);
  for (const int bytes : {kVectorBytes, 4}) {
    const int width = std::max(1, bytes / kSize);
    const bool fits =
        columns % width == 0 && std::all_of(matrices.begin(), matrices.end(), [&](const VectorRows& m) {
          return !m.data || (reinterpret_cast<std::uintptr_t>(m.data) % (width * kSize) == 0 && m.row_step % width == 0);
        });
    if (fits) return width;
  }
  return 1;
}

/// body(std::integral_constant<int, width>) for a width that widest_vector gave.
template <class T, class Body>
void dispatch_vector_width(int width, Body&& body) {
  constexpr int kFull = kVectorBytes / static_cast<int>(sizeof(T)), kFour = std::max(1, 4 / static_cast<int>(sizeof(T)));
  if (width == kFull) return body(std::integral_constant<int, kFull>{});
  if constexpr (kFour > 1)
    if (width == kFour) return body(std::integral_constant<int, kFour>{});
  body(std::integral_constant<int, 1>{});
}

}  // namespace intarsia::cuda
