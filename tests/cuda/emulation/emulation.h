// Runs CUDA kernels on the CPU, one cluster of blocks at a time, a fibre per thread: a machine without a GPU can check what a
// kernel computes, that its barriers and copies are waited for, and that it stays inside its buffers. Force-included (-include)
// before kernel code that g++ compiles as C++; the PTX of src/cuda/sm80/ptx.h, sm90/ptx.h, sm90/wgmma.h, routing/mma.cuh and
// fast_float.h is replaced by the headers in shadow/. Allocations end at a page that cannot be touched, so that reading past
// the end faults. What the Hopper kernels need beside this: hopper.h.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>

using std::exp;  // in device code the plain names are overloaded
using std::fabs;
using std::fmax;
using std::log;
using std::max;
using std::min;

#undef __shared__
#undef __launch_bounds__
#undef __grid_constant__
#undef __forceinline__
#define __shared__ static
#define __launch_bounds__(...)
#define __grid_constant__
#define __forceinline__ inline
#define __CUDACC__ 1

namespace emulation {

constexpr int kWarp = 32;
constexpr int kSlotBytes = 64;

struct Thread {
  dim3 index, block, blocks, threads;  // what threadIdx, blockIdx, gridDim and blockDim are
  int lane = 0, warp = 0;
};
extern Thread* thread;  // the running one

/// When what a thread has started happens: at once, or as late as the waits allow. What is right must be right both ways.
enum class When { early, late };
extern When copies;  ///< into shared memory: cp.async, TMA loads
extern When reads;   ///< of shared memory: wgmma, TMA stores
/// Threads in ascending or descending order between barriers.
extern bool reversed;
/// The device is a Hopper GPU, else an Ampere one.
extern bool hopper;

struct Grid {
  dim3 blocks, threads;
  unsigned cluster;  ///< blocks along x that run together
  std::size_t shared_bytes;
};
void run(const Grid& grid, const std::function<void()>& body);

void block_barrier();
/// All lanes of a warp give `bytes` bytes; returns the 32 gifts, kSlotBytes apart, valid until the next but one gathering.
const unsigned char* gather_warp(const void* mine, std::size_t bytes);

unsigned char* shared_memory();
std::uint32_t shared_address(const void* pointer);
/// The block's shared memory at an address, which must be a multiple of `bytes`, a power of 2; `what` does so.
unsigned char* shared_at(std::uint32_t address, std::size_t bytes, const char* what);
void copy_async(std::uint32_t to, const void* from, int bytes);
void commit_copies();
void wait_copies(int pending);
[[noreturn]] void fail(const char* what);

template <class T>
const T& gift(const unsigned char* all, int lane) {
  return *reinterpret_cast<const T*>(all + lane * kSlotBytes);
}

template <class... Parameters, class... Arguments>
cudaError_t launch_kernel(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), const Arguments&... arguments) {
  Grid grid{config->gridDim, config->blockDim, 1, config->dynamicSmemBytes};
  for (unsigned i = 0; i < config->numAttrs; ++i)
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) grid.cluster = config->attrs[i].val.clusterDim.x;
  run(grid, [&] { kernel(arguments...); });
  return cudaSuccess;
}

}  // namespace emulation

#define cudaLaunchKernelEx ::emulation::launch_kernel
extern dim3 threadIdx, blockIdx, gridDim, blockDim;  // of the running fibre

inline void __syncthreads() { emulation::block_barrier(); }
inline void __syncwarp(unsigned = 0xffffffffu) { emulation::gather_warp(nullptr, 0); }

template <class T>
T __shfl_sync(unsigned, T value, int lane, int width = emulation::kWarp) {
  const int from = (emulation::thread->lane & -width) + (lane & (width - 1));
  return emulation::gift<T>(emulation::gather_warp(&value, sizeof value), from);
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  const int from = emulation::thread->lane ^ mask;
  return emulation::gift<T>(emulation::gather_warp(&value, sizeof value), from);
}
template <class T>
T __shfl_up_sync(unsigned, T value, int delta) {
  const int from = emulation::thread->lane - delta;
  const unsigned char* all = emulation::gather_warp(&value, sizeof value);
  return emulation::gift<T>(all, from < 0 ? emulation::thread->lane : from);
}
inline unsigned __ballot_sync(unsigned, bool mine) {
  const unsigned char* all = emulation::gather_warp(&mine, sizeof mine);
  unsigned bits = 0;
  for (int lane = 0; lane < emulation::kWarp; ++lane) bits |= unsigned{emulation::gift<bool>(all, lane)} << lane;
  return bits;
}
inline bool __any_sync(unsigned mask, bool mine) { return __ballot_sync(mask, mine) != 0; }
inline unsigned __match_any_sync(unsigned, int mine) {
  const unsigned char* all = emulation::gather_warp(&mine, sizeof mine);
  unsigned bits = 0;
  for (int lane = 0; lane < emulation::kWarp; ++lane) bits |= unsigned{emulation::gift<int>(all, lane) == mine} << lane;
  return bits;
}
template <class T>
T __reduce_max_sync(unsigned, T value) {
  const unsigned char* all = emulation::gather_warp(&value, sizeof value);
  for (int lane = 0; lane < emulation::kWarp; ++lane) value = max(value, emulation::gift<T>(all, lane));
  return value;
}
template <class T>
T __reduce_min_sync(unsigned, T value) {
  const unsigned char* all = emulation::gather_warp(&value, sizeof value);
  for (int lane = 0; lane < emulation::kWarp; ++lane) value = min(value, emulation::gift<T>(all, lane));
  return value;
}
inline int atomicAdd(int* to, int value) {
  const int before = *to;
  *to += value;
  return before;
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const std::uint64_t bytes = low | std::uint64_t{high} << 32;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>(bytes >> (8 * (selector >> (4 * i) & 7)) & 0xff) << (8 * i);
  return result;
}
inline int __clz(int bits) { return bits == 0 ? 32 : __builtin_clz(static_cast<unsigned>(bits)); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
template <class T>
T __ldg(const T* p) {
  return *p;
}
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline double __longlong_as_double(long long bits) { return std::bit_cast<double>(bits); }
inline long long __double_as_longlong(double x) { return std::bit_cast<long long>(x); }

template <class... Parameters>
cudaError_t cudaFuncSetAttribute(void (*)(Parameters...), cudaFuncAttribute, int) {
  return cudaSuccess;
}
