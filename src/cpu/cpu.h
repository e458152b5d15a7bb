// The CPU backend: every operation, blocked and parallel, in float32, bfloat16 and float16 with fp32 accumulation.
#pragma once

#include <cstddef>
#include <string>

#include "base/execution.h"
#include "intarsia/ops.h"

namespace intarsia::cpu {

#define INTARSIA_DECLARE(Op)             \
  void run(const Op&, const Execution&); \
  std::size_t workspace_bytes(const Op&, int workers);
INTARSIA_FOR_EACH_OPERATION(INTARSIA_DECLARE)
#undef INTARSIA_DECLARE

/// How products of this dtype are computed here, in a sentence: "oneDNN 2.6, bfloat16 by avx512_core_bf16", or
/// "plain blocked loops: libintarsia_cpu.so was not found beside libintarsia.so".
std::string describe_gemm(DType dtype);

}  // namespace intarsia::cpu
