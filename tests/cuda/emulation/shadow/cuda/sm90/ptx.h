// src/cuda/sm90/ptx.h, on the emulation. What cannot go wrong here does nothing: registers, fences that order what is in order,
// the launch beside a predecessor.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/sm80/ptx.h"
#include "hopper.h"

namespace intarsia::cuda::sm90::ptx {

inline std::uint32_t shared_address(const void* pointer) { return emulation::shared_address(pointer); }

/// Any lane would do; not the first, which is easily taken for granted.
inline bool elect_one() {
  __syncwarp();
  return emulation::thread->lane == 13;
}

// ---- mbarriers

inline void barrier_init(std::uint32_t barrier, std::uint32_t arrivals) { emulation::barrier_init(barrier, arrivals); }
inline void fence_barrier_init() {}
inline void barrier_expect(std::uint32_t barrier, std::uint32_t bytes) { emulation::barrier_expect(barrier, bytes); }
inline void barrier_arrive(std::uint32_t barrier) { emulation::barrier_arrive(barrier); }
inline void barrier_arrive_remote(std::uint32_t barrier, std::uint32_t cta) { emulation::barrier_arrive_remote(barrier, cta); }
inline void barrier_wait(std::uint32_t barrier, std::uint32_t parity) { emulation::barrier_wait(barrier, parity); }

// ---- cp.async

inline void copy16(std::uint32_t target, const void* source) { emulation::copy_async(target, source, 16); }
inline void copy16_or_zero(std::uint32_t target, const void* source, std::uint32_t bytes) {
  emulation::copy_async(target, source, static_cast<int>(bytes));
}
inline void copies_arrive(std::uint32_t barrier) { emulation::copies_arrive(barrier); }

// ---- TMA

/// Also of maps that are never used, and then hold nothing.
inline void prefetch_map(const CUtensorMap&) {}
inline void load_box(std::uint32_t target, const CUtensorMap& map, std::uint32_t barrier, int c0, int c1, int c2, int c3) {
  const auto self = static_cast<std::uint16_t>(1 << emulation::cluster_rank());
  emulation::load_box(target, map, barrier, self, {{c0, c1, c2, c3}});
}
inline void load_box_multicast(std::uint32_t target, const CUtensorMap& map, std::uint32_t barrier, std::uint16_t mask, int c0,
                               int c1, int c2, int c3) {
  emulation::load_box(target, map, barrier, mask, {{c0, c1, c2, c3}});
}
inline void prefetch_box(const CUtensorMap& map, int, int, int, int) { emulation::check_map(map); }
inline void store_box(const CUtensorMap& map, std::uint32_t source, int c0, int c1, int c2, int c3) {
  emulation::store_box(map, source, false, {{c0, c1, c2, c3}});
}
inline void add_box(const CUtensorMap& map, std::uint32_t source, int c0, int c1, int c2, int c3) {
  emulation::store_box(map, source, true, {{c0, c1, c2, c3}});
}
inline void commit_stores() { emulation::commit_stores(); }
template <int kPending>
void wait_stores_read() {
  emulation::wait_stores_read(kPending);
}
inline void wait_stores() { emulation::wait_stores(); }
inline void fence_async_proxy() { emulation::fence_async_proxy(); }

// ---- wgmma

inline void wgmma_fence() {}
inline void wgmma_commit() { emulation::commit_wgmma(); }
template <int kPending>
void wgmma_wait() {
  emulation::wait_wgmma(kPending);
}

// ---- matrices in shared memory

struct Gift {
  std::uint32_t address, r[4];
};
/// Lane l writes row l % 8 of matrix l / 8; of a row 4 lanes have two elements each, of a transposed one 8 lanes one.
template <bool kTranspose>
void store_matrices(const Gift& mine) {
  const unsigned char* all = emulation::gather_warp(&mine, sizeof mine);
  const int matrix = emulation::thread->lane / 8, row = emulation::thread->lane % 8;
  unsigned banks = 0;
  for (int i = 0; i < 8; ++i) banks |= 1u << (emulation::gift<Gift>(all, matrix * 8 + i).address / 16 % 8);
  if (banks != 0xff) emulation::fail("stmatrix rows of one matrix share banks");
  std::uint16_t elements[8];
  for (int column = 0; column < 8; ++column) {
    const int from = kTranspose ? column * 4 + row / 2 : row * 4 + column / 2, half = kTranspose ? row % 2 : column % 2;
    elements[column] = static_cast<std::uint16_t>(emulation::gift<Gift>(all, from).r[matrix] >> (16 * half));
  }
  emulation::write_shared(mine.address, elements, sizeof elements);
}
inline void store_matrix(std::uint32_t address, std::uint32_t r0, std::uint32_t r1, std::uint32_t r2, std::uint32_t r3) {
  store_matrices<false>({address, {r0, r1, r2, r3}});
}
inline void store_matrix_transposed(std::uint32_t address, std::uint32_t r0, std::uint32_t r1, std::uint32_t r2,
                                    std::uint32_t r3) {
  store_matrices<true>({address, {r0, r1, r2, r3}});
}
inline void load_matrix(std::uint32_t address, std::uint32_t (&r)[4]) { sm80::load_matrices<false>(address, r); }
inline void store_shared(std::uint32_t address, float value) { emulation::write_shared(address, &value, sizeof value); }
inline void store_shared(std::uint32_t address, float a, float b) {
  const float pair[2] = {a, b};
  emulation::write_shared(address, pair, sizeof pair);
}

// ---- clusters, registers, named barriers, dependent launch

inline std::uint32_t cluster_rank() { return emulation::cluster_rank(); }
inline void cluster_sync() { emulation::cluster_barrier(); }
template <int kRegisters>
void grow_registers() {}
template <int kRegisters>
void shrink_registers() {}
inline void named_sync(int barrier, int threads) { emulation::named_barrier(barrier, threads, true); }
inline void named_arrive(int barrier, int threads) { emulation::named_barrier(barrier, threads, false); }
inline void wait_for_predecessor() {}
inline void let_successor_start() {}

}  // namespace intarsia::cuda::sm90::ptx
