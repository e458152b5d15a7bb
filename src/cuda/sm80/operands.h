// Where the tiles of both operands come from. An operand is a parameter of the kernel; its State is what one thread keeps:
//   start(state, expert, first)      first: the tile's first row or column (for kGateUp: of the gate's half)
//   copy(state, k, to)               issues this thread's copies of the 32 k from k into the tile at shared address `to`
// What lies outside along k, rows past the expert's end and tokens that do not exist become zeros. Columns outside along n (and
// m of weight gradients) repeat the last ones: nothing stores what they give.
#pragma once

#include "cuda/expert_rows.h"
#include "cuda/expert_weights.h"
#include "cuda/sm80/tile.h"

namespace intarsia::cuda::sm80 {

template <class T>
__device__ __forceinline__ const uint4* chunks_of(const T* data) {
  return reinterpret_cast<const uint4*>(data);
}

/// Rows of x, dy or a row buffer, K-major. With a list of tokens this is the gather. kPairs: k counts gates and ups in turn, as
/// the weights have them, but the rows are [gate, up]: a tile has 16 gates, then their 16 ups.
template <class T, bool kPairs = false>
struct RowsOperand {
  static constexpr bool kMnMajor = false;
  SourceRows<T> source;
  int k_size;

  struct State {
    CopyPlace<kMnMajor> place;
    std::uint32_t row[2];  // chunks to the source's row
    bool here[2];          // else zeros
    __device__ explicit State(int thread) : place(thread) {}
  };
  __device__ void start(State& s, const Expert& expert, int first) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = first + s.place.line + i * s.place.kLinesApart;
      const int row = r < expert.count ? source.find(expert.begin + r) : -1;
      s.row[i] = row < 0 ? 0 : static_cast<std::uint32_t>(row) * in_chunks(source.row_step);
      s.here[i] = row >= 0;
    }
  }
  __device__ void copy(State& s, int k, std::uint32_t to) const {
    const int size = (kPairs ? k_size / 2 : k_size) / kChunk;
    const int chunk = kPairs ? k / 2 / kChunk + s.place.chunk % 2 : k / kChunk + s.place.chunk;
    const bool inside = chunk < size;
    const std::uint32_t column = inside ? chunk + (kPairs ? s.place.chunk / 2 * size : 0) : 0;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      copy_async(to + s.place.byte_of(i), chunks_of(source.data) + (s.row[i] + column), inside && s.here[i]);
  }
};

/// Columns of x, dy or a row buffer, MN-major: k runs over the expert's rows. Their tokens are asked for one step ahead and
/// looked at when they are used: a look at the load would wait for it at every step.
template <class T>
struct ColumnsOperand {
  static constexpr bool kMnMajor = true, kPairs = false;
  SourceRows<T> source;
  int columns;

  struct State {
    CopyPlace<kMnMajor> place;
    std::uint32_t column;  // in chunks
    int begin, count, next[2];
    __device__ explicit State(int thread) : place(thread) {}
  };
  __device__ void start(State& s, const Expert& expert, int first) const {
    s.begin = expert.begin;
    s.count = expert.count;
    s.column = min(first / kChunk + s.place.chunk, columns / kChunk - 1);
    list_rows(s, 0);
  }
  __device__ void copy(State& s, int k, std::uint32_t to) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool here = k + s.place.line + i * s.place.kLinesApart < s.count && source.existing(s.next[i]) >= 0;
      const std::uint32_t row = here ? s.next[i] : 0;
      copy_async(to + s.place.byte_of(i), chunks_of(source.data) + (row * in_chunks(source.row_step) + s.column), here);
    }
    list_rows(s, k + kTileK);
  }

 private:
  /// Of the rows from k on, where there are any; past the last one, that one again.
  __device__ void list_rows(State& s, int k) const {
    if (k >= s.count) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) s.next[i] = s.begin + min(k + s.place.line + i * s.place.kLinesApart, s.count - 1);
    if (source.token == nullptr) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) s.next[i] = source.token[s.next[i]];
  }
};

