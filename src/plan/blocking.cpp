#include "plan/blocking.h"

#include <algorithm>

#include "base/execution.h"

namespace intarsia {
namespace {

// Blocks of rows whose operands fill this much scratch; wide layers get fewer rows, never fewer than the weights' traffic
// allows.
constexpr std::int64_t kBlockBytes = std::int64_t{2} << 20;
constexpr std::int64_t kMinBlockRows = 64;

// A chunk of tokens has this many rows at least, and on average this many for each expert, so that its products stay efficient.
constexpr std::int64_t kChunkRows = 4096, kChunkRowsOfExpert = 128;

std::int64_t chunk_rows(const LayerShape& s, std::int64_t rows) {
  const std::int64_t of_token = s.token_rows ? s.experts : s.experts_per_token;
  const std::int64_t wanted = std::min(rows, std::max(kChunkRows, kChunkRowsOfExpert * s.experts));
  if (s.token_rows) return std::max(wanted, of_token);
  return std::max(wanted / of_token, std::int64_t{1}) * of_token;
}

}  // namespace

CpuBlocking cpu_blocking(const LayerShape& s) {
  const auto element = static_cast<std::int64_t>(size_of(s.dtype));
  const std::int64_t z_width = gate_factor(s.activation) * s.width;
  const std::int64_t left = std::max(s.hidden, z_width) * element, right = s.width * element;

  CpuBlocking b{};
  b.block_rows = std::clamp(kBlockBytes / (left + right) / 16 * 16, kMinBlockRows, kMaxBlockRows);
  b.chunk_rows = chunk_rows(s, s.rows > 0 ? s.rows : s.tokens * s.experts_per_token);
  b.segment_entries = 3 * s.experts + 1;
  b.left_bytes = align_up(static_cast<std::size_t>(std::max(b.block_rows * left, kGradientDepth * kGradientOut * element)));
  b.right_bytes = align_up(static_cast<std::size_t>(std::max(b.block_rows * right, kGradientDepth * kGradientIn * element)));
  b.product_bytes =
      static_cast<std::size_t>(std::max(b.block_rows * kProductColumns, kGradientOut * kGradientIn)) * sizeof(float);
  b.scratch_bytes = b.left_bytes + b.right_bytes + b.product_bytes + kPackingBytes;
  return b;
}

}  // namespace intarsia
