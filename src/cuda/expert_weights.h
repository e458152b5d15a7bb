// Expert weights, their gradients and biases in the caller's memory layout, seen as (expert, out, in) with out in the order of
// [gate, up]; see Weights in config.h.
#pragma once

#include <cstdint>

#include "base/rows.h"
#include "intarsia/config.h"

namespace intarsia::cuda {

/// Gate and up rows are told apart only where the weight does so: two tensors, or blocks. One plain matrix (G*I, in) is one.
inline int halves_of(const Weights& w) { return w.second.defined() || w.gate_block > 0 ? 2 : 1; }

/// Where column j of [gate, up] lies on the caller's out axis.
struct OutAxis {
  int width = 0;  ///< gates
  int block = 0;  ///< gates of a block; 0: the caller's order is that of [gate, up]

  OutAxis() = default;
  OutAxis(std::int64_t gate_block, std::int64_t columns)
      : width(static_cast<int>(gate_block > 0 ? columns / 2 : columns)),
        block(gate_block < width ? static_cast<int>(gate_block) : 0) {}

#if defined(__CUDACC__)
  __device__ int place(int j) const {
    if (block == 0) return j;
    const int up = j >= width, i = up ? j - width : j;
    return i + (i / block + up) * block;
  }
#endif
};

/// T: element type of the weight, or of the gradient.
template <class T>
struct ExpertWeights {
  T* data = nullptr;
  std::int64_t expert_step = 0, out_step = 0, in_step = 0;
  T* second = nullptr;  ///< up rows, when they are a tensor of their own
  std::int64_t second_expert_step = 0, second_out_step = 0, second_in_step = 0;
  int width = 0;  ///< gates, with a second tensor
  OutAxis out;

  ExpertWeights() = default;
  explicit ExpertWeights(const Weights& w) {
    const int out_axis = w.transposed ? 2 : 1, in_axis = w.transposed ? 1 : 2;
    data = static_cast<T*>(w.weight.data);
    expert_step = w.weight.step(0);
    out_step = w.weight.step(out_axis);
    in_step = w.weight.step(in_axis);
    out = OutAxis(w.gate_block, w.weight.size(out_axis));
    if (!w.second.defined()) return;
    second = static_cast<T*>(w.second.data);
    second_expert_step = w.second.step(0);
    second_out_step = w.second.step(out_axis);
    second_in_step = w.second.step(in_axis);
    width = static_cast<int>(w.second.size(out_axis));
  }

#if defined(__CUDACC__)
  __device__ T* at(int expert, int j, int in) const {
    if (second != nullptr && j >= width)
      return second + expert * second_expert_step + (j - width) * second_out_step + in * second_in_step;
    return data + expert * expert_step + out.place(j) * out_step + in * in_step;
  }
  /// Whether columns j and j + 1 are out_step apart for every j.
  __device__ bool evenly_spaced() const { return second == nullptr && out.block == 0; }
  /// The steps of the tensor that column j is in.
  __device__ std::int64_t in_step_of(int j) const { return second != nullptr && j >= width ? second_in_step : in_step; }
  __device__ std::int64_t out_step_of(int j) const { return second != nullptr && j >= width ? second_out_step : out_step; }
#endif
};

/// Columns of [gate, up] that a weight has.
inline std::int64_t out_columns(const Weights& w) { return w.weight.size(w.transposed ? 2 : 1) * (w.second.defined() ? 2 : 1); }

/// A bias (E, columns) of T or float. Absent: zeros.
template <class T>
struct ExpertBias {
  const void* data = nullptr;
  std::int64_t expert_step = 0, step = 0;
  OutAxis out;
  bool is_float = false;

  ExpertBias() = default;
  explicit ExpertBias(const TensorView& b, std::int64_t gate_block = 0) {
    if (!b.defined()) return;
    data = b.data;
    expert_step = b.step(0);
    step = b.step(1);
    out = OutAxis(gate_block, b.size(1));
    is_float = b.dtype == DType::float32;
  }

#if defined(__CUDACC__)
  template <class S>
  __device__ S at(int expert, int j) const {
    return data == nullptr ? S(0) : load<S>(expert * expert_step + out.place(j) * step);
  }
  /// The element so far from the first.
  template <class S>
  __device__ S load(std::int64_t i) const {
    return is_float ? S(static_cast<const float*>(data)[i]) : S(static_cast<const T*>(data)[i]);
  }
#endif
};

}  // namespace intarsia::cuda
