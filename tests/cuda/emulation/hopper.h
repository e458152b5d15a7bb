// The instructions of src/cuda/sm90/ptx.h and wgmma.h on the emulation. A barrier that is arrived at too often, a box outside
// of shared memory, a wgmma that not all warps of a warpgroup issue and the like end the program with a word about it.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

namespace emulation {

// ---- mbarriers, of this block; `cta` is another one of the cluster

void barrier_init(std::uint32_t barrier, std::uint32_t arrivals);
void barrier_expect(std::uint32_t barrier, std::uint32_t bytes);
void barrier_arrive(std::uint32_t barrier);
void barrier_arrive_remote(std::uint32_t barrier, std::uint32_t cta);
void barrier_wait(std::uint32_t barrier, std::uint32_t parity);
/// Arrives when all earlier cp.async of this thread have landed.
void copies_arrive(std::uint32_t barrier);

// ---- named barriers, clusters

void named_barrier(int barrier, int threads, bool wait);
std::uint32_t cluster_rank();
void cluster_barrier();

// ---- TMA

CUresult encode_tiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data, const cuuint64_t* dims,
                      const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* steps, CUtensorMapInterleave,
                      CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

struct Coordinates {
  int c[4];
};
void check_map(const CUtensorMap& map);
/// Into every CTA of `mask`, at the same offsets there.
void load_box(std::uint32_t target, const CUtensorMap& map, std::uint32_t barrier, std::uint16_t mask, Coordinates at);
void store_box(const CUtensorMap& map, std::uint32_t source, bool add, Coordinates at);
void commit_stores();
void wait_stores_read(int pending);
void wait_stores();

// ---- writes of threads: TMA must not read them before the thread has fenced

void write_shared(std::uint32_t address, const void* from, std::size_t bytes);
void fence_async_proxy();

// ---- wgmma

struct Operands {
  std::uint64_t a, b;  ///< descriptors
  bool add, a_mn_major, b_mn_major, half;
  int n;
  bool operator==(const Operands&) const = default;
};
void issue_wgmma(const Operands& operands, float* d);
void commit_wgmma();
void wait_wgmma(int pending);

}  // namespace emulation
