// Where things lie in shared memory: plain arithmetic, tested on the CPU against the documented layouts of TMA, wgmma and
// stmatrix (tests/cpp/address_test.cpp).
//
// Tiles are 128-byte swizzled and begin at multiples of 1024 bytes. K-major, a row of the tile is 64 k; MN-major, a tile is
// panels of 64 columns and a row of a panel is one k.
#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "cuda/sm90/config.h"

namespace intarsia::cuda::sm90 {

inline constexpr int kPanelBytes = kTileK * 128;  // 64 k of 64 columns, or 64 rows of 64 k

/// 16-byte chunk `chunk` of row `row` of a tile or panel.
INTARSIA_HOST_DEVICE constexpr std::uint32_t swizzled(std::uint32_t tile, int row, int chunk) {
  return tile + row * 128 + ((chunk ^ (row & 7)) << 4);
}

// ---- the gathers of the producer warpgroup

/// Its 128 threads copy a left tile, 8 chunks of 16 bytes each: 8 neighbouring threads the 128 bytes of a row (K-major) or of a
/// k in one panel (MN-major). The next ones of a thread are kStep rows (or k) on, kStep * 128 bytes in the tile, where the
/// swizzle is the same.
struct GatheringThread {
  static constexpr int kStep = 16;
  int chunk, first;
  INTARSIA_HOST_DEVICE constexpr explicit GatheringThread(int thread) : chunk(thread % 8), first(thread / 8) {}
  INTARSIA_HOST_DEVICE constexpr std::uint32_t place() const { return swizzled(0, first, chunk); }
};

// ---- wgmma

/// A descriptor of a tile. K-major: `leading` is unused (0), 1024 bytes lie between groups of 8 rows. MN-major: `leading` bytes
/// lie between panels, 1024 between groups of 8 k.
INTARSIA_HOST_DEVICE constexpr std::uint64_t tile_descriptor(std::uint32_t address, std::uint32_t leading) {
  constexpr std::uint64_t kSwizzle128 = std::uint64_t{1} << 62, kStride = std::uint64_t{1024 >> 4} << 32;
  return ((address & 0x3ffffu) >> 4) | (static_cast<std::uint64_t>(leading >> 4) << 16) | kStride | kSwizzle128;
}

/// What a descriptor advances for 16 more k: 32 bytes along a K-major row, 16 rows of 128 bytes down an MN-major panel.
template <bool kMnMajor>
inline constexpr std::uint32_t kDescriptorStep = kMnMajor ? 2048 >> 4 : 32 >> 4;

// ---- fragments: of every 8 columns of a wgmma (or mma.sync) result a thread has columns 2 * (lane % 4) + {0, 1} of the rows
// lane / 4 and lane / 4 + 8 of its warp's 16, 4 floats

/// The first of a thread's two rows of 64; the other is 8 below.
INTARSIA_HOST_DEVICE constexpr int row_of(int warp, int lane) { return warp * 16 + lane / 4; }
/// Column of float i, and which of the two rows it is in.
INTARSIA_HOST_DEVICE constexpr int column_of(int i, int lane) { return i / 4 * 8 + 2 * (lane % 4) + i % 2; }
INTARSIA_HOST_DEVICE constexpr int half_of(int i) { return i / 2 % 2; }

// ---- stmatrix: the row that a lane of a warp points at, for the j-th 16 columns of a 64 x 64 piece of 16-bit pairs

/// Rows of the piece as rows of the staging tile.
INTARSIA_HOST_DEVICE constexpr std::uint32_t store_place(std::uint32_t tile, int warp, int lane, int j) {
  return swizzled(tile, warp * 16 + (lane & 15), j * 2 + (lane >> 4));
}
/// Columns of the piece as rows of the staging tile.
INTARSIA_HOST_DEVICE constexpr std::uint32_t store_place_transposed(std::uint32_t tile, int warp, int lane, int j) {
  const int matrix = lane >> 3, row = ((matrix >> 1) << 3) + (lane & 7);
  return swizzled(tile, 16 * j + row, warp * 2 + (matrix & 1));
}

// ---- staging of fp32: tiles whose rows are 32 floats

/// Of the piece's element (row, column): a tile of 64 rows and 32 columns.
INTARSIA_HOST_DEVICE constexpr std::uint32_t float_place(std::uint32_t tile, int row, int column) {
  return swizzled(tile, row, column >> 2) + (column & 3) * 4;
}
/// Columns of the piece as rows: two tiles of 32 rows, with the piece's rows 0 .. 31 and 32 .. 63.
INTARSIA_HOST_DEVICE constexpr std::uint32_t float_place_transposed(std::uint32_t tile, int row, int column) {
  return float_place(tile + (row >> 5) * 4096, column, row & 31);
}

}  // namespace intarsia::cuda::sm90
