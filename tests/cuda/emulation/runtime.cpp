// The part of the CUDA runtime that the kernels' launchers and the test drivers call.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <string_view>

#include "fibres.h"

namespace {

struct Mapping {
  void* base;
  std::size_t mapped, used;
};
std::map<void*, Mapping> mappings;  // by the pointer that cudaMalloc gave

}  // namespace

void emulation::check_global(const void* pointer, std::size_t bytes, const char* what) {
  const auto* const first = static_cast<const char*>(pointer);
  auto found = mappings.upper_bound(const_cast<void*>(pointer));
  if (found != mappings.begin()) {
    --found;
    if (first + bytes <= static_cast<const char*>(found->first) + found->second.used) return;
  }
  std::fprintf(stderr, "emulation: %s: %zu bytes at %p\n", what, bytes, pointer);
  fail("global memory that was not allocated");
}

extern "C" {

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t used = (bytes + 15) / 16 * 16, pages = (used + page - 1) / page * page;
  void* base = mmap(nullptr, pages + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) return cudaErrorMemoryAllocation;
  mprotect(static_cast<char*>(base) + pages, page, PROT_NONE);
  *pointer = static_cast<char*>(base) + pages - used;
  mappings[*pointer] = {base, pages + page, used};
  return cudaSuccess;
}
cudaError_t cudaFree(void* pointer) {
  const auto found = mappings.find(pointer);
  if (found == mappings.end()) return pointer ? cudaErrorInvalidValue : cudaSuccess;
  munmap(found->second.base, found->second.mapped);
  mappings.erase(found);
  return cudaSuccess;
}
cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t) { return cudaMalloc(pointer, bytes); }
cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return cudaFree(pointer); }
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) { return cudaMemset(to, value, bytes); }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "an error of the emulation"; }
cudaError_t cudaGetDevice(int* index) {
  *index = 0;
  return cudaSuccess;
}
/// Beside the encoder of tensor maps these are calls about contexts, and there is one device: they succeed and do nothing.
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult*) {
  const bool encoder = std::string_view(name) == "cuTensorMapEncodeTiled";
  *function =
      encoder ? reinterpret_cast<void*>(&emulation::encode_tiled) : reinterpret_cast<void*>(+[] { return CUDA_SUCCESS; });
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    // Few CTAs, so that each takes several tiles, and yet two pairs.
    case cudaDevAttrMultiProcessorCount: *value = emulation::hopper ? 4 : 2; break;
    case cudaDevAttrComputeCapabilityMajor: *value = emulation::hopper ? 9 : 8; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (emulation::hopper ? 227 : 163) * 1024; break;
    default: *value = 0;
  }
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaEventCreate(cudaEvent_t*) { return cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) {
  *ms = 1.0f;
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  *stream = nullptr;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return cudaStreamCreate(stream); }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }

}  // extern "C"
