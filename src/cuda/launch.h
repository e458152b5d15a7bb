// What every launcher needs: checked launches, the device's figures (read once), the device guard, dtype dispatch on the GPU.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "base/dispatch.h"
#include "intarsia/error.h"
#include "intarsia/types.h"

namespace intarsia::cuda {

/// Throws what a failed call means, and leaves no error behind for the caller's own next look.
[[noreturn]] void fail(cudaError_t status, const char* call);

/// `call` is the CUDA function, or the operation of a launch.
inline void check(cudaError_t status, const char* call) {
  if (status != cudaSuccess) fail(status, call);
}

struct DeviceFigures {
  int multiprocessors = 0;
  int major = 0, minor = 0;
  int shared_bytes_per_block = 0;  ///< the opt-in maximum
};

/// Figures of a device, asked once per process.
const DeviceFigures& device_figures(int index);

/// Makes a device current, and afterwards what was current before: in a thread that has not used CUDA yet (torch's backward
/// runs in such threads) nothing. There cudaGetDevice says 0, and setting that again would create a context on GPU 0, hundreds
/// of MB that nobody asked for; so the device's context is pushed on the thread's stack and popped from it. The driver's own
/// functions, the tensor-map encoder among them, need it there.
class DeviceGuard {
 public:
  explicit DeviceGuard(int index);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  bool pushed_ = false;
};

/// The device type of a storage type: bfloat16 of base/half.h is __nv_bfloat16 on the GPU, and so on.
template <class T>
struct OnDevice {
  using type = T;
};
template <>
struct OnDevice<bfloat16> {
  using type = __nv_bfloat16;
};
template <>
struct OnDevice<float16> {
  using type = __half;
};

inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

inline cudaStream_t stream_of(void* stream) { return static_cast<cudaStream_t>(stream); }

}  // namespace intarsia::cuda
