// wgmma m64nNk16 with both operands in shared memory, warp by warp: a warp has 16 rows of D, and reads shared memory when it
// waits, or when it commits.
#include "fibres.h"

namespace emulation {
namespace {

constexpr int kMostN = 256, kK = 16, kRows = 16;

/// A matrix descriptor with the 128-byte swizzle.
struct Matrix {
  std::uint32_t start, leading, stride;
  bool mn_major;

  Matrix(std::uint64_t descriptor, bool mn)
      : start(field(descriptor, 0)), leading(field(descriptor, 16)), stride(field(descriptor, 32)), mn_major(mn) {
    if (descriptor >> 62 != 1) fail("a wgmma descriptor without the 128-byte swizzle");
    if ((descriptor >> 14 & 3) != 0 || (descriptor >> 30 & 3) != 0 || (descriptor >> 46 & 0x3fff) != 0)
      fail("a wgmma descriptor with bits outside of its fields: an address past 256 KiB?");
    if (start % 1024 >= (mn ? 1 : 128)) fail("a wgmma operand whose tile is not 1024-byte aligned");
  }
  static std::uint32_t field(std::uint64_t descriptor, int bit) {
    return static_cast<std::uint32_t>(descriptor >> bit & 0x3fff) << 4;
  }
  /// 8 elements along the contiguous axis: K-major, k and the next 7 of row mn; MN-major, mn and the next 7 of k.
  const std::uint16_t* eight(Block& block, int mn, int k) const {
    const auto m = static_cast<std::uint32_t>(mn), n = static_cast<std::uint32_t>(k);
    const std::uint32_t linear = mn_major ? start + m / 64 * leading + n / 8 * stride + n % 8 * 128 + m % 64 * 2
                                          : start + m / 8 * stride + m % 8 * 128 + n * 2;
    return reinterpret_cast<const std::uint16_t*>(shared_at(block, linear ^ (linear >> 7 & 7) << 4, 16, "wgmma"));
  }
};

float widen(std::uint16_t bits, bool half) {
  return half ? static_cast<float>(std::bit_cast<__half>(bits)) : std::bit_cast<float>(std::uint32_t{bits} << 16);
}

/// put(mn, k, value) for all elements of rows first .. first + rows - 1.
template <class Put>
void read(Block& block, const Matrix& matrix, int first, int rows, bool half, Put&& put) {
  const int mn_step = matrix.mn_major ? 8 : 1, k_step = matrix.mn_major ? 1 : 8;
  for (int mn = 0; mn < rows; mn += mn_step)
    for (int k = 0; k < kK; k += k_step) {
      const std::uint16_t* const eight = matrix.eight(block, first + mn, k);
      for (int i = 0; i < 8; ++i) put(matrix.mn_major ? mn + i : mn, matrix.mn_major ? k : k + i, widen(eight[i], half));
    }
}

struct Tile {
  float d[kRows][kMostN], a[kRows][kK], b[kK][kMostN];
};

__attribute__((target_clones("avx512f", "arch=haswell", "default"))) void multiply_add(Tile& t, int n) {
  for (int row = 0; row < kRows; ++row)
    for (int k = 0; k < kK; ++k) {
      const float a = t.a[row][k];
      for (int j = 0; j < n; ++j) t.d[row][j] += a * t.b[k][j];
    }
}

/// body(element of the tile, register of the lane that has it)
template <class Body>
void for_registers(Tile& t, const Product& p, Body&& body) {
  for (int lane = 0; lane < kWarp; ++lane)
    for (int i = 0; i < p.operands.n / 2; ++i)
      body(t.d[lane / 4 + i / 2 % 2 * 8][i / 4 * 8 + lane % 4 * 2 + i % 2], p.d[lane][i]);
}

void multiply(Tile& t, Block& block, const Operands& o, int warp) {
  read(block, Matrix(o.a, o.a_mn_major), warp % 4 * kRows, kRows, o.half, [&](int m, int k, float x) { t.a[m][k] = x; });
  read(block, Matrix(o.b, o.b_mn_major), 0, o.n, o.half, [&](int n, int k, float x) { t.b[k][n] = x; });
  if (!o.add) std::memset(t.d, 0, sizeof t.d);
  multiply_add(t, o.n);
}

/// All of a warpgroup's warps must issue the same.
void compare_with_warpgroup(Block& block, int warp, std::size_t number, const Operands& o) {
  auto& all = block.wgmma[static_cast<std::size_t>(warp / 4)];
  if (number == all.size()) all.push_back(o);
  else if (all[number] != o) fail("warps of a warpgroup issue different wgmma");
}

/// The warp's products before number `end`; those of one D follow each other in a tile of it.
void perform_until(std::size_t end) {
  static Tile tile;
  Fibre& f = self();
  Warp& w = f.home->warps[static_cast<std::size_t>(f.warp)];
  std::vector<Product> now;
  for (; w.performed < end; ++w.performed) {
    now.push_back(w.products.front());
    w.products.pop_front();
    if (now.back().lanes != kWarp) fail("a wgmma that not all lanes of a warp have issued");
    compare_with_warpgroup(*f.home, f.warp, w.performed, now.back().operands);
  }
  while (!now.empty()) {
    const Product first = now.front();
    for_registers(tile, first, [](float& d, const float& of_lane) { d = of_lane; });
    std::erase_if(now, [&](const Product& p) {
      if (p.d[0] != first.d[0]) return false;
      multiply(tile, *f.home, p.operands, f.warp);
      return true;
    });
    for_registers(tile, first, [](const float& d, float& of_lane) { of_lane = d; });
  }
}

}  // namespace

void issue_wgmma(const Operands& operands, float* d) {
  Fibre& f = self();
  Warp& w = f.home->warps[static_cast<std::size_t>(f.warp)];
  const std::size_t place = f.issued++ - w.performed;
  if (place == w.products.size()) w.products.push_back({operands});
  Product& p = w.products[place];
  if (p.operands != operands) fail("lanes of a warp issue different wgmma");
  p.d[f.lane] = d;
  ++p.lanes;
}

void commit_wgmma() {
  Fibre& f = self();
  f.committed.push_back(f.issued);
  const Warp& w = f.home->warps[static_cast<std::size_t>(f.warp)];
  const bool last_lane = w.performed < f.issued && w.products[f.issued - 1 - w.performed].lanes == kWarp;
  if (reads == When::early && last_lane) perform_until(f.issued);
}

void wait_wgmma(int pending) {
  Fibre& f = self();
  gather_warp(nullptr, 0);
  while (static_cast<int>(f.committed.size()) > pending) {
    perform_until(f.committed.front());
    f.committed.pop_front();
  }
}

void finish_wgmma(const Fibre& f) {
  const Warp& w = f.home->warps[static_cast<std::size_t>(f.warp)];
  if (!f.committed.empty() || !w.products.empty()) fail("a thread ends with wgmma under way");
}

}  // namespace emulation
