// The one product of the CPU backend, on cache-sized blocks: C = A B or C += A B, called from one thread.
// Behind it is oneDNN (src/cpu/onednn), or plain blocked loops where libintarsia_cpu.so is missing; describe_gemm says which.
#pragma once

#include <cstddef>
#include <cstdint>

#include "intarsia/types.h"
#include "plan/blocking.h"

namespace intarsia::cpu {

/// A matrix of float32, bfloat16 or float16 at any strides (in elements).
struct Matrix {
  const void* data;
  std::int64_t row_step, column_step;
};

/// What a product needs for packing operands that cannot be multiplied where they lie: float16, and strides without a unit
/// axis.
constexpr std::size_t kGemmScratchBytes = kPackingBytes;

/// c (m, n) = a (m, k) b (k, n), or += when `accumulate`. Sums are fp32; c has unit column stride.
/// Products of equal shapes and strides share what oneDNN prepares for them, so callers that can round m up to `padded(m)` do.
void gemm(DType dtype, std::int64_t m, std::int64_t n, std::int64_t k, Matrix a, Matrix b, float* c, std::int64_t c_step,
          bool accumulate, std::byte* scratch);

/// Rows of a block, rounded up to the granularity that keeps the number of shapes small.
constexpr std::int64_t padded(std::int64_t rows) { return (rows + 15) / 16 * 16; }

}  // namespace intarsia::cpu
