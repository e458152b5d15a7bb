// Tensors of a check: what an operation starts from, what the reference makes of it on the host, what the GPU makes of it.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "base/random.h"
#include "intarsia/types.h"
#include "reference/element.h"

namespace intarsia::check {

inline void must(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  std::printf("FAIL %s: %s\n", call, cudaGetErrorString(status));
  std::exit(2);
}

class Tensor {
 public:
  Tensor() = default;
  /// Strides default to contiguous ones; `offset` elements lie before the first.
  Tensor(DType dtype, std::vector<std::int64_t> shape, std::vector<std::int64_t> stride = {}, std::int64_t offset = 0)
      : offset_(static_cast<std::size_t>(offset) * size_of(dtype)) {
    std::int64_t last = offset, step = 1;
    view_.dtype = dtype;
    view_.rank = static_cast<int>(shape.size());
    stride.resize(shape.size());
    const bool contiguous = std::all_of(stride.begin(), stride.end(), [](auto s) { return s == 0; });
    for (std::size_t i = shape.size(); i-- > 0;) {
      view_.shape[i] = shape[i];
      view_.stride[i] = contiguous ? step : stride[i];
      step *= shape[i];
      last += std::max<std::int64_t>(shape[i] - 1, 0) * view_.stride[i];
    }
    initial_.assign(step > 0 ? static_cast<std::size_t>(last + 1) * size_of(dtype) : 0, 0xff);
    if (!initial_.empty()) must(cudaMalloc(&device_, initial_.size()), "cudaMalloc");
    start();
  }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  Tensor(Tensor&& other) noexcept { *this = std::move(other); }
  Tensor& operator=(Tensor&& other) noexcept {
    std::swap(view_, other.view_);
    std::swap(offset_, other.offset_);
    std::swap(device_, other.device_);
    initial_.swap(other.initial_);
    host_.swap(other.host_);
    return *this;
  }
  ~Tensor() { cudaFree(device_); }

  bool defined() const { return view_.rank > 0; }
  TensorView host() const { return at(host_.empty() ? nullptr : const_cast<unsigned char*>(host_.data()) + offset_, {}); }
  TensorView device() const {
    return at(device_ ? static_cast<unsigned char*>(device_) + offset_ : nullptr, {DeviceType::cuda, 0});
  }
  std::int64_t size(int axis) const { return view_.size(axis); }

  /// Host and device hold what the tensor starts from (0xff everywhere, a NaN, unless filled).
  void start() {
    host_ = initial_;
    start_device();
  }
  void start_device() {
    if (device_) must(cudaMemcpy(device_, initial_.data(), initial_.size(), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  /// Makes what the host holds now the start.
  void keep() {
    initial_ = host_;
    start();
  }
  Tensor& uniform(std::uint64_t seed, double scale, std::int64_t rows = -1) {
    const TensorView v = host();
    for_each([&](auto... i) {
      const std::int64_t first[] = {i...};
      if (rows < 0 || first[0] < rows) reference::store(v, scale * (2 * uniform01(seed, counter_++) - 1), i...);
    });
    keep();
    return *this;
  }
  /// The device alone has NaN from that row on, until the next start.
  void poison_device(std::int64_t row) {
    const std::size_t begin = offset_ + static_cast<std::size_t>(row * view_.step(0)) * size_of(view_.dtype);
    must(cudaMemset(static_cast<unsigned char*>(device_) + begin, 0xff, initial_.size() - begin), "cudaMemset");
  }
  Tensor& values(const std::vector<std::int32_t>& list) {
    std::memcpy(host_.data(), list.data(), std::min(host_.size(), list.size() * sizeof(std::int32_t)));
    keep();
    return *this;
  }

  Tensor take() { return std::move(*this); }

  std::vector<unsigned char> download() const {
    std::vector<unsigned char> bytes(initial_.size());
    if (device_) must(cudaMemcpy(bytes.data(), device_, bytes.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return bytes;
  }
  TensorView view_of(std::vector<unsigned char>& bytes) const {
    return at(bytes.empty() ? nullptr : bytes.data() + offset_, {});
  }

  template <class Body>
  void for_each(Body&& body) const {
    if (view_.rank == 1)
      for (std::int64_t i = 0; i < size(0); ++i) body(i);
    if (view_.rank == 2)
      for (std::int64_t i = 0; i < size(0); ++i)
        for (std::int64_t j = 0; j < size(1); ++j) body(i, j);
    if (view_.rank == 3)
      for (std::int64_t i = 0; i < size(0); ++i)
        for (std::int64_t j = 0; j < size(1); ++j)
          for (std::int64_t k = 0; k < size(2); ++k) body(i, j, k);
  }

 private:
  TensorView at(void* data, Device device) const {
    TensorView v = view_;
    v.data = data;
    v.device = device;
    return v;
  }

  TensorView view_;
  std::size_t offset_ = 0;
  void* device_ = nullptr;
  std::vector<unsigned char> initial_, host_;
  std::uint64_t counter_ = 0;
};

/// One output of an operation.
struct Output {
  const char* name;
  Tensor* tensor;
  std::int64_t rows = -1;  ///< rows that are written; the rest must keep every bit. -1: all
  double loose = 0;        ///< relative error in the norm that is allowed, for what is made from a rounded intermediate
};

/// An ulp of the stored dtype (reference and GPU both round), and sums in fp32 (fp64).
inline double relative_ulp(DType dtype) {
  switch (dtype) {
    case DType::bfloat16: return 0x1p-7;
    case DType::float16: return 0x1p-10;
    case DType::float32: return 2e-6;
    default: return 1e-13;
  }
}

/// Worst error over what is allowed: at most 1 is right. Elements are held to an ulp of themselves and 1e-5 (fp64: 1e-12) of
/// the tensor's root mean square; `loose` instead compares norms, against `loose` itself.
inline double error_of(const Output& output, std::vector<unsigned char>& got_bytes, double loose) {
  const TensorView expected = output.tensor->host(), got = output.tensor->view_of(got_bytes);
  double squares = 0, difference = 0, worst = 0;
  std::int64_t count = 0;
  output.tensor->for_each([&](auto... i) {
    const double e = reference::load(expected, i...);
    squares += std::isfinite(e) ? e * e : 0;
    ++count;
  });
  const double rms = count ? std::sqrt(squares / static_cast<double>(count)) : 0;
  const double ulp = relative_ulp(expected.dtype), slack = (expected.dtype == DType::float64 ? 1e-12 : 1e-5) * rms + 1e-7;
  output.tensor->for_each([&](auto... i) {
    const std::int64_t place[] = {i...};
    const double e = reference::load(expected, i...), g = reference::load(got, i...);
    if (output.rows >= 0 && place[0] >= output.rows) {
      const std::size_t element = static_cast<std::size_t>(reference::element(got, i...)) * size_of(got.dtype);
      if (std::memcmp(static_cast<char*>(expected.data) + element, static_cast<char*>(got.data) + element,
                      size_of(got.dtype)) != 0)
        worst = 1e30;  // a row past the last one was written
      return;
    }
    if (e == g || (std::isnan(e) && std::isnan(g))) return;
    const double error = std::abs(e - g);
    if (!(error < 1e30)) worst = 1e30;
    else if (loose > 0) difference += error * error;
    else worst = std::max(worst, error / (1.01 * ulp * std::abs(e) + slack));
  });
  return loose > 0 ? std::max(worst, std::sqrt(difference / std::max(squares, 1e-30)) / loose) : worst;
}

}  // namespace intarsia::check
