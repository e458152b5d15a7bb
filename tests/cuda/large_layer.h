// A layer's tensors at a real size on the device: random values made there, random routing made on the host.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "base/execution.h"
#include "base/random.h"
#include "intarsia/ops.h"

namespace intarsia::check {

inline void must(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  std::printf("FAIL %s: %s\n", call, cudaGetErrorString(status));
  std::exit(2);
}

static __global__ void fill(__nv_bfloat16* to, std::int64_t count, std::uint64_t seed, float scale) {
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
    std::uint64_t h = (seed << 40) + static_cast<std::uint64_t>(i) * 0x9e3779b97f4a7c15u;
    h = (h ^ (h >> 30)) * 0xbf58476d1ce4e5b9u;
    h = (h ^ (h >> 27)) * 0x94d049bb133111ebu;
    const float u = static_cast<float>(h >> 40) * 0x1p-23f - 1.0f;  // uniform in [-1, 1): standard deviation 0.577
    to[i] = __float2bfloat16(scale * 1.7320508f * u);
  }
}

// ---- a layer on the device

struct Shape {
  const char* name;
  std::int64_t tokens, hidden, width, experts, experts_per_token;
};

class Layer {
 public:
  explicit Layer(const Shape& shape) : s(shape), rows(shape.tokens * shape.experts_per_token) {
    lists();
    const float up = 1.0f / std::sqrt(static_cast<float>(s.hidden)), down = 1.0f / std::sqrt(static_cast<float>(s.width));
    x = random({s.tokens, s.hidden}, 1.0f);
    dy = random({s.tokens, s.hidden}, 1.0f);
    w_up = {.weight = random({s.experts, 2 * s.width, s.hidden}, up)};
    w_down = {.weight = random({s.experts, s.hidden, s.width}, down)};
    z = random({rows, 2 * s.width}, 1.0f);
    a = random({rows, s.width}, 1.0f);
  }
  ~Layer() {
    for (void* p : memory_) cudaFree(p);
  }
  Layer(const Layer&) = delete;
  Layer& operator=(const Layer&) = delete;

  TensorView make(DType dtype, std::initializer_list<std::int64_t> shape) {
    TensorView v(nullptr, dtype, shape, {DeviceType::cuda, 0});
    must(cudaMalloc(&v.data, static_cast<std::size_t>(v.numel()) * size_of(dtype)), "cudaMalloc");
    memory_.push_back(v.data);
    must(cudaMemset(v.data, 0xff, static_cast<std::size_t>(v.numel()) * size_of(dtype)), "cudaMemset");
    return v;
  }

  // The six products; `outputs` are what they write.
  UpForward up_forward(TensorView& z_out, TensorView& a_out) {
    z_out = make(DType::bfloat16, {rows, 2 * s.width});
    a_out = make(DType::bfloat16, {rows, s.width});
    return {.x = x, .expert_offsets = offsets, .row_token = token, .w_up = w_up, .z = z_out, .a = a_out};
  }
  DownForward down_forward(TensorView& out) {
    out = make(DType::bfloat16, {rows, s.hidden});
    return {.a = a, .expert_offsets = offsets, .w_down = w_down, .rows = out};
  }
  DownBackward down_backward(TensorView& dz, TensorView& a_scaled, TensorView& dscores) {
    dz = make(DType::bfloat16, {rows, 2 * s.width});
    a_scaled = make(DType::bfloat16, {rows, s.width});
    dscores = make(DType::float32, {s.tokens, s.experts_per_token});
    return {.dy = dy,
            .z = z,
            .expert_offsets = offsets,
            .row_token = token,
            .w_down = w_down,
            .scores = scores,
            .row_slot = slot,
            .dz = dz,
            .a_scaled = a_scaled,
            .dscores = dscores};
  }
  DownWeightBackward down_weight_backward(TensorView& out) {
    out = make(DType::bfloat16, {s.experts, s.hidden, s.width});
    return {.dy = dy, .a_scaled = a, .expert_offsets = offsets, .row_token = token, .dw_down = {.weight = out}};
  }
  UpBackward up_backward(TensorView& out) {
    out = make(DType::bfloat16, {rows, s.hidden});
    return {.dz = z, .expert_offsets = offsets, .w_up = w_up, .dx_rows = out};
  }
  UpWeightBackward up_weight_backward(TensorView& out) {
    out = make(DType::bfloat16, {s.experts, 2 * s.width, s.hidden});
    return {.dz = z, .x = x, .expert_offsets = offsets, .row_token = token, .dw_up = {.weight = out}};
  }

  Shape s;
  std::int64_t rows;
  TensorView x, dy, z, a, offsets, token, slot, scores;
  Weights w_up, w_down;

 private:
  TensorView random(std::initializer_list<std::int64_t> shape, float scale) {
    TensorView v = make(DType::bfloat16, shape);
    fill<<<2048, 256>>>(static_cast<__nv_bfloat16*>(v.data), v.numel(), ++seed_, scale);
    return v;
  }

  template <class T>
  TensorView upload(DType dtype, const std::vector<T>& values, std::initializer_list<std::int64_t> shape) {
    TensorView v = make(dtype, shape);
    must(cudaMemcpy(v.data, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
    return v;
  }

  /// Every token chooses different experts at random.
  void lists() {
    std::vector<std::vector<std::int32_t>> slots(static_cast<std::size_t>(s.experts));
    std::vector<std::int32_t> order(static_cast<std::size_t>(s.experts)), first{0}, tokens, of_row;
    std::vector<float> score(static_cast<std::size_t>(rows));
    for (std::size_t e = 0; e < order.size(); ++e) order[e] = static_cast<std::int32_t>(e);
    std::uint64_t counter = 0;
    for (std::int64_t i = 0; i < rows; ++i) {
      const auto k = static_cast<std::size_t>(i % s.experts_per_token);
      std::swap(order[k], order[k + static_cast<std::size_t>(uniform01(7, counter++) * static_cast<double>(order.size() - k))]);
      slots[static_cast<std::size_t>(order[k])].push_back(static_cast<std::int32_t>(i));
      score[static_cast<std::size_t>(i)] = static_cast<float>(uniform01(8, counter));
    }
    for (const auto& of_expert : slots) {
      for (const std::int32_t i : of_expert) {
        of_row.push_back(i);
        tokens.push_back(i / static_cast<std::int32_t>(s.experts_per_token));
      }
      first.push_back(static_cast<std::int32_t>(of_row.size()));
    }
    offsets = upload(DType::int32, first, {s.experts + 1});
    token = upload(DType::int32, tokens, {rows});
    slot = upload(DType::int32, of_row, {rows});
    scores = upload(DType::float32, score, {s.tokens, s.experts_per_token});
  }

  std::vector<void*> memory_;
  std::uint64_t seed_ = 0;
};

/// Workspace for one operation.
class Block {
 public:
  explicit Block(std::size_t bytes) { must(cudaMalloc(&pointer_, bytes + 256), "cudaMalloc"); }
  ~Block() { cudaFree(pointer_); }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  Execution execution() const { return {nullptr, static_cast<std::byte*>(pointer_), 1}; }

 private:
  void* pointer_ = nullptr;
};

}  // namespace intarsia::check
