// What one GEMM launch is told. Passed by value as a __grid_constant__ parameter: TMA reads the tensor maps from there.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/expert_rows.h"
#include "cuda/expert_weights.h"
#include "cuda/sm90/scheduler.h"
#include "cuda/sm90/tensor_map.h"
#include "intarsia/config.h"

namespace intarsia::cuda::sm90 {

/// Rows of any alignment, in 16 bits or fp32: too narrow, often, for a tensor map.
struct PlainRows {
  void* data;
  std::int64_t step;
  bool is_float;
};

template <class Element>
struct GemmArguments {
  CUtensorMap left[3];   ///< rows operations with a TMA left operand: its [gate, up] halves, its parts, or one
  CUtensorMap right[3];  ///< weights, or row buffers for weight gradients: [gate, up] halves, parts, or one
  CUtensorMap store[3];  ///< z gate, z up, a | rows | dz gate, dz up, a_scaled | dw (gate, up)
  CUtensorMap z[2];      ///< down_backward: z to read

  SourceRows<Element> gathered;  ///< x or dy, and which of its rows each row reads
  int hidden;                    ///< H, its columns

  ScheduleArguments schedule;
  int k_size;       ///< k of one half of the left operand; unused when k is rows of an expert
  int n_size;       ///< columns of one half
  int right_block;  ///< rows of a block of the right operand's map (Weights::gate_block), or more than any coordinate
  int store_block;  ///< the same of the gradient's map

  ScoreOfRow<float> scores;
  ExpertBias<Element> bias;
  ScorePlacement score_on;
  bool store_z;
  bool store_a;
  bool accumulate;
  float grad_scale;
  float* dot_parts;  ///< (ceil(I / kRowDotColumns), R) partial sums of ds, or null
  PlainRows logits;  ///< router_logits
};

}  // namespace intarsia::cuda::sm90
