// Shared memory of the Hopper kernels, element by element: what the gathers, TMA and stmatrix write against what wgmma's
// descriptors and TMA's boxes read, each by its documented layout (PTX ISA: asynchronous warpgroup matrices, stmatrix,
// swizzling modes), restated here on its own.
#include "cuda/sm90/addresses.h"

#include <gtest/gtest.h>

#include <set>
#include <utility>
#include <vector>

namespace intarsia::cuda::sm90 {
namespace {

constexpr std::uint32_t kSharedBytes = 227 * 1024;

/// The 128-byte swizzle: bits 4 to 6 of an address are exchanged with the help of bits 7 to 9.
std::uint32_t swizzle(std::uint32_t address) { return address ^ ((address >> 7 & 7) << 4); }

/// Shared memory that remembers which element (a pair of numbers) was written where. Nothing may be written twice.
class Memory {
 public:
  void write(std::uint32_t address, int i, int j, int bytes) {
    ASSERT_LE(address + static_cast<std::uint32_t>(bytes), kSharedBytes);
    ASSERT_EQ(address % static_cast<std::uint32_t>(bytes), 0u);
    ASSERT_EQ(bytes_[address].first, -1) << "address " << address << " is written twice";
    bytes_[address] = {i, j};
    written_ += bytes;
  }
  std::pair<int, int> read(std::uint32_t address) const { return bytes_.at(address); }
  int written() const { return written_; }

 private:
  std::vector<std::pair<int, int>> bytes_ = std::vector<std::pair<int, int>>(kSharedBytes, {-1, -1});
  int written_ = 0;
};

/// TMA: rows of 64 16-bit elements at `place`, element (i, first + j) of row i.
void load_box(Memory& memory, std::uint32_t place, int rows, int first_row, int first_column) {
  for (int i = 0; i < rows; ++i)
    for (int j = 0; j < 64; ++j)
      memory.write(swizzle(place + static_cast<std::uint32_t>(i * 128 + j * 2)), first_row + i, first_column + j, 2);
}

/// Where wgmma finds the elements of an operand.
class Operand {
 public:
  Operand(std::uint64_t descriptor, bool mn_major) : mn_major_(mn_major) {
    const auto field = [&](int bit) { return static_cast<std::uint32_t>(descriptor >> bit & 0x3fff) << 4; };
    start_ = field(0), leading_ = field(16), stride_ = field(32);
    EXPECT_EQ(descriptor >> 62, 1u) << "128-byte swizzle";
    EXPECT_EQ(descriptor >> 49 & 7, 0u) << "patterns begin at multiples of 1024";
  }
  /// Row or column `mn` of the matrix, k of 16.
  std::uint32_t operator()(int mn, int k) const {
    const auto i = static_cast<std::uint32_t>(mn), j = static_cast<std::uint32_t>(k);
    if (mn_major_) return swizzle(start_ + i % 64 * 2 + i / 64 * leading_ + j % 8 * 128 + j / 8 * stride_);
    return swizzle(start_ + i % 8 * 128 + i / 8 * stride_ + j * 2);
  }

