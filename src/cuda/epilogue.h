// What happens to the values of a product before they leave the chip: the mathematics for one value, in any scalar S, and
// functors for fragments as mma.sync leaves them, a row's value in two neighbouring columns.
//
// A functor has   Row     what it knows of one row;             Row row(expert, r, score)      r counts from the expert's first
//                 Column  of two neighbouring columns;          Column column(expert, c)       c is even
//                 Input   what it reads beside the product;     Input load(row, column)
//                 void pair(row, column, input, v[2])           one product;   kGateUp: v[4] = gate, gate, up, up
//                 kScores: the rows have scores, those of `score`
// A kernel asks for a column once a tile: whatever takes a division or a load belongs there and not in pair(), whose code is
// there for every element of a thread and must stay in the instruction cache. Rows and columns outside the tile's part of the
// matrix are the kernel's business: it calls none of these for them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "cuda/expert_rows.h"
#include "cuda/expert_weights.h"
#include "cuda/fast_float.h"
#include "intarsia/config.h"

namespace intarsia::cuda {

// ---- the mathematics

/// a of up_forward, from z = [gate, up]; a plain activation ignores `up`.
template <class S, class Act>
__device__ S activated(const Act& act, S gate, S up, S score, ScorePlacement on) {
  if (on == ScorePlacement::input) {
    gate = score * gate;
    up = score * up;
  }
  S a;
  if constexpr (Act::kGated) a = act.value(gate, up);
  else a = act.value(gate);
  return on == ScorePlacement::inside ? score * a : a;
}

/// What down_backward makes of one column: dz, a' and the column's part of ds (without the bias).
template <class S>
struct DownGradient {
  S dgate, dup, a_scaled, ds;
};

template <class S, class Act>
__device__ DownGradient<S> down_gradient(const Act& act, S gate, S up, S da, S score, ScorePlacement on) {
  const bool on_input = on == ScorePlacement::input;
  const S g = on_input ? score * gate : gate, u = on_input ? score * up : up;
  const S da_weighted = on_input ? da : score * da;
  S a, dg, du = S(0.0f);
  if constexpr (Act::kGated) {
    a = act.value(g, u);
    act.gradient(g, u, da_weighted, dg, du);
  } else {
    a = act.value(g);
    dg = act.gradient(g, da_weighted);
  }
  if (!on_input) return {dg, du, score * a, da * a};
  S ds = dg * gate;
  if constexpr (Act::kGated) ds = ds + du * up;
  return {score * dg, score * du, a, ds};
}

// ---- two neighbouring elements

/// bfloat16 and float16 in one register.
template <class T>
__device__ std::uint32_t pack(float low, float high) {
  static_assert(sizeof(T) == 2);
  union {
    std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162> pair;
    std::uint32_t bits;
  } u;
  if constexpr (std::is_same_v<T, __half>) u.pair = __floats2half2_rn(low, high);
  else u.pair = __floats2bfloat162_rn(low, high);
  return u.bits;
}

template <class T>
__device__ float2 unpack(std::uint32_t bits) {
  if constexpr (std::is_same_v<T, __half>) {
    union {
      std::uint32_t bits;
      __half2 pair;
    } u{bits};
    return __half22float2(u.pair);
  } else {
    return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
  }
}

/// Both elements must be there and the address even: 4 bytes for 16-bit types, 8 for float.
template <class T>
__device__ float2 load_pair(const T* from) {
  if constexpr (std::is_same_v<T, float>) return *reinterpret_cast<const float2*>(from);
  else return unpack<T>(*reinterpret_cast<const std::uint32_t*>(from));
}

template <class T>
__device__ void store_pair(T* to, float low, float high) {
  if constexpr (std::is_same_v<T, float>) *reinterpret_cast<float2*>(to) = {low, high};
  else *reinterpret_cast<std::uint32_t*>(to) = pack<T>(low, high);
}

struct NoInput {};

// ---- up_forward: z = product + b_up, a = act(z)

template <class T, class Act_>
struct UpForwardEpilogue {
  using Act = Act_;
  static constexpr bool kGateUp = Act::kGated, kRowDots = false, kScores = true;
  Act act;
  ScorePlacement on;
  ScoreOfRow<float> score;
  ExpertBias<T> bias;
  T *z, *a;  ///< z: null when not wanted
  std::int64_t z_step, a_step;
  int width;  ///< I

