// What routing_check.cu stands on: tensors that live on the host and on the device, poison, comparison with the reference.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/half.h"
#include "cuda/cuda.h"
#include "cuda/launch.h"
#include "reference/element.h"
#include "reference/reference.h"

namespace intarsia::check_routing {

using cuda::check;
using Random = std::mt19937_64;

inline int failures = 0, checks = 0;

inline void fail(const std::string& what) {
  if (++failures <= 40) std::printf("FAIL %s\n", what.c_str());
}

constexpr std::size_t kGuard = 256;         // bytes behind every buffer that must stay as they were
constexpr unsigned char kGuardByte = 0xfe;  // as numbers about -1e38 or NaN (float16), which no sum hides

/// Device memory of exactly so many bytes, with a guard behind.
class DeviceBytes {
 public:
  explicit DeviceBytes(std::size_t bytes) : bytes_(bytes) {
    check(cudaMalloc(reinterpret_cast<void**>(&data_), bytes + kGuard), "cudaMalloc");
    check(cudaMemset(data_ + bytes, kGuardByte, kGuard), "cudaMemset");
  }
  ~DeviceBytes() { cudaFree(data_); }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;

  std::byte* get() const { return reinterpret_cast<std::byte*>(data_); }
  void fill(int byte) const { check(cudaMemset(data_, byte, bytes_), "cudaMemset"); }
  bool guarded() const {
    unsigned char guard[kGuard];
    check(cudaMemcpy(guard, data_ + bytes_, kGuard, cudaMemcpyDeviceToHost), "cudaMemcpy");
    for (const unsigned char b : guard)
      if (b != kGuardByte) return false;
    return true;
  }

 private:
  unsigned char* data_ = nullptr;
  std::size_t bytes_;
};

/// How a tensor lies in memory: elements skipped in front, and padding of its rows.
struct Place {
  std::int64_t offset = 0, row_padding = 0, inner_step = 1;
};

/// The same tensor on the host (for the reference) and on the device.
class Tensor {
 public:
  Tensor(DType dtype, std::vector<std::int64_t> shape, Place place = {}) {
    view_.dtype = dtype;
    view_.rank = static_cast<int>(shape.size());
    std::int64_t step = place.inner_step, elements = 1;
    for (int i = view_.rank - 1; i >= 0; --i) {
      const auto n = shape[static_cast<std::size_t>(i)];
      view_.shape[static_cast<std::size_t>(i)] = n;
      view_.stride[static_cast<std::size_t>(i)] = step;
      step = step * n + (i == view_.rank - 1 ? place.row_padding : 0);
      elements *= n;
    }
    const std::size_t count = elements == 0 ? 0 : static_cast<std::size_t>(place.offset + step);
    host_.assign(count * size_of(dtype), std::byte{0xff});  // NaN between the rows, where nothing may read
    device_ = std::make_unique<DeviceBytes>(host_.size());
    offset_ = static_cast<std::size_t>(place.offset) * size_of(dtype);
  }

  TensorView on(bool device) const {
    TensorView v = view_;
    std::byte* const base = device ? device_->get() : const_cast<std::byte*>(host_.data());
    v.data = base + (host_.empty() ? 0 : offset_);
    v.device = {device ? DeviceType::cuda : DeviceType::cpu, 0};
    return v;
  }
  TensorView host() const { return on(false); }

  std::int64_t size(int axis) const { return view_.size(axis); }
  DType dtype() const { return view_.dtype; }

