// Device values on the host, for checks that somebody asked for: the one place of the CUDA backend that waits.
#include "cuda/cuda.h"
#include "cuda/launch.h"

namespace intarsia::cuda {

bool is_captured(int device, void* stream) {
  const DeviceGuard guard(device);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(stream_of(stream), &status);
  if (error == cudaErrorStreamCaptureImplicit) {  // the legacy stream, which would take part in another stream's capture
    cudaGetLastError();
    return true;
  }
  check(error, "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

void copy_to_host(void* to, const void* from, std::size_t bytes, int device, void* stream) {
  const DeviceGuard guard(device);
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream_of(stream)), "cudaMemcpyAsync");
  check(cudaStreamSynchronize(stream_of(stream)), "cudaStreamSynchronize");
}

}  // namespace intarsia::cuda
