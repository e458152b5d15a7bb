// Rows of float32, bfloat16 or float16 at any stride, widened to fp32 and rounded back once. The loops are compiled for several
// instruction sets and chosen when the library is loaded. Nothing is reassociated, so the bits on one processor never change;
// where a set has fused multiply-add the compiler may use it, so they can differ in the last place between processors.
#pragma once

#include <cstdint>

#include "base/dispatch.h"
#include "intarsia/types.h"

namespace intarsia::cpu {

/// out[i] = row[i * step]
template <class T>
void widen(const T* row, std::int64_t step, std::int64_t n, float* out);

/// row[i * step] = in[i], rounded to nearest even
template <class T>
void narrow(const float* in, std::int64_t n, T* row, std::int64_t step);

/// sum[i] += factor * row[i * step]
template <class T>
void add_scaled(float factor, const T* row, std::int64_t step, std::int64_t n, float* sum);

#define INTARSIA_ROW_IO(T, prefix)                                              \
  prefix template void widen<T>(const T*, std::int64_t, std::int64_t, float*);  \
  prefix template void narrow<T>(const float*, std::int64_t, T*, std::int64_t); \
  prefix template void add_scaled<T>(float, const T*, std::int64_t, std::int64_t, float*);
INTARSIA_ROW_IO(float, extern)
INTARSIA_ROW_IO(bfloat16, extern)
INTARSIA_ROW_IO(float16, extern)

/// body(Tag<T>) for the element types of this backend; float64 belongs to the reference backend.
template <class Body>
decltype(auto) dispatch_element(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::float32: return body(Tag<float>{});
    case DType::bfloat16: return body(Tag<bfloat16>{});
    case DType::float16: return body(Tag<float16>{});
    default:
      throw Unsupported("the cpu backend computes in float32, bfloat16 and float16, got " + std::string(to_string(dtype)));
  }
}

/// Elements first .. first + n of row i of a rank-2 view, as fp32.
inline void widen_row(const TensorView& v, std::int64_t i, std::int64_t first, std::int64_t n, float* out) {
  dispatch_element(v.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    widen(v.as<const T>() + i * v.step(0) + first * v.step(1), v.step(1), n, out);
  });
}

inline void narrow_row(const float* in, const TensorView& v, std::int64_t i, std::int64_t first, std::int64_t n) {
  dispatch_element(v.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    narrow(in, n, v.as<T>() + i * v.step(0) + first * v.step(1), v.step(1));
  });
}

}  // namespace intarsia::cpu
