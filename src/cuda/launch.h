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

/// Throws intarsia::Error with the call and CUDA's own words.
inline void check(cudaError_t status, const char* call) {
  if (status != cudaSuccess) throw Error(std::string(call) + ": " + cudaGetErrorString(status));
}

/// After a launch; "kernel" names the operation.
inline void check_launch(const char* kernel) { check(cudaGetLastError(), kernel); }

struct DeviceFigures {
  int multiprocessors = 0;
  int major = 0, minor = 0;
  int shared_bytes_per_block = 0;  ///< the opt-in maximum
};

/// Figures of a device, asked once per process.
const DeviceFigures& device_figures(int index);

/// Makes a device current and puts the former one back. Always sets it: in a thread that has not used CUDA yet (torch's
/// backward runs in such threads) that is what gives the driver's own functions, the tensor-map encoder among them, a context.
class DeviceGuard {
 public:
  explicit DeviceGuard(int index) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    check(cudaSetDevice(index), "cudaSetDevice");
    changed_ = before_ != index;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
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