  struct Row {
    T *z, *a;
    float score;
  };
  struct Column {
    int c;
    float bias[kGateUp ? 4 : 2];
  };
  using Input = NoInput;
  __device__ Row row(const Expert& expert, int r, float row_score) const {
    const std::int64_t i = expert.begin + r;
    return {z ? z + i * z_step : nullptr, a + i * a_step, row_score};
  }
  __device__ Column column(const Expert& expert, int c) const {
    Column result{c, {}};
#pragma unroll
    for (int i = 0; i < (kGateUp ? 4 : 2); ++i)
      result.bias[i] = bias.template at<float>(expert.index, c + i % 2 + i / 2 * width);
    return result;
  }
  __device__ Input load(const Row&, const Column&) const { return {}; }
  __device__ void pair(Row& row, const Column& column, Input, float (&v)[kGateUp ? 4 : 2]) const {
#pragma unroll
    for (int i = 0; i < (kGateUp ? 4 : 2); ++i) v[i] += column.bias[i];
    if (row.z != nullptr) {
      store_pair(row.z + column.c, v[0], v[1]);
      if constexpr (kGateUp) store_pair(row.z + width + column.c, v[2], v[3]);
    }
    const FastFloat s = row.score;
    const FastFloat a0 = activated<FastFloat>(act, v[0], kGateUp ? v[2 * kGateUp] : 0.0f, s, on);
    const FastFloat a1 = activated<FastFloat>(act, v[1], kGateUp ? v[2 * kGateUp + 1] : 0.0f, s, on);
    store_pair(row.a + column.c, a0.v, a1.v);
  }
};

// ---- down_forward, and up_backward with neither scores nor bias: rows = product_factor * product + bias_factor * b

template <class T>
struct RowsEpilogue {
  static constexpr bool kGateUp = false, kRowDots = false, kScores = true;
  ScorePlacement on;
  ScoreOfRow<float> score;
  ExpertBias<T> bias;
  T* rows;
  std::int64_t step;

  struct Row {
    T* out;
    float product_factor, bias_factor;
  };
  struct Column {
    int c;
    float bias[2];
  };
  using Input = NoInput;
  __device__ Row row(const Expert& expert, int r, float s) const {
    const float of_bias = on == ScorePlacement::input ? 1.0f : s;
    return {rows + (expert.begin + r) * step, on == ScorePlacement::output ? s : 1.0f,
            bias.data ? of_bias : 0.0f};  // s may be infinite
  }
  __device__ Column column(const Expert& expert, int c) const {
    return {c, {bias.template at<float>(expert.index, c), bias.template at<float>(expert.index, c + 1)}};
  }
  __device__ Input load(const Row&, const Column&) const { return {}; }
  __device__ void pair(Row& row, const Column& column, Input, float (&v)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) v[i] = row.product_factor * v[i] + row.bias_factor * column.bias[i];
    store_pair(row.out + column.c, v[0], v[1]);
  }
};

// ---- down_backward: dz, a' and the row's part of ds from da' = product and z; dz may be z

template <class T, class Act_>
struct DownBackwardEpilogue {
  using Act = Act_;
  static constexpr bool kGateUp = false, kRowDots = true, kScores = true;
  Act act;
  ScorePlacement on;
  ScoreOfRow<float> score;
  const T* z;
  T *dz, *a_scaled;  ///< a_scaled: null when not wanted
  std::int64_t z_step, dz_step, a_step;
  int width;        ///< I
  float* row_dots;  ///< (n tiles, R) sums of ds over the columns of a tile, or null
  int capacity;     ///< R