  /// Every element from a function of its flat index.
  void fill(const std::function<double(std::int64_t)>& value) {
    const TensorView v = host();
    std::int64_t i = 0;
    for_each([&](auto... index) { reference::store(v, value(i++), index...); });
    upload();
  }
  void poison(int byte) {
    if (!host_.empty()) std::memset(host_.data(), byte, host_.size());
    upload();
  }
  void upload() const { check(cudaMemcpy(device_->get(), host_.data(), host_.size(), cudaMemcpyHostToDevice), "cudaMemcpy"); }
  std::vector<std::byte> download() const {
    std::vector<std::byte> bytes(host_.size());
    check(cudaMemcpy(bytes.data(), device_->get(), bytes.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return bytes;
  }
  bool guarded() const { return device_->guarded(); }
  std::vector<std::byte>& bytes() { return host_; }

  /// The elements of a copy of the buffer, as doubles in flat order.
  std::vector<double> values(const std::vector<std::byte>& buffer) const {
    TensorView v = view_;
    v.data = const_cast<std::byte*>(buffer.data()) + (buffer.empty() ? 0 : offset_);
    std::vector<double> all;
    for_each([&](auto... index) { all.push_back(reference::load(v, index...)); });
    return all;
  }
  std::vector<double> reference_values() const { return values(host_); }
  std::vector<double> device_values() const { return values(download()); }

 private:
  template <class Body>
  void for_each(Body&& body) const {
    for (std::int64_t i = 0; i < view_.size(0); ++i) {
      if (view_.rank == 1) body(i);
      else
        for (std::int64_t j = 0; j < view_.size(1); ++j) body(i, j);
    }
  }

  TensorView view_;
  std::vector<std::byte> host_;
  std::unique_ptr<DeviceBytes> device_;
  std::size_t offset_ = 0;
};

inline double tolerance(DType dtype, double fp32) {
  switch (dtype) {
    case DType::bfloat16: return 4e-3;
    case DType::float16: return 5e-4;
    case DType::float64: return 1e-11;
    default: return fp32;
  }
}

/// Spacing of a 16-bit dtype's numbers at a value: two sums that differ in their last bits may be rounded to neighbours.
inline double spacing(DType dtype, double value) {
  switch (dtype) {
    case DType::bfloat16: return 0x1p-7 * std::abs(value);
    case DType::float16: return std::max(0x1p-10 * std::abs(value), 0x1p-24);
    default: return 0;
  }
}

/// The error in the norm, `limit` of the tensor's, in which one element rounded the other way does not count; and every
/// element, eight times that of itself and the root mean square. `scale`, the size of the terms, takes its place where they
/// cancel.
inline void compare_numbers(const std::string& what, const std::vector<double>& got, const std::vector<double>& want,
                            double limit, double scale = 0, DType dtype = DType::float32) {
  ++checks;
  double error = 0, norm = 0, largest = 0, worst = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    if (std::isnan(got[i]) != std::isnan(want[i])) return fail(what + ": NaN at " + std::to_string(i));
    if (!std::isfinite(want[i])) continue;
    norm += want[i] * want[i];
    largest = std::max(largest, std::abs(want[i]));
  }
  const auto count = static_cast<double>(std::max<std::size_t>(1, want.size()));
  const double rms = std::max(scale, std::sqrt(norm / count));
  for (std::size_t i = 0; i < want.size(); ++i) {
    if (got[i] == want[i] || std::isnan(want[i])) continue;
    const double difference = std::abs(got[i] - want[i]);
    error += difference * difference;
    worst = std::max(worst, difference / std::max(8 * limit * (std::abs(want[i]) + rms), spacing(dtype, want[i])));
  }
  const double allowed = limit * rms * std::sqrt(count) + spacing(dtype, largest);
  char text[160];
  std::snprintf(text, sizeof text, ": error %.3g in the norm, allowed %.3g; worst element %.3g of what is allowed",
                std::sqrt(error), allowed, worst);
  if (!(std::sqrt(error) <= allowed) || !(worst <= 1)) fail(what + text);
}

inline void compare_exactly(const std::string& what, const std::vector<double>& got, const std::vector<double>& want) {
  ++checks;
  for (std::size_t i = 0; i < want.size(); ++i)
    if (got[i] != want[i])
      return fail(what + ": at " + std::to_string(i) + " of " + std::to_string(want.size()) + " got " + std::to_string(got[i]) +
                  ", expected " + std::to_string(want[i]));
}

/// Runs an operation on the device, with a workspace of exactly the bytes it asked for, full of `byte`.
template <class Op>
void run_on_device(const std::string& what, const Op& op, int byte) {
  const DeviceBytes workspace(cuda::workspace_bytes(op));
  workspace.fill(byte);
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");  // uploads and poison may still be on their way
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  cuda::run(op, Execution{stream, workspace.get(), 1});
  check(cudaStreamSynchronize(stream), what.c_str());
  check(cudaStreamDestroy(stream), "cudaStreamDestroy");
  if (!workspace.guarded()) fail(what + ": wrote past its workspace");
}

/// What is to be compared: integers exactly, numbers within a limit; `custom` tensors are left to the caller.
struct Output {
  Tensor* tensor;
  const char* name;
  double fp32_limit = 2e-6;
  bool custom = false;
  bool keep = false;  // an input as well: not poisoned
  double scale = 0;   // of the terms of a sum that may cancel
};

/// Poisons the outputs (not those that are inputs too), runs the reference and, twice, the device: both runs must give the same
/// bits, whatever the workspace held. build(device) gives the operation.
template <class Build>
void check_operation(const std::string& what, std::vector<Output> outputs, const Build& build) {
  for (Output& o : outputs) {
    if (!o.keep) o.tensor->poison(o.tensor->dtype() == DType::int32 || o.tensor->dtype() == DType::int64 ? 0x7b : 0xff);
  }
  std::vector<std::vector<std::byte>> first;
  for (const int byte : {0xff, 0x35}) {
    for (std::size_t i = 0; i < outputs.size(); ++i) outputs[i].tensor->upload();
    run_on_device(what, build(true), byte);
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      const Output& o = outputs[i];
      if (!o.tensor->guarded()) fail(what + ": " + o.name + ": wrote past its end");
      auto bytes = o.tensor->download();
      if (byte == 0xff) first.push_back(std::move(bytes));
      else if (bytes != first[i]) fail(what + ": " + o.name + ": two runs differ");
    }
  }
  reference::run(build(false), Execution{});
  for (const Output& o : outputs) {
    if (o.custom) continue;
    const std::string name = what + ": " + o.name;
    const bool integers = o.tensor->dtype() == DType::int32 || o.tensor->dtype() == DType::int64;
    if (integers) compare_exactly(name, o.tensor->device_values(), o.tensor->reference_values());
    else
      compare_numbers(name, o.tensor->device_values(), o.tensor->reference_values(), tolerance(o.tensor->dtype(), o.fp32_limit),
                      o.scale, o.tensor->dtype());
  }
}

// ---- random inputs

inline double normal(Random& random) { return std::normal_distribution<double>()(random); }
inline std::int64_t below(Random& random, std::int64_t n) {
  return std::uniform_int_distribution<std::int64_t>(0, n - 1)(random);
}
template <class T>
T pick(Random& random, std::initializer_list<T> values) {
  return values.begin()[below(random, static_cast<std::int64_t>(values.size()))];
}
inline void fill_normal(Tensor& t, Random& random, double scale = 1) {
  t.fill([&](std::int64_t) { return scale * normal(random); });
}

inline DType score_type(DType x) { return x == DType::float64 ? DType::float64 : DType::float32; }
inline DType any_float(Random& random) {
  return pick(random, {DType::float32, DType::bfloat16, DType::float16, DType::float64});
}

}  // namespace intarsia::check_routing
