#include "cpu/row_io.h"

#include <bit>

#include "cpu/clones.h"

namespace intarsia::cpu {
namespace {

// Without a branch: a conditional that holds a float operation is not vectorised.
inline std::uint32_t select(bool condition, std::uint32_t yes, std::uint32_t no) {
  const std::uint32_t mask = 0u - static_cast<std::uint32_t>(condition);
  return (yes & mask) | (no & ~mask);
}

inline float to_float(float value) { return value; }
inline float to_float(bfloat16 value) { return value; }

// Integer arithmetic instead of _Float16, which without F16C is a function call for each element. Exact for subnormals too.
inline float to_float(float16 value) {
  const std::uint32_t magnitude = value.bits & 0x7fffu;
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000u) << 16;
  const std::uint32_t normal = (magnitude << 13) + select(magnitude >= 0x7c00u, 0x70000000u, 0x38000000u);
  // A subnormal is magnitude * 2^-24; the subtraction of two normal numbers keeps it exact where denormals are flushed.
  const float subnormal = std::bit_cast<float>(0x38800000u + (magnitude << 13)) - std::bit_cast<float>(0x38800000u);
  return std::bit_cast<float>(select(magnitude < 0x400u, std::bit_cast<std::uint32_t>(subnormal), normal) | sign);
}

inline void assign(float& out, float value) { out = value; }
inline void assign(bfloat16& out, float value) { out = bfloat16(value); }

inline void assign(float16& out, float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  std::uint32_t half = (rounded - 0x38000000u) >> 13;
  half = select(magnitude >= 0x477ff000u, 0x7c00u, half);  // 65520 and above round to infinity
  half = select(magnitude > 0x7f800000u, 0x7e00u, half);
  // Below 2^-14 adding 0.5 puts the last kept bit at 2^-24, so the addition itself rounds to nearest even.
  const auto shifted = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f);
  half = select(magnitude < 0x38800000u, shifted - 0x3f000000u, half);
  out.bits = static_cast<std::uint16_t>(half | ((bits >> 16) & 0x8000u));
}

// The compiler clones templates of internal linkage only (clones.h), so these are the loops and the public templates call them.

template <class T>
INTARSIA_CLONES void widen_loop(const T* row, std::int64_t step, std::int64_t n, float* __restrict out) {
  if (step == 1) {
    for (std::int64_t i = 0; i < n; ++i) out[i] = to_float(row[i]);
  } else {
    for (std::int64_t i = 0; i < n; ++i) out[i] = to_float(row[i * step]);
  }
}

template <class T>
INTARSIA_CLONES void narrow_loop(const float* __restrict in, std::int64_t n, T* row, std::int64_t step) {
  if (step == 1) {
    for (std::int64_t i = 0; i < n; ++i) assign(row[i], in[i]);
  } else {
    for (std::int64_t i = 0; i < n; ++i) assign(row[i * step], in[i]);
  }
}

template <class T>
INTARSIA_CLONES void add_scaled_loop(float factor, const T* row, std::int64_t step, std::int64_t n, float* __restrict sum) {
  if (step == 1) {
    for (std::int64_t i = 0; i < n; ++i) sum[i] += factor * to_float(row[i]);
  } else {
    for (std::int64_t i = 0; i < n; ++i) sum[i] += factor * to_float(row[i * step]);
  }
}

}  // namespace

template <class T>
void widen(const T* row, std::int64_t step, std::int64_t n, float* out) {
  widen_loop(row, step, n, out);
}

template <class T>
void narrow(const float* in, std::int64_t n, T* row, std::int64_t step) {
  narrow_loop(in, n, row, step);
}

template <class T>
void add_scaled(float factor, const T* row, std::int64_t step, std::int64_t n, float* sum) {
  add_scaled_loop(factor, row, step, n, sum);
}

INTARSIA_ROW_IO(float, )
INTARSIA_ROW_IO(bfloat16, )
INTARSIA_ROW_IO(float16, )

}  // namespace intarsia::cpu
