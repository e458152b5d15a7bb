// intarsia::moe_forward and moe_backward, the operators that make their own outputs: in Python each would take as long as a
// kernel launch.
#pragma once

#include <cstdint>

#include <torch/csrc/stable/library.h>

namespace intarsia::torch_shim {

/// Schemas and meaning: python/intarsia/ops/moe.py, where the same is written for builds without this library.
void moe_forward(StableIValue* stack, std::uint64_t, std::uint64_t);
void moe_backward(StableIValue* stack, std::uint64_t, std::uint64_t);

}  // namespace intarsia::torch_shim
