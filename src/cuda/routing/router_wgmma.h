// router_logits and router_logits_backward (dx and dw_router) on Hopper's wgmma, from 16-bit parts of fp32 operands.
#pragma once

#include <cstddef>
#include <string>

#include "base/execution.h"
#include "intarsia/ops.h"

namespace intarsia::cuda::wgmma {

bool supports(const RouterLogits&, std::string* why_not = nullptr);
bool supports(const RouterLogitsBackward&, std::string* why_not = nullptr);
std::size_t workspace_bytes(const RouterLogits&);
std::size_t workspace_bytes(const RouterLogitsBackward&);
void run(const RouterLogits&, const Execution&);
void run(const RouterLogitsBackward&, const Execution&);

}  // namespace intarsia::cuda::wgmma
