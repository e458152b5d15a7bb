// The PTX instructions of the portable kernels, one function each.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace intarsia::cuda::sm80 {

__device__ __forceinline__ unsigned char* dynamic_shared() {
  extern __shared__ __align__(128) unsigned char bytes[];
  return bytes;
}

/// threadIdx.x, read anew: what follows from it is then recomputed where it is needed instead of kept in registers from tile to
/// tile, which spills.
__device__ __forceinline__ int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

/// Copies 16 bytes to shared memory, or writes 16 zeros when they are not `here`; `from` must be a readable address either way.
__device__ __forceinline__ void copy_async(std::uint32_t to, const void* from, bool here) {
  asm volatile(
      "{\n.reg .pred ignored;\nsetp.eq.u32 ignored, %2, 0;\ncp.async.cg.shared.global.L2::128B [%0], [%1], 16, ignored;\n}" ::
          "r"(to),
      "l"(from), "r"(static_cast<std::uint32_t>(here))
      : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits until at most `kPending` groups of this thread are still under way.
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

/// Four 8x8 matrices of 16-bit elements; lane 8 i + r gives the address of row r of matrix i. Lane l gets the elements 2 (l %
/// 4) and the next of row l / 4 of each, or with kTranspose of column l / 4.
template <bool kTranspose>
__device__ __forceinline__ void load_matrices(std::uint32_t address, std::uint32_t (&r)[4]) {
  if constexpr (kTranspose)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ std::uint64_t load_shared(std::uint32_t address) {
  std::uint64_t bits;
  asm volatile("ld.shared.b64 %0, [%1];" : "=l"(bits) : "r"(address) : "memory");
  return bits;
}

/// c (16, 8) += a (16, 16) b (16, 8). c: rows l / 4 (0, 1) and l / 4 + 8 (2, 3), columns 2 (l % 4) and the next.
template <class T>
__device__ __forceinline__ void multiply(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace intarsia::cuda::sm80
