// src/cuda/routing/mma.cuh, on the emulation: the same instructions as in src/cuda/sm80/ptx.h, under its own names.
#pragma once

#include "cuda/sm80/ptx.h"

namespace intarsia::cuda {

using sm80::commit_copies;
using sm80::dynamic_shared;
using sm80::shared_address;
using sm80::wait_copies;

inline void copy_async(void* to, const void* from, int valid) { emulation::copy_async(shared_address(to), from, valid); }
inline void load_matrices(std::uint32_t (&r)[4], const void* row) { sm80::load_matrices<false>(shared_address(row), r); }
inline void load_matrices_transposed(std::uint32_t (&r)[4], const void* row) {
  sm80::load_matrices<true>(shared_address(row), r);
}
template <class T>
void multiply_add(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1, T) {
  sm80::multiply<T>(d, a, b0, b1);
}

}  // namespace intarsia::cuda
