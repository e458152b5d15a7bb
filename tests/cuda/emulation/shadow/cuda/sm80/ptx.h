// src/cuda/sm80/ptx.h, on the emulation.
#pragma once

#include <cstdint>
#include <type_traits>

namespace intarsia::cuda::sm80 {

inline unsigned char* dynamic_shared() { return emulation::shared_memory(); }
inline int thread_index() { return static_cast<int>(threadIdx.x); }
inline std::uint32_t shared_address(const void* pointer) { return emulation::shared_address(pointer); }
inline void copy_async(std::uint32_t to, const void* from, bool here) { emulation::copy_async(to, from, here ? 16 : 0); }
void copy_async(std::uint32_t to, const void* from, int bytes) = delete;  // no number of bytes taken for a yes
inline void commit_copies() { emulation::commit_copies(); }
template <int kPending>
void wait_copies() {
  emulation::wait_copies(kPending);
}

template <bool kTranspose>
void load_matrices(std::uint32_t address, std::uint32_t (&r)[4]) {
  const unsigned char* all = emulation::gather_warp(&address, sizeof address);
  const int lane = emulation::thread->lane;
  const auto row = [&](int i) { return emulation::gift<std::uint32_t>(all, i); };
  for (int m = 0; m < 4; ++m) {
    unsigned banks = 0;
    for (int i = 0; i < 8; ++i) banks |= 1u << (row(8 * m + i) / 16 % 8);
    if (banks != 0xff) emulation::fail("ldmatrix rows of one matrix share banks");
    std::uint16_t pair[2];
    for (int i = 0; i < 2; ++i) {
      const int line = kTranspose ? lane % 4 * 2 + i : lane / 4, column = kTranspose ? lane / 4 : lane % 4 * 2 + i;
      std::memcpy(&pair[i], emulation::shared_at(row(8 * m + line), 16, "ldmatrix") + 2 * column, 2);
    }
    r[m] = pair[0] | static_cast<std::uint32_t>(pair[1]) << 16;
  }
}

inline std::uint64_t load_shared(std::uint32_t address) {
  std::uint64_t bits;
  std::memcpy(&bits, emulation::shared_at(address, 8, "ld.shared"), 8);
  return bits;
}

template <class T>
void multiply(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  struct Gift {
    float a[8], b[4];  // a: register, half; b the same
  } mine;
  const auto split = [](std::uint32_t bits, float* to) {
    T pair[2];
    std::memcpy(static_cast<void*>(pair), &bits, 4);
    to[0] = static_cast<float>(pair[0]);
    to[1] = static_cast<float>(pair[1]);
  };
  for (int i = 0; i < 4; ++i) split(a[i], mine.a + 2 * i);
  split(b0, mine.b);
  split(b1, mine.b + 2);
  const unsigned char* all = emulation::gather_warp(&mine, sizeof mine);
  const int lane = emulation::thread->lane;
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4, upper = i / 2, column = lane % 4 * 2 + i % 2;
    float sum = c[i];
    for (int k = 0; k < 16; ++k)
      sum += emulation::gift<Gift>(all, row * 4 + k % 8 / 2).a[2 * (upper + 2 * (k / 8)) + k % 2] *
             emulation::gift<Gift>(all, column * 4 + k % 8 / 2).b[2 * (k / 8) + k % 2];
    c[i] = sum;
  }
}

}  // namespace intarsia::cuda::sm80
