// Large shapes for gemm_check: against the general kernels, and the rates of the products.
#include "gemm_bench.h"

#include <algorithm>
#include <chrono>

#include "cuda/cuda.h"
#include "cuda/general/general.h"
#include "cuda/sm80/sm80.h"
#include "large_layer.h"

namespace intarsia::check {
namespace {

namespace general = cuda::general;
namespace sm80 = cuda::sm80;

// ---- kernels

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

/// `made_of_rounded`: the last output follows on wgmma from another one after that was rounded, elsewhere from its sums.
template <class Op>
void compare(const Shape& shape, const Op& op, const std::vector<TensorView>& outputs,
             const std::function<void(const std::string&, double)>& report, const Want& want, bool made_of_rounded = false) {
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
          const double of_half = made_of_rounded && i + 1 == outputs.size() ? 4e-3 : 1e-3;  // 2^-8, the rounding of one factor
          report(name + " " + path,
                 relative_difference(outputs[i], expected[i]) / (outputs[i].dtype == DType::bfloat16 ? of_half : 2e-5));
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
  std::vector<double> host_times;
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  for (int i = 0; i < 14; ++i) {
    cudaEventRecord(begin);
    const auto start = std::chrono::steady_clock::now();
    run();
    const std::chrono::duration<double, std::micro> host = std::chrono::steady_clock::now() - start;
    cudaEventRecord(end);
    must(cudaEventSynchronize(end), Op::kName);
    float ms = 0;
    cudaEventElapsedTime(&ms, begin, end);
    if (i < 3) continue;
    times.push_back(ms);
    host_times.push_back(host.count());
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::sort(times.begin(), times.end());
  std::sort(host_times.begin(), host_times.end());
  const double ms = times[times.size() / 2];
  const double rows = static_cast<double>(shape.tokens * shape.experts_per_token);
  const double flops = products * 2 * rows * static_cast<double>(shape.hidden) * static_cast<double>(shape.width);
  std::printf("%-10s %-22s %-8s %9.3f ms %8.1f TFLOP/s, the call %5.1f us\n", shape.name, Op::kName, path, ms, flops / ms / 1e9,
              host_times[host_times.size() / 2]);
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
      compare(shape, op, {a, b}, report, want, true);
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