/// The n columns of a tile of weights: kGateUp puts 64 gates before their 64 ups.
template <bool kGateUp>
struct WeightColumns {
  int size;   ///< n, of one half with kGateUp
  int width;  ///< from a gate to its up, in [gate, up]

  /// Column of [gate, up] at column c of the tile, the last `chunk` columns for one that lies outside.
  __device__ int column(int first, int c, int chunk) const {
    if constexpr (kGateUp) return min(first + c % (kTile / 2), size - chunk) + c / (kTile / 2) * width;
    else return min(first + c, size - chunk);
  }
};

/// Weights where n is the out axis (forward). K-major: in is contiguous; MN-major: out is, in whole chunks of gates or ups, or,
/// kPairs, with each gate beside its up: then `first` still counts gates, and w.out is the caller's order as it stands.
template <class T, bool kMnMajor_, bool kGateUp, bool kPairs_ = false>
struct ForwardWeights {
  static constexpr bool kMnMajor = kMnMajor_, kPairs = kPairs_;
  static_assert(!kPairs || (kMnMajor && !kGateUp));
  static constexpr int kRows = kMnMajor ? 1 : 2;  // columns of the product, or chunks of them, that a thread copies
  ExpertWeights<T> w;
  WeightColumns<kGateUp> n;
  int k_size;

  struct State {
    CopyPlace<kMnMajor> place;
    const T* row[kRows];
    std::int64_t step;
    __device__ explicit State(int thread) : place(thread) {}
  };
  __device__ void start(State& s, const Expert& expert, int first) const {
    if constexpr (kPairs) first *= 2;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int column = kMnMajor ? n.column(first, s.place.chunk * kChunk, kChunk)
                                  : n.column(first, s.place.line + i * s.place.kLinesApart, 1);
      s.row[i] = w.at(expert.index, column, 0);
      if constexpr (kMnMajor) s.step = w.in_step_of(column);
    }
  }
  __device__ void copy(State& s, int k, std::uint32_t to) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int ahead = k + (kMnMajor ? s.place.line + i * s.place.kLinesApart : s.place.chunk * kChunk);
      const bool here = ahead < k_size;
      const int in = here ? ahead : 0;
      copy_async(to + s.place.byte_of(i), s.row[i % kRows] + (kMnMajor ? in * s.step : in), here);
    }
  }
};

/// Weights where k is the out axis (backward). MN-major: in is contiguous; K-major: out is, in whole chunks of gates or ups,
/// or, kPairs, with each gate beside its up.
template <class T, bool kMnMajor_, bool kPairs_ = false>
struct BackwardWeights {
  static constexpr bool kMnMajor = kMnMajor_, kPairs = kPairs_;
  ExpertWeights<T> w;
  int n_size, k_size;

  struct State {
    CopyPlace<kMnMajor> place;
    int expert, first;
    const uint4* plain;  // the expert's first k at the thread's column, where k's step is the same everywhere; or null
    __device__ explicit State(int thread) : place(thread) {}
  };
  __device__ void start(State& s, const Expert& expert, int first) const {
    s.expert = expert.index;
    s.first = kMnMajor ? min(first + s.place.chunk * kChunk, n_size - kChunk) : first + s.place.line;
    s.plain = w.evenly_spaced() ? chunks_of(w.at(s.expert, 0, kMnMajor ? s.first : 0)) : nullptr;
  }
  __device__ void copy(State& s, int k, std::uint32_t to) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int apart = i * s.place.kLinesApart;
      const int ahead = k + (kMnMajor ? s.place.line + apart : s.place.chunk * kChunk);
      const bool here = ahead < k_size;
      const int j = here ? ahead : 0, n = kMnMajor ? s.first : min(s.first + apart, n_size - 1);
      const uint4* from;
      if (w.evenly_spaced())
        from = s.plain + (kMnMajor ? static_cast<std::uint32_t>(j) * in_chunks(w.out_step)
                                   : static_cast<std::uint32_t>(n) * in_chunks(w.in_step) + j / kChunk);
      else from = chunks_of(w.at(s.expert, j, n));
      copy_async(to + s.place.byte_of(i), from, here);
    }
  }
};

}  // namespace intarsia::cuda::sm80
