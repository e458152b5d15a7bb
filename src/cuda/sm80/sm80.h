// The six products on mma.sync: Ampere, Ada and later chips, bfloat16 and float16.
#pragma once

#include <cstddef>
#include <string>

#include "base/execution.h"
#include "cuda/products.h"

namespace intarsia::cuda::sm80 {

#define INTARSIA_DECLARE(Op)                                     \
  /** False: `why_not` says in words what these kernels need. */ \
  bool supports(const Op&, std::string* why_not);                \
  void run(const Op&, const Execution&);                         \
  std::size_t workspace_bytes(const Op&);
INTARSIA_FOR_EACH_PRODUCT(INTARSIA_DECLARE)
#undef INTARSIA_DECLARE

/// Which axis of a weight is contiguous, in whole 16-byte chunks. Both tensors of a gate and up pair have the same.
///   in, out    that one; along out in chunks of gates or of ups
///   out_pairs  out, and every gate lies beside its up (gpt-oss in Hugging Face's layout)
enum class Contiguous { in, out, out_pairs, neither };
Contiguous contiguous_axis(const Weights&);

}  // namespace intarsia::cuda::sm80
