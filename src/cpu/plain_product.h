// The product without oneDNN: loops that the compiler vectorises, a register-sized tile at a time.
#pragma once

#include <cstdint>

namespace intarsia::cpu {

/// c (m, n) = a (m, k) b (k, n), or +=; a and b contiguous, rows of c c_step apart.
void plain_product(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, const float* b, float* c,
                   std::int64_t c_step, bool accumulate);

}  // namespace intarsia::cpu
