// intarsia::moe_forward, and overloads .native of it and of moe_backward for calls that nobody looks at. They make their own
// outputs: in Python each would take as long as a kernel launch.
#pragma once

#include <torch/csrc/stable/library.h>

namespace intarsia::torch_shim {

/// Schemas and meaning: python/intarsia/ops/moe.py, where the same is written for builds without this library.
void register_moe(torch::stable::detail::StableLibrary& library);

}  // namespace intarsia::torch_shim
