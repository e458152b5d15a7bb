// One operand's tile in shared memory: 128 lines (rows of the matrix, m or n) by 32 k of 16-bit elements, 8 KB, in 16-byte
// chunks.
//   K-major   128 rows of 4 chunks:               byte(row, chunk) = row * 64 + ((chunk ^ row / 2 % 4) << 4)
//   MN-major  2 panels of 32 k rows of 8 chunks:  byte(k, chunk) = chunk / 8 * 4096 + k * 128 + ((chunk % 8 ^ k % 8) << 4)
// The exclusive or spreads the 8 rows that one ldmatrix phase reads over all 32 banks.
#pragma once

#include <cstdint>

#include "cuda/sm80/ptx.h"

namespace intarsia::cuda::sm80 {

inline constexpr int kTile = 128;  // m and n of a CTA's tile
inline constexpr int kTileK = 32;
inline constexpr int kStages = 4;
inline constexpr int kThreads = 256;
inline constexpr int kChunk = 8;  // elements of 16 bytes
inline constexpr int kOperandBytes = kTile * kTileK * 2;
inline constexpr int kStageBytes = 2 * kOperandBytes;  // left, then right

/// `line` is a row (K-major) or a k (MN-major); `chunk` counts along k or along the rows.
template <bool kMnMajor>
__device__ __forceinline__ std::uint32_t chunk_byte(int line, int chunk) {
  if constexpr (kMnMajor) return (chunk / 8) * (kTileK * 128) + line * 128 + (((chunk % 8) ^ (line % 8)) << 4);
  else return line * 64 + ((chunk ^ (line / 2 % 4)) << 4);
}

/// The two chunks of a tile that a thread copies: neighbouring threads copy neighbouring bytes of global memory.
template <bool kMnMajor>
struct CopyPlace {
  static constexpr int kAcross = kMnMajor ? kTile / kChunk : kTileK / kChunk;  // chunks side by side
  static constexpr int kLinesApart = kThreads / kAcross;
  int line, chunk;
  std::uint32_t byte;
  __device__ explicit CopyPlace(int thread)
      : line(thread / kAcross), chunk(thread % kAcross), byte(chunk_byte<kMnMajor>(line, chunk)) {}
  /// Shared byte of copy i, whose line is line + i * kLinesApart (the swizzle's period divides that).
  __device__ std::uint32_t byte_of(int i) const { return byte + i * kLinesApart * (kMnMajor ? 128 : 64); }
};

// Fragments. A thread keeps one byte offset per operand, that of its address for the first rows and the first 16 k; the other
// addresses follow by adding constants to it and by exclusive or in bits that only the swizzled chunk has, so they cost no
// registers.

/// Byte of this lane's ldmatrix row in the fragment a of mma m16n8k16 for rows first .. first + 15.
template <bool kMnMajor>
__device__ __forceinline__ std::uint32_t left_byte(int first, int lane) {
  if constexpr (kMnMajor) return chunk_byte<true>(lane / 16 * 8 + lane % 8, first / kChunk + lane / 8 % 2);
  else return chunk_byte<false>(first + lane % 16, lane / 16);
}

/// The same for the fragments b of two mma, columns first .. first + 15.
template <bool kMnMajor>
__device__ __forceinline__ std::uint32_t right_byte(int first, int lane) {
  if constexpr (kMnMajor) return chunk_byte<true>(lane / 8 % 2 * 8 + lane % 8, first / kChunk + lane / 16);
  else return chunk_byte<false>(first + lane / 16 * 8 + lane % 8, lane / 8 % 2);
}

/// From such a byte (plus the tile's address) to the one `rows16` * 16 rows further at k step `step` (16 k). Inside a panel of
/// 64 rows only: the first row of the byte must be a multiple of 16 * (the largest rows16, rounded up to 2 or 4).
template <bool kMnMajor>
__device__ __forceinline__ std::uint32_t fragment_address(std::uint32_t byte, int rows16, int step) {
  if constexpr (kMnMajor) return (byte ^ (rows16 << 5)) + step * (16 * 128);
  else return (byte ^ (step << 5)) + rows16 * (16 * 64);
}

/// Byte of this lane's first word in a K-major tile whose k are gates and ups in turn, for columns first .. first + 7.
__device__ __forceinline__ std::uint32_t right_pairs_byte(int first, int lane) {
  return chunk_byte<false>(first + lane / 4, lane % 4 / 2) + lane % 2 * 8;
}

/// Fragments b for 16 gates and for their 16 ups, of 8 columns, columns8 * 8 further on than `byte`.
__device__ __forceinline__ void load_right_pairs(std::uint32_t byte, int columns8, std::uint32_t (&gate)[2],
                                                 std::uint32_t (&up)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {  // k 2 (l % 4) and the next, then 8 further on
    const std::uint64_t two = load_shared(fragment_address<false>(byte, 0, i) + columns8 * (8 * 64));
    const auto low = static_cast<std::uint32_t>(two), high = static_cast<std::uint32_t>(two >> 32);
    gate[i] = __byte_perm(low, high, 0x5410);
    up[i] = __byte_perm(low, high, 0x7632);
  }
}

/// Bytes from a tile's first 64 rows to its second.
template <bool kMnMajor>
inline constexpr std::uint32_t kHalfTile = kMnMajor ? kTileK * 128 : 64 * 64;

}  // namespace intarsia::cuda::sm80
