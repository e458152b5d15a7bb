// The six products on wgmma and TMA (Hopper), bfloat16 and float16.
#pragma once

#include <cstddef>
#include <string>

#include "base/execution.h"
#include "cuda/products.h"

namespace intarsia::cuda::sm90 {

#define INTARSIA_DECLARE(Op)                                     \
  /** False: `why_not` says in words what these kernels need. */ \
  bool supports(const Op&, std::string* why_not);                \
  void run(const Op&, const Execution&);                         \
  std::size_t workspace_bytes(const Op&);                        \
  /** The kernel that run would launch. */                       \
  std::string explain(const Op&);
INTARSIA_FOR_EACH_PRODUCT(INTARSIA_DECLARE)
#undef INTARSIA_DECLARE

}  // namespace intarsia::cuda::sm90