  struct Row {
    int i;  // not three pointers: they would cost six registers more
    float score, ds;
  };
  using Column = int;
  struct Input {
    std::uint32_t gate, up;
  };
  __device__ Row row(const Expert& expert, int r, float row_score) const { return {expert.begin + r, row_score, 0.0f}; }
  __device__ Column column(const Expert&, int c) const { return c; }
  __device__ Input load(const Row& row, Column column) const {
    const T* from = z + row.i * z_step + column;
    Input input{*reinterpret_cast<const std::uint32_t*>(from), 0};
    if constexpr (Act::kGated) input.up = *reinterpret_cast<const std::uint32_t*>(from + width);
    return input;
  }
  __device__ void pair(Row& row, Column column, Input input, float (&v)[2]) const {
    const float2 gate = unpack<T>(input.gate), up = unpack<T>(input.up);
    const FastFloat s = row.score;
    const DownGradient<FastFloat> low = down_gradient<FastFloat>(act, gate.x, up.x, v[0], s, on);
    const DownGradient<FastFloat> high = down_gradient<FastFloat>(act, gate.y, up.y, v[1], s, on);
    T* to = dz + row.i * dz_step + column;
    store_pair(to, low.dgate.v, high.dgate.v);
    if constexpr (Act::kGated) store_pair(to + width, low.dup.v, high.dup.v);
    if (a_scaled != nullptr) store_pair(a_scaled + row.i * a_step + column, low.a_scaled.v, high.a_scaled.v);
    row.ds += low.ds.v + high.ds.v;
  }
};

// ---- weight gradients: dw = grad_scale * product, or added to what is there

/// G: element type of the gradient. Matrix rows are its out axis and columns its in axis, or, kSwapped, the other way round.
template <class G, bool kSwapped>
struct GradientEpilogue {
  static constexpr bool kGateUp = false, kRowDots = false, kScores = false;
  ExpertWeights<G> dw;
  bool accumulate;
  bool pairs;  ///< two neighbouring columns are neighbours in memory, at an even address
  float grad_scale;

  /// What lies along the in axis: a row, or kSwapped a column.
  struct Line {
    G* first;
    int j;     ///< out
    int next;  ///< steps along the out axis to the line of j + 1
  };
  struct Index {
    int in;
  };
  using Row = std::conditional_t<kSwapped, Index, Line>;
  using Column = std::conditional_t<kSwapped, Line, Index>;
  struct Input {
    float2 before;
  };

  __device__ Line line(const Expert& expert, int j) const {
    return {dw.at(expert.index, j, 0), j, kSwapped ? dw.out.place(j + 1) - dw.out.place(j) : 0};
  }
  __device__ Row row(const Expert& expert, int r, float) const {
    if constexpr (kSwapped) return {r};
    else return line(expert, r);
  }
  __device__ Column column(const Expert& expert, int c) const {
    if constexpr (kSwapped) return line(expert, c);
    else return {c};
  }
  __device__ G* at(const Row& row, const Column& column) const {
    if constexpr (kSwapped) return column.first + row.in * dw.in_step_of(column.j);
    else return row.first + column.in * dw.in_step_of(row.j);
  }
  /// The element of the next column.
  __device__ G* neighbour(G* element, const Row& row, const Column& column) const {
    if constexpr (kSwapped) return element + column.next * dw.out_step_of(column.j);
    else return element + dw.in_step_of(row.j);
  }
  __device__ Input load(const Row& row, const Column& column) const {
    if (!accumulate) return {{0.0f, 0.0f}};
    G* from = at(row, column);
    if (pairs) return {load_pair<G>(from)};
    return {{static_cast<float>(*from), static_cast<float>(*neighbour(from, row, column))}};
  }
  __device__ void pair(Row& row, const Column& column, Input input, float (&v)[2]) const {
    const float low = input.before.x + grad_scale * v[0], high = input.before.y + grad_scale * v[1];
    G* to = at(row, column);
    if (pairs) return store_pair<G>(to, low, high);
    *to = G(low);
    *neighbour(to, row, column) = G(high);
  }
};

}  // namespace intarsia::cuda
