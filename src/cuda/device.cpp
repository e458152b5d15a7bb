#include <array>
#include <mutex>
#include <new>

#include "cuda/cuda.h"
#include "cuda/launch.h"

namespace intarsia::cuda {
namespace {

constexpr int kMaxDevices = 64;

}  // namespace

const DeviceFigures& device_figures(int index) {
  static std::array<std::once_flag, kMaxDevices> once;
  static std::array<DeviceFigures, kMaxDevices> figures;
  if (index < 0 || index >= kMaxDevices) throw InvalidArgument("device index: expected 0 to 63, got " + std::to_string(index));
  const auto i = static_cast<std::size_t>(index);
  std::call_once(once[i], [&] {
    DeviceFigures& f = figures[i];
    const auto ask = [&](int& value, cudaDeviceAttr attribute) {
      check(cudaDeviceGetAttribute(&value, attribute, index), "cudaDeviceGetAttribute");
    };
    ask(f.multiprocessors, cudaDevAttrMultiProcessorCount);
    ask(f.major, cudaDevAttrComputeCapabilityMajor);
    ask(f.minor, cudaDevAttrComputeCapabilityMinor);
    ask(f.shared_bytes_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  });
  return figures[i];
}

void* StreamAllocator::allocate(std::size_t bytes) {
  const DeviceGuard guard(device_);
  void* pointer = nullptr;
  const cudaError_t status = cudaMallocAsync(&pointer, bytes, stream_of(stream_));
  if (status == cudaErrorMemoryAllocation) throw std::bad_alloc();
  check(status, "cudaMallocAsync");
  return pointer;
}

void StreamAllocator::deallocate(void* pointer, std::size_t) noexcept { cudaFreeAsync(pointer, stream_of(stream_)); }

std::string device_problem(int index) {
  int count = 0;
  if (const cudaError_t status = cudaGetDeviceCount(&count); status != cudaSuccess) {
    cudaGetLastError();  // a machine without a driver must not leave an error behind for the next call
    return std::string("no CUDA device can be used: ") + cudaGetErrorString(status);
  }
  if (index >= count) return "there is no CUDA device " + std::to_string(index) + ", only " + std::to_string(count);
  const DeviceFigures& f = device_figures(index);
  if (f.major < 8)
    return "compute capability " + std::to_string(f.major) + "." + std::to_string(f.minor) +
           " is below 8.0 (Ampere), the oldest supported";
  return "";
}

}  // namespace intarsia::cuda
