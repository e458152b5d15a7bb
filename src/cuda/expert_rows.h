// The device's view of lists and scores, and the walk over tiles that every GEMM kernel makes. The host never reads a list, so
// a wrong one must not lead outside a buffer: offsets are clamped to [0, R], tokens and slots outside their tensors read
// nothing.
#pragma once

#include <cstdint>

#include "base/rows.h"
#include "intarsia/types.h"

namespace intarsia::cuda {

/// The rows of one expert.
struct Expert {
  int index, begin, count;
};

struct ExpertRows {
  const std::int32_t* offsets = nullptr;  ///< (E+1)
  int experts = 0;
  int capacity = 0;  ///< R

  ExpertRows() = default;
  ExpertRows(const TensorView& expert_offsets, std::int64_t rows)
      : offsets(list(expert_offsets)),
        experts(static_cast<int>(expert_offsets.size(0) - 1)),
        capacity(static_cast<int>(rows)) {}

#if defined(__CUDACC__)
  __device__ int offset(int i) const { return min(max(offsets[i], 0), capacity); }
  __device__ Expert operator[](int e) const {
    const int begin = offset(e);
    return {e, begin, max(offset(e + 1) - begin, 0)};
  }
#endif
};

#if defined(__CUDACC__)
/// A distance between 16-bit elements in chunks of 16 bytes: from a pointer to chunks an address takes one instruction.
__device__ __forceinline__ std::uint32_t in_chunks(std::int64_t elements) { return static_cast<std::uint32_t>(elements / 8); }
#endif

/// Rows of x or dy that the sorted rows read: row r reads row token[r], or itself without a list.
template <class T>
struct SourceRows {
  const T* data = nullptr;
  std::int64_t row_step = 0, column_step = 1;
  const std::int32_t* token = nullptr;
  int count = 0;

  SourceRows() = default;
  explicit SourceRows(const TensorView& v, const TensorView& row_token = {})
      : data(static_cast<const T*>(v.data)),
        row_step(v.step(0)),
        column_step(v.step(1)),
        token(list(row_token)),
        count(static_cast<int>(v.size(0))) {}

#if defined(__CUDACC__)
  /// The source's row, or -1: zeros.
  __device__ int find(int row) const { return existing(listed(row)); }
  /// The same in two steps, for those who load long before they look.
  __device__ int listed(int row) const { return token ? token[row] : row; }
  __device__ int existing(int source) const {
    return static_cast<unsigned>(source) < static_cast<unsigned>(count) ? source : -1;
  }
  __device__ const T* at(int source, int column) const { return data + source * row_step + column * column_step; }
#endif
};

/// The score of a row, S = float or double: 1 without scores, 0 for a slot outside them.
template <class S>
struct ScoreOfRow {
  const S* values = nullptr;
  const std::int32_t* slot = nullptr;
  std::int64_t count = 0;

  ScoreOfRow() = default;
  ScoreOfRow(const TensorView& scores, const TensorView& row_slot)
      : values(scores.defined() ? static_cast<const S*>(scores.data) : nullptr),
        slot(scores.rank == 2 ? list(row_slot) : nullptr),
        count(scores.numel()) {}

#if defined(__CUDACC__)
  /// Where the row's score lies, or -1.
  __device__ std::int64_t find(int row) const {
    const std::int64_t i = listed(row);
    return i >= 0 && i < count ? i : -1;
  }
  __device__ S operator()(int row) const { return at(listed(row)); }
  /// The same in two steps, for those who load the first long before the second.
  __device__ int listed(int row) const { return slot ? slot[row] : row; }
  __device__ S at(int i) const {
    if (values == nullptr) return S(1);
    return i >= 0 && i < count ? values[i] : S(0);
  }
  /// Several at once: where they lie is looked at for all before any is loaded, so that no load waits for another.
  template <int kCount>
  __device__ void at(const int (&slots)[kCount], S (&scores)[kCount]) const {
    unsigned last = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) last = max(last, static_cast<unsigned>(slots[i]));
    if (values != nullptr && last < count) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) scores[i] = values[slots[i]];
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) scores[i] = at(slots[i]);
    }
  }
#endif
};

#if defined(__CUDACC__)
/// Finds the expert of a running tile number by adding up how many tiles each expert has. A warp looks at 32 experts at a time,
/// every warp for itself; nothing but expert_offsets is read. `Problem` has `rows` and `tiles(count)` for an expert of count
/// rows. Between two calls only the window is kept: registers are dearer there than the look is.
template <class Problem>
class TileWalk {
 public:
  __device__ explicit TileWalk(const Problem& problem) : problem_(problem) {}

  /// The expert of a tile and the tile's number inside it; false past the last tile. All lanes of a warp call with the same
  /// tile, which never descends.
  __device__ bool find(int tile, Expert& expert, int& inside) {
    for (; first_ < problem_.rows.experts; first_ += 32) {
      const int upto = tiles_upto_lane(), window = __shfl_sync(kAll, upto, 31);
      if (tile >= before_ + window) {
        before_ += window;
        continue;
      }
      const int lane = __ffs(static_cast<int>(__ballot_sync(kAll, tile < before_ + upto))) - 1;
      expert = problem_.rows[first_ + lane];
      inside = tile - before_ - (__shfl_sync(kAll, upto, lane) - problem_.tiles(expert.count));
      return true;
    }
    return false;
  }

 private:
  static constexpr unsigned kAll = 0xffffffffu;

  /// Tiles of the window's experts up to this lane's.
  __device__ int tiles_upto_lane() const {
    const int lane = static_cast<int>(threadIdx.x % 32), e = first_ + lane;
    int upto = e < problem_.rows.experts ? problem_.tiles(problem_.rows[e].count) : 0;
    for (int step = 1; step < 32; step *= 2) {
      const int lower = __shfl_up_sync(kAll, upto, step);
      if (lane >= step) upto += lower;
    }
    return upto;
  }

  const Problem& problem_;
  int first_ = 0, before_ = 0;  // first expert of the window, tiles of the experts before it
};
#endif

}  // namespace intarsia::cuda
