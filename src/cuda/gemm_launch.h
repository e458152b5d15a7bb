// Launching GEMM kernels: a persistent grid, and shared memory beyond 48 KB allowed once per kernel and device.
#pragma once

#include <algorithm>
#include <array>
#include <mutex>

#include "cuda/launch.h"

namespace intarsia::cuda {

template <class Argument>
void launch(const char* operation, void (*kernel)(Argument), std::int64_t grid, int threads, int shared_bytes, void* stream,
            const Argument& argument) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(grid));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
  config.stream = stream_of(stream);
  check(cudaLaunchKernelEx(&config, kernel, argument), operation);
}

/// Lets a kernel have `bytes` of dynamic shared memory on a device.
template <auto kKernel>
void allow_shared(int device, int bytes) {
  static std::array<std::once_flag, 64> once;
  std::call_once(once.at(static_cast<std::size_t>(device)), [&] {
    check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kKernel), cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
          "cudaFuncSetAttribute");
  });
}

/// Most m tiles that `rows` rows over `experts` experts can need: every expert may end in a part of a tile.
inline std::int64_t most_row_tiles(std::int64_t rows, std::int64_t experts, std::int64_t tile) {
  return std::min(rows, rows / tile + experts);
}

/// CTAs of a persistent grid for at most `tiles` tiles. Kernels count tiles in int.
inline std::int64_t persistent_grid(const char* operation, std::int64_t tiles, std::int64_t resident) {
  if (tiles + resident > 0x7fffffff)
    throw Unsupported(std::string(operation) + ": more than 2^31 tiles; split the rows over several calls");
  return std::min(tiles, resident);
}

}  // namespace intarsia::cuda
