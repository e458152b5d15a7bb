// src/cuda/sm90/wgmma.h, on the emulation.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "hopper.h"

namespace intarsia::cuda::sm90 {

template <class Element, int kN, bool kLeftMnMajor, bool kRightMnMajor>
void wgmma(float (&d)[kN / 2], std::uint64_t a, std::uint64_t b, int add) {
  static_assert(kN == 128 || kN == 192 || kN == 256);
  emulation::issue_wgmma({a, b, add != 0, kLeftMnMajor, kRightMnMajor, std::is_same_v<Element, __half>, kN}, d);
}

}  // namespace intarsia::cuda::sm90
