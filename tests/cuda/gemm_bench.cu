// Large shapes for gemm_check: random tensors made on the device, random routing made on the host.
#include "gemm_bench.h"

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#include "base/random.h"
#include "cuda/cuda.h"
#include "cuda/general/general.h"
#include "cuda/sm80/sm80.h"

namespace intarsia::check {
namespace {

namespace general = cuda::general;
namespace sm80 = cuda::sm80;

void must(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  std::printf("FAIL %s: %s\n", call, cudaGetErrorString(status));
  std::exit(2);
}

// ---- kernels

__global__ void fill(__nv_bfloat16* to, std::int64_t count, std::uint64_t seed, float scale) {
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
    std::uint64_t h = (seed << 40) + static_cast<std::uint64_t>(i) * 0x9e3779b97f4a7c15u;
    h = (h ^ (h >> 30)) * 0xbf58476d1ce4e5b9u;
    h = (h ^ (h >> 27)) * 0x94d049bb133111ebu;
    const float u = static_cast<float>(h >> 40) * 0x1p-23f - 1.0f;  // uniform in [-1, 1): standard deviation 0.577
    to[i] = __float2bfloat16(scale * 1.7320508f * u);
  }
}

/// sums[0] += (a - b)^2, sums[1] += a^2, over bfloat16 or float.
template <class T>
__global__ void difference(const T* a, const T* b, std::int64_t count, double* sums) {
  double squares = 0, of_a = 0;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
    const double x = static_cast<float>(a[i]), y = static_cast<float>(b[i]);
    squares += (x - y) * (x - y);
    of_a += x * x;
  }
  atomicAdd(sums, squares);
  atomicAdd(sums + 1, of_a);
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

// ---- large shapes against the general kernels

double relative_difference(const TensorView& got, const std::vector<char>& expected) {
  void* other = nullptr;
  double *sums = nullptr, host[2];
  must(cudaMalloc(&other, expected.size()), "cudaMalloc");
  must(cudaMalloc(reinterpret_cast<void**>(&sums), sizeof host), "cudaMalloc");
  must(cudaMemcpy(other, expected.data(), expected.size(), cudaMemcpyHostToDevice), "cudaMemcpy");
  must(cudaMemset(sums, 0, sizeof host), "cudaMemset");
  if (got.dtype == DType::bfloat16)
    difference<<<1024, 256>>>(static_cast<const __nv_bfloat16*>(other), static_cast<const __nv_bfloat16*>(got.data),
                              got.numel(), sums);
  else difference<<<1024, 256>>>(static_cast<const float*>(other), static_cast<const float*>(got.data), got.numel(), sums);
  must(cudaMemcpy(host, sums, sizeof host, cudaMemcpyDeviceToHost), "cudaMemcpy");
  cudaFree(other);
  cudaFree(sums);
  return std::sqrt(host[0] / host[1]);
}

std::vector<char> download(const TensorView& v) {
  std::vector<char> bytes(static_cast<std::size_t>(v.numel()) * size_of(v.dtype));
  must(cudaMemcpy(bytes.data(), v.data, bytes.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
  return bytes;
}

template <class Op>
void compare(const Shape& shape, const Op& op, const std::vector<TensorView>& outputs,
             const std::function<void(const std::string&, double)>& report, const Want& want) {
  const std::string name = std::string(Op::kName) + " large " + shape.name;
  if (!want(name)) return;
  const Block block(std::max({general::workspace_bytes(op), sm80::workspace_bytes(op), cuda::workspace_bytes(op)}));
  general::run(op, block.execution());
  std::vector<std::vector<char>> expected;
  for (const TensorView& v : outputs) expected.push_back(download(v));
  const auto against = [&](const char* path, auto run) {
    std::vector<std::vector<char>> first;
    for (int repeat = 0; repeat < 2; ++repeat) {
      for (const TensorView& v : outputs)
        must(cudaMemset(v.data, 0xff, static_cast<std::size_t>(v.numel()) * size_of(v.dtype)), "cudaMemset");
      run();
      must(cudaDeviceSynchronize(), name.c_str());
      for (std::size_t i = 0; i < outputs.size(); ++i) {
        if (repeat == 0) {
          // Both round the same sums, formed in another order: few elements fall to the other side.
          report(name + " " + path,
                 relative_difference(outputs[i], expected[i]) / (outputs[i].dtype == DType::bfloat16 ? 1e-3 : 2e-5));
          first.push_back(download(outputs[i]));
        } else if (download(outputs[i]) != first[i]) {
          report(name + " " + path + ": not the same bits when repeated", 1e30);
        }
      }
    }
  };
  against("sm80", [&] { sm80::run(op, block.execution()); });
  if (cuda::explain(op).find("wgmma,") != std::string::npos) against("sm90", [&] { cuda::run(op, block.execution()); });
}

// ---- rates

template <class Op, class Run>
void time_path(const char* path, const Shape& shape, const Op&, double products, Run&& run) {
  std::vector<float> times;
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  for (int i = 0; i < 14; ++i) {
    cudaEventRecord(begin);
    run();
    cudaEventRecord(end);
    must(cudaEventSynchronize(end), Op::kName);
    float ms = 0;
    cudaEventElapsedTime(&ms, begin, end);
    if (i >= 3) times.push_back(ms);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::sort(times.begin(), times.end());
  const double ms = times[times.size() / 2];
  const double rows = static_cast<double>(shape.tokens * shape.experts_per_token);
  const double flops = products * 2 * rows * static_cast<double>(shape.hidden) * static_cast<double>(shape.width);
  std::printf("%-10s %-22s %-8s %9.3f ms %8.1f TFLOP/s\n", shape.name, Op::kName, path, ms, flops / ms / 1e9);
  std::fflush(stdout);
}

/// `products`: multiples of 2 R H I.
template <class Op>
void bench(const Shape& shape, const Op& op, double products, const Want& want) {
  if (!want(std::string(Op::kName) + " " + shape.name)) return;
  const Block block(std::max(sm80::workspace_bytes(op), cuda::workspace_bytes(op)));
  time_path("sm80", shape, op, products, [&] { sm80::run(op, block.execution()); });
  if (cuda::explain(op).find("wgmma,") != std::string::npos)
    time_path("sm90", shape, op, products, [&] { cuda::run(op, block.execution()); });
}

}  // namespace

void check_large(const std::function<void(const std::string&, double)>& report, const Want& want) {
  for (const Shape& shape : {Shape{"qwen3-like", 4096, 2048, 768, 32, 8}, Shape{"odd", 3001, 1000, 1416, 5, 2}}) {
    Layer layer(shape);
    TensorView a, b, c;
    {
      const auto op = layer.up_forward(a, b);
      compare(shape, op, {a, b}, report, want);
    }
    {
      const auto op = layer.down_forward(a);
      compare(shape, op, {a}, report, want);
    }
    {
      const auto op = layer.down_backward(a, b, c);
      compare(shape, op, {a, b, c}, report, want);
    }
    {
      const auto op = layer.down_weight_backward(a);
      compare(shape, op, {a}, report, want);
    }
    {
      const auto op = layer.up_backward(a);
      compare(shape, op, {a}, report, want);
    }
    {
      const auto op = layer.up_weight_backward(a);
      compare(shape, op, {a}, report, want);
    }
  }
}

int bench_products(const Want& want) {
  for (const Shape& shape : {Shape{"qwen3-30b", 32768, 2048, 768, 128, 8}, Shape{"mixtral", 16384, 4096, 14336, 8, 2}}) {
    Layer layer(shape);
    TensorView a, b, c;
    bench(shape, layer.up_forward(a, b), 2, want);
    bench(shape, layer.down_forward(a), 1, want);
    bench(shape, layer.down_backward(a, b, c), 1, want);
    bench(shape, layer.down_weight_backward(a), 1, want);
    bench(shape, layer.up_backward(a), 2, want);
    bench(shape, layer.up_weight_backward(a), 2, want);
  }
  return 0;
}

}  // namespace intarsia::check
