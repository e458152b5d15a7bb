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

/// Rows of x, dy or a row buffer, K-major. With a list of tokens this is the gather. kPairs: k counts gates and ups in turn, as
/// the weights have them, but the rows are [gate, up]: a tile has 16 gates, then their 16 ups.
template <class T, bool kPairs = false>
struct RowsOperand {
  static constexpr bool kMnMajor = false;
  SourceRows<T> source;
  int k_size;

  struct State {
    CopyPlace<kMnMajor> place;
    int row[2];  // of the source, -1: zeros. Not pointers: those need twice the registers
    __device__ explicit State(int thread) : place(thread) {}
  };
  __device__ void start(State& s, const Expert& expert, int first) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = first + s.place.line + i * s.place.kLinesApart;
      s.row[i] = r < expert.count ? source.find(expert.begin + r) : -1;
    }
  }
  __device__ void copy(State& s, int k, std::uint32_t to) const {
    const int first = kPairs ? k / 2 + s.place.chunk % 2 * kChunk : k + s.place.chunk * kChunk;
    const int size = kPairs ? k_size / 2 : k_size, column = first + (kPairs ? s.place.chunk / 2 * size : 0);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool here = first < size && s.row[i] >= 0;
      copy_async(to + s.place.byte_of(i), here ? source.at(s.row[i], 0) + column : source.data, here ? 16 : 0);
    }
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
    int begin, count, column, next[2];
    __device__ explicit State(int thread) : place(thread) {}
  };
  __device__ void start(State& s, const Expert& expert, int first) const {
    s.begin = expert.begin;
    s.count = expert.count;
    s.column = min(first + s.place.chunk * kChunk, columns - kChunk);
    list_rows(s, 0);
  }
  __device__ void copy(State& s, int k, std::uint32_t to) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = source.existing(s.next[i]);
      const bool here = row >= 0;
      copy_async(to + s.place.byte_of(i), here ? source.at(row, 0) + s.column : source.data, here ? 16 : 0);
    }
    list_rows(s, k + kTileK);
  }

 private:
  __device__ void list_rows(State& s, int k) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = k + s.place.line + i * s.place.kLinesApart;
      s.next[i] = r < s.count ? source.listed(s.begin + r) : -1;
    }
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
      s.row[i] = w.at(expert.index, column, kMnMajor ? s.place.line : s.place.chunk * kChunk);
      if constexpr (kMnMajor) s.step = w.in_step_of(column);
    }
  }
  __device__ void copy(State& s, int k, std::uint32_t to) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int ahead = kMnMajor ? k + i * s.place.kLinesApart : k;
      const bool here = ahead + (kMnMajor ? s.place.line : s.place.chunk * kChunk) < k_size;
      const T* from = s.row[i % kRows] + (kMnMajor ? ahead * s.step : ahead);
      copy_async(to + s.place.byte_of(i), here ? from : w.data, here ? 16 : 0);
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
    __device__ explicit State(int thread) : place(thread) {}
  };
  __device__ void start(State& s, const Expert& expert, int first) const {
    s.expert = expert.index;
    s.first = kMnMajor ? min(first + s.place.chunk * kChunk, n_size - kChunk) : first + s.place.line;
  }
  __device__ void copy(State& s, int k, std::uint32_t to) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int apart = i * s.place.kLinesApart;
      const int j = k + (kMnMajor ? s.place.line + apart : s.place.chunk * kChunk);
      const int n = kMnMajor ? s.first : min(s.first + apart, n_size - 1);
      const bool here = j < k_size;
      copy_async(to + s.place.byte_of(i), here ? w.at(s.expert, j, n) : w.data, here ? 16 : 0);
    }
  }
};

}  // namespace intarsia::cuda::sm80
