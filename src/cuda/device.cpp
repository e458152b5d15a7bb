#include <cuda.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <new>

#include "cuda/cuda.h"
#include "cuda/launch.h"

namespace intarsia::cuda {
namespace {

constexpr int kMaxDevices = 64;

/// The driver's functions for contexts, from the driver that is loaded, so that nothing links libcuda.
class Driver {
 public:
  static const Driver& loaded() {
    static const Driver driver;
    return driver;
  }

  decltype(&cuDeviceGet) device_get;
  decltype(&cuDevicePrimaryCtxRetain) primary_context_retain;
  decltype(&cuCtxGetCurrent) get_current;
  decltype(&cuCtxPushCurrent) push;
  decltype(&cuCtxPopCurrent) pop;
  decltype(&cuCtxGetDevice) get_device;
  decltype(&cuStreamGetCtx) stream_context;

 private:
  Driver() {
    find("cuDeviceGet", device_get);
    find("cuDevicePrimaryCtxRetain", primary_context_retain);
    find("cuCtxGetCurrent", get_current);
    find("cuCtxPushCurrent", push);
    find("cuCtxPopCurrent", pop);
    find("cuCtxGetDevice", get_device);
    find("cuStreamGetCtx", stream_context);
  }

  template <class Function>
  static void find(const char* name, Function*& function) {
    void* pointer = nullptr;
    cudaDriverEntryPointQueryResult found{};
    check(cudaGetDriverEntryPointByVersion(name, &pointer, 12000, cudaEnableDefault, &found),
          "cudaGetDriverEntryPointByVersion");
    if (pointer == nullptr) throw Unsupported("the CUDA driver has no " + std::string(name) + "; update it to 525 or later");
    function = reinterpret_cast<Function*>(pointer);
  }
};

void check_driver(CUresult result, const char* call) {
  if (result != CUDA_SUCCESS) throw Error(std::string(call) + " failed with code " + std::to_string(static_cast<int>(result)));
}

/// The context of a device that the runtime uses too. Held until the process ends, so that a guard costs a push and a pop at
/// most.
CUcontext primary_context(int index) {
  static std::array<std::once_flag, kMaxDevices> once;
  static std::array<CUcontext, kMaxDevices> contexts;
  CUcontext& context = contexts.at(static_cast<std::size_t>(index));
  std::call_once(once[static_cast<std::size_t>(index)], [&] {
    CUdevice device = 0;
    check_driver(Driver::loaded().device_get(&device, index), "cuDeviceGet");
    check_driver(Driver::loaded().primary_context_retain(&context, device), "cuDevicePrimaryCtxRetain");
  });
  return context;
}

CUdevice device_of(CUcontext context) {
  const Driver& driver = Driver::loaded();
  CUdevice device = 0;
  check_driver(driver.push(context), "cuCtxPushCurrent");
  const CUresult status = driver.get_device(&device);
  driver.pop(&context);
  check_driver(status, "cuCtxGetDevice");
  return device;
}

[[noreturn]] void refuse_stream(const char* call, int device) {
  throw InvalidArgument(std::string(call) + ": stream: expected a stream of cuda:" + std::to_string(device) +
                        ", where the tensors are, got one of another device or one that is no longer there; pass a stream " +
                        "created while that device is current");
}

}  // namespace

void fail(cudaError_t status, const char* call) {
  cudaGetLastError();
  if (status == cudaErrorInvalidResourceHandle) {  // streams are the only handles that are passed on
    int device = 0;
    cudaGetDevice(&device);
    refuse_stream(call, device);
  }
  throw Error(std::string(call) + ": " + cudaGetErrorString(status));
}

DeviceGuard::DeviceGuard(int index) {
  CUcontext current = nullptr, wanted = primary_context(index);
  check_driver(Driver::loaded().get_current(&current), "cuCtxGetCurrent");
  if (current == wanted) return;  // as a rule: guards are nested, and the caller's device is the tensors'
  check_driver(Driver::loaded().push(wanted), "cuCtxPushCurrent");
  pushed_ = true;
}

DeviceGuard::~DeviceGuard() {
  CUcontext popped = nullptr;
  if (pushed_) Driver::loaded().pop(&popped);
}

void check_stream(const char* operation, int device, void* stream) {
  if (stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread) return;  // the current device's
  CUcontext context = nullptr, wanted = primary_context(device);
  const CUresult status = Driver::loaded().stream_context(static_cast<CUstream>(stream), &context);
  const bool gone =
      status == CUDA_ERROR_INVALID_HANDLE || status == CUDA_ERROR_INVALID_CONTEXT || status == CUDA_ERROR_CONTEXT_IS_DESTROYED;
  if (gone) refuse_stream(operation, device);
  check_driver(status, "cuStreamGetCtx");  // or what a kernel before this call has done
  if (context != wanted && device_of(context) != device_of(wanted)) refuse_stream(operation, device);
}

const DeviceFigures& device_figures(int index) {
  static std::array<std::once_flag, kMaxDevices> once;
  static std::array<DeviceFigures, kMaxDevices> figures;
  DeviceFigures& f = figures.at(static_cast<std::size_t>(index));
  std::call_once(once[static_cast<std::size_t>(index)], [&] {
    const auto ask = [&](int& value, cudaDeviceAttr attribute) {
      check(cudaDeviceGetAttribute(&value, attribute, index), "cudaDeviceGetAttribute");
    };
    ask(f.multiprocessors, cudaDevAttrMultiProcessorCount);
    ask(f.major, cudaDevAttrComputeCapabilityMajor);
    ask(f.minor, cudaDevAttrComputeCapabilityMinor);
    ask(f.shared_bytes_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  });
  return f;
}

void* StreamAllocator::allocate(std::size_t bytes) {
  const DeviceGuard guard(device_);
  void* pointer = nullptr;
  const cudaError_t status = cudaMallocAsync(&pointer, bytes, stream_of(stream_));
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // told by the exception, not once more by the caller's next look
    throw std::bad_alloc();
  }
  check(status, "cudaMallocAsync");
  return pointer;
}

void StreamAllocator::deallocate(void* pointer, std::size_t) noexcept try {
  const DeviceGuard guard(device_);  // without it the default stream would be that of whatever device is current
  check(cudaFreeAsync(pointer, stream_of(stream_)), "cudaFreeAsync");
} catch (...) {  // a device that failed, or a process that ends: the next call says so, and there is nothing to give back to
}

std::string device_problem(int index) {
  static std::array<std::atomic<bool>, kMaxDevices> usable;  // what was found once: every operation asks
  const bool possible = index >= 0 && index < kMaxDevices;
  if (possible && usable[static_cast<std::size_t>(index)].load(std::memory_order_relaxed)) return "";
  int count = 0;
  if (const cudaError_t status = cudaGetDeviceCount(&count); status != cudaSuccess) {
    cudaGetLastError();  // a machine without a driver must not leave an error behind for the next call
    return std::string("no CUDA device can be used: ") + cudaGetErrorString(status);
  }
  if (index < 0 || index >= std::min(count, kMaxDevices))
    return "there is no CUDA device " + std::to_string(index) + ", only " + std::to_string(count);
  const DeviceFigures& f = device_figures(index);
  if (f.major < 8)
    return "compute capability " + std::to_string(f.major) + "." + std::to_string(f.minor) +
           " is below 8.0 (Ampere), the oldest supported";
  usable[static_cast<std::size_t>(index)].store(true, std::memory_order_relaxed);
  return "";
}

}  // namespace intarsia::cuda