 private:
  bool mn_major_;
  std::uint32_t start_, leading_, stride_;
};

/// As Consumer::multiply walks: every 16 k, and every m64 block of the left tile, from its first descriptor on. Elements were
/// written as (mn, k), or as (k, mn) when MN-major.
template <bool kMnMajor>
void check_operand(const Memory& memory, std::uint64_t first, int mn_size, int blocks) {
  for (int k = 0; k < kTileK; ++k)
    for (int m = 0; m < blocks; ++m) {
      const std::uint64_t step = static_cast<std::uint64_t>(k / 16) * kDescriptorStep<kMnMajor>;
      const Operand operand(first + step + static_cast<std::uint64_t>(m) * (kPanelBytes / 16), kMnMajor);
      for (int mn = 0; mn < mn_size; ++mn) {
        const int want = m * mn_size + mn;
        ASSERT_EQ(memory.read(operand(mn, k % 16)), kMnMajor ? std::pair(k, want) : std::pair(want, k)) << mn << ' ' << k;
      }
    }
}

/// Tiles at the beginning and at the end of shared memory: a descriptor's address has 14 bits.
std::vector<std::uint32_t> bases(std::uint32_t bytes) { return {0, 3 * 1024, (kSharedBytes - bytes) / 1024 * 1024}; }

TEST(GatheringThread, FillAKMajorTile) {
  constexpr int kRows = 128;
  for (const std::uint32_t base : bases(kRows * 128)) {
    Memory memory;
    for (int thread = 0; thread < 128; ++thread) {
      const GatheringThread mine(thread);
      for (int row = mine.first, i = 0; row < kRows; row += GatheringThread::kStep, ++i)
        for (int e = 0; e < 8; ++e)
          memory.write(base + mine.place() + static_cast<std::uint32_t>(i * GatheringThread::kStep * 128 + e * 2), row,
                       mine.chunk * 8 + e, 2);
    }
    EXPECT_EQ(memory.written(), kRows * 128);
    check_operand<false>(memory, tile_descriptor(base, 0), 64, 2);
  }
}

TEST(GatheringThread, FillTwoMnMajorPanels) {
  for (const std::uint32_t base : bases(2 * kPanelBytes)) {
    Memory memory;
    for (int thread = 0; thread < 128; ++thread) {
      const GatheringThread mine(thread);
      for (int k = mine.first, i = 0; k < kTileK; k += GatheringThread::kStep, ++i)
        for (int panel = 0; panel < 2; ++panel)
          for (int e = 0; e < 8; ++e)
            memory.write(base + mine.place() +
                             static_cast<std::uint32_t>(i * GatheringThread::kStep * 128 + panel * kPanelBytes + e * 2),
                         k, panel * 64 + mine.chunk * 8 + e, 2);
    }
    EXPECT_EQ(memory.written(), 2 * kPanelBytes);
    check_operand<true>(memory, tile_descriptor(base, kPanelBytes), 64, 2);
  }
}

/// Neighbouring threads read neighbouring bytes of one source row, 128 of them.
TEST(GatheringThread, ReadWholeLines) {
  for (int thread = 0; thread < 128; ++thread) {
    EXPECT_EQ(GatheringThread(thread).chunk, thread % 8);
    EXPECT_EQ(GatheringThread(thread).first, GatheringThread(thread / 8 * 8).first);
  }
}

/// The right operand comes in two boxes of rows, one from each CTA of a pair.
TEST(RightOperand, KMajorBoxesAreOneTile) {
  for (const int n : {64, 128, 192, 256})
    for (const std::uint32_t base : bases(static_cast<std::uint32_t>(n * 128))) {
      Memory memory;
      for (const int part : {0, 1})
        load_box(memory, base + static_cast<std::uint32_t>(part * n / 2 * 128), n / 2, part * n / 2, 0);
      check_operand<false>(memory, tile_descriptor(base, 0), n, 1);
    }
}

TEST(RightOperand, MnMajorPanelsAreOneTile) {
  for (const int n : {64, 128, 192, 256})
    for (const int cluster : {1, 2})
      for (const std::uint32_t base : bases(static_cast<std::uint32_t>(n * 128))) {
        Memory memory;
        const int rows = kTileK / cluster;  // a pair of CTAs shares a panel's k
        for (int panel = 0; panel < n / 64; ++panel)
          for (int part = 0; part < cluster; ++part)
            load_box(memory, base + static_cast<std::uint32_t>(panel * kPanelBytes + part * rows * 128), rows, part * rows,
                     panel * 64);
        check_operand<true>(memory, tile_descriptor(base, kPanelBytes), n, 1);
      }
}

// ---- epilogues

TEST(Fragment, IsThatOfWgmma) {
  std::set<std::pair<int, int>> seen;
  for (int warp = 0; warp < 4; ++warp)
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 32; ++i) {
        const std::pair place(row_of(warp, lane) + 8 * half_of(i), column_of(i, lane));
        // PTX ISA, "Register fragments for wgmma.mma_async.m64nNk16", matrix D: d[i] of lane %laneid
        EXPECT_EQ(place.first, 16 * warp + (lane >> 2) + ((i & 2) ? 8 : 0));
        EXPECT_EQ(place.second, (i >> 2) * 8 + (lane & 3) * 2 + (i & 1));
        seen.insert(place);
      }
  EXPECT_EQ(seen.size(), 64u * 64);
}

/// stmatrix.x4: row r of matrix q goes where lane 8 q + r points; register q of a lane holds elements (lane / 4, 2 * (lane % 4)
/// + {0, 1}) of matrix q, of its transpose with .trans. put_tile hands it pairs 4 j .. 4 j + 3 of the fragment.
template <class Place>
void put(Memory& memory, bool transposed, Place&& place) {
  for (int warp = 0; warp < 4; ++warp)
    for (int j = 0; j < 4; ++j)
      for (int q = 0; q < 4; ++q) {
        std::set<std::uint32_t> banks;
        for (int r = 0; r < 8; ++r) banks.insert(place(warp, 8 * q + r, j) % 128 / 16);
        EXPECT_EQ(banks.size(), 8u) << "rows of a matrix share banks";
        for (int lane = 0; lane < 32; ++lane)
          for (int e = 0; e < 2; ++e) {
            const int i = 2 * (4 * j + q) + e, r = lane / 4, c = 2 * (lane % 4) + e;
            const std::uint32_t row = place(warp, 8 * q + (transposed ? c : r), j);
            EXPECT_EQ(row % 16, 0u);
            memory.write(row + static_cast<std::uint32_t>(2 * (transposed ? r : c)), row_of(warp, lane) + 8 * half_of(i),
                         column_of(i, lane), 2);
          }
      }
}

TEST(StagingTile, IsTheBoxThatTmaStores) {
  for (const std::uint32_t tile : bases(kStoreTileBytes)) {
    Memory memory, turned;
    put(memory, false, [&](int warp, int lane, int j) { return store_place(tile, warp, lane, j); });
    put(turned, true, [&](int warp, int lane, int j) { return store_place_transposed(tile, warp, lane, j); });
    EXPECT_EQ(memory.written(), kStoreTileBytes);
    EXPECT_EQ(turned.written(), kStoreTileBytes);
    for (int row = 0; row < 64; ++row)
      for (int column = 0; column < 64; ++column) {
        const std::uint32_t box = swizzle(tile + static_cast<std::uint32_t>(row * 128 + column * 2));
        ASSERT_EQ(memory.read(box), std::pair(row, column));
        ASSERT_EQ(turned.read(box), std::pair(column, row));
      }
  }
}

/// 32 columns of floats: a box of 64 rows, or transposed two boxes of 32 rows with 32 of the piece's rows each.
TEST(StagingTile, OfFloats) {
  constexpr std::uint32_t kTile = 5 * 1024;
  Memory memory, turned;
  for (int thread = 0; thread < 128; ++thread)
    for (int i = 0; i < 16; ++i) {
      const int row = row_of(thread / 32, thread % 32) + 8 * half_of(i), column = column_of(i, thread % 32);
      memory.write(float_place(kTile, row, column), row, column, 4);
      turned.write(float_place_transposed(kTile, row, column), row, column, 4);
      if (i % 2 == 0) {
        EXPECT_EQ(float_place(kTile, row, column) % 8, 0u) << "columns are stored in pairs";
        EXPECT_EQ(float_place(kTile, row, column + 1), float_place(kTile, row, column) + 4);
      }
    }
  EXPECT_EQ(memory.written(), kStoreTileBytes);
  EXPECT_EQ(turned.written(), kStoreTileBytes);
  for (int row = 0; row < 64; ++row)
    for (int column = 0; column < 32; ++column) {
      const auto r = static_cast<std::uint32_t>(row), c = static_cast<std::uint32_t>(column);
      ASSERT_EQ(memory.read(swizzle(kTile + r * 128 + c * 4)), std::pair(row, column));
      ASSERT_EQ(turned.read(swizzle(kTile + r / 32 * 4096 + c * 128 + r % 32 * 4)), std::pair(row, column));
    }
}

}  // namespace
}  // namespace intarsia::cuda::sm90
