// Large shapes: fast kernels against the general ones, and the rates of the products.
#pragma once

#include <functional>
#include <string>

namespace intarsia::check {

using Want = std::function<bool(const std::string&)>;

/// Compares every product of the fast paths with the general kernels at a real size.
void check_large(const std::function<void(const std::string&, double)>& report, const Want& want);

/// Prints TFLOP/s of every product and path.
int bench_products(const Want& want);

}  // namespace intarsia::check
