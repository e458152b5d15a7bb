// How the backends cut the layer's work: pure arithmetic, shared by the plan, src/cpu and src/cuda.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "intarsia/plan.h"

namespace intarsia {

// A product writes at most block_rows x kProductColumns floats of scratch, which stay in the second-level cache with their
// inputs.
inline constexpr std::int64_t kMaxBlockRows = 192;
inline constexpr std::int64_t kProductColumns = 1024;

// Weight gradients: one task owns a tile of at most kGradientOut x kGradientIn and reads its expert's rows kGradientDepth at a
// time.
inline constexpr std::int64_t kGradientOut = 256, kGradientIn = 512, kGradientDepth = 256;

/// Operands that cannot be multiplied where they lie are packed here, tile by tile (src/cpu/gemm.cpp).
inline constexpr std::size_t kPackingBytes = std::size_t{896} << 10;

struct CpuBlocking {
  std::int64_t block_rows;       ///< rows of one (expert, block) task
  std::int64_t chunk_rows;       ///< rows of one chunk of tokens: what `rows` and `dx_rows` hold; at least one token's most
  std::int64_t segment_entries;  ///< int32 entries that say which rows of each expert belong to a chunk
  std::size_t scratch_bytes;     ///< scratch of one worker in layer_forward and layer_backward, aligned to 256
  // its parts
  std::size_t left_bytes;     ///< the gathered left operand of a block
  std::size_t right_bytes;    ///< a of a block; the right operand of a weight gradient
  std::size_t product_bytes;  ///< fp32 results before their epilogue
};

CpuBlocking cpu_blocking(const LayerShape&);

/// CUDA: columns of I over which one kernel tile of down_backward sums ds; the sums of all tiles are added up afterwards.
inline constexpr std::int64_t kRowDotColumns = 128;

/// CUDA: bias_backward sums over slices of the rows, at most 1024 of them or 128 rows each, and then over an expert's slices.
struct BiasSlices {
  std::int64_t rows, size, count;
  explicit BiasSlices(std::int64_t r)
      : rows(r), size(std::max<std::int64_t>(128, (r + 1023) / 1024)), count((r + size - 1) / size) {}
  /// Sums of one column: walking down the rows, slice and expert only grow, so that of (slice, expert) lies at slice + expert.
  std::int64_t sums(std::int64_t experts) const { return count + experts; }
};

}  // namespace intarsia
