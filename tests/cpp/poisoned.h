// Tensors in poisoned memory with guards on both sides, and one operation run on two backends with everything compared: what
// the tests of the CPU backend share.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "api/fields.h"
#include "base/half.h"
#include "intarsia/ops.h"

namespace intarsia::poisoned {

inline constexpr std::size_t kGuard = 256;
inline constexpr std::byte kGuardByte{0xc3};
/// Memory that starts as NaN (floats) or as a large number (integers) and notices writes before or after it.
class Tensor {
 public:
  Tensor(DType dtype, std::vector<std::int64_t> shape) {
    view_.dtype = dtype;
    view_.rank = static_cast<int>(shape.size());
    std::int64_t step = 1;
    for (std::size_t i = shape.size(); i-- > 0; step *= shape[i]) view_.shape[i] = shape[i], view_.stride[i] = step;
    bytes_ = static_cast<std::size_t>(step) * size_of(dtype);
    memory_ = std::make_shared<std::vector<std::byte>>(bytes_ + 2 * kGuard, kGuardByte);
    const bool integer = dtype == DType::int32 || dtype == DType::int64;
    std::fill_n(memory_->begin() + kGuard, bytes_, std::byte{integer ? std::uint8_t{0x5a} : std::uint8_t{0xff}});
    view_.data = memory_->data() + kGuard;
  }

  const TensorView& view() const { return view_; }
  std::size_t bytes() const { return bytes_; }
  std::int64_t numel() const { return view_.numel(); }
  bool guards_intact() const {
    const auto intact = [](std::byte b) { return b == kGuardByte; };
    return std::all_of(memory_->begin(), memory_->begin() + kGuard, intact) &&
           std::all_of(memory_->end() - kGuard, memory_->end(), intact);
  }
  bool same_bits(const Tensor& other) const { return bytes_ == 0 || std::memcmp(view_.data, other.view_.data, bytes_) == 0; }

  double operator[](std::int64_t i) const {
    switch (view_.dtype) {
      case DType::float64: return view_.as<double>()[i];
      case DType::float32: return view_.as<float>()[i];
      case DType::bfloat16: return view_.as<bfloat16>()[i];
      case DType::float16: return view_.as<float16>()[i];
      case DType::int64: return static_cast<double>(view_.as<std::int64_t>()[i]);
      case DType::int32: return view_.as<std::int32_t>()[i];
      case DType::boolean: return view_.as<std::uint8_t>()[i];
    }
    return 0;
  }
  void set(std::int64_t i, double value) const {
    switch (view_.dtype) {
      case DType::float64: view_.as<double>()[i] = value; return;
      case DType::float32: view_.as<float>()[i] = static_cast<float>(value); return;
      case DType::bfloat16: view_.as<bfloat16>()[i] = bfloat16(static_cast<float>(value)); return;
      case DType::float16: view_.as<float16>()[i] = float16(static_cast<float>(value)); return;
      case DType::int64: view_.as<std::int64_t>()[i] = static_cast<std::int64_t>(value); return;
      case DType::int32: view_.as<std::int32_t>()[i] = static_cast<std::int32_t>(value); return;
      case DType::boolean: view_.as<std::uint8_t>()[i] = value != 0; return;
    }
  }
  Tensor fill(const std::function<double(std::int64_t)>& value) const {
    for (std::int64_t i = 0; i < numel(); ++i) set(i, value(i));
    return *this;
  }

 private:
  std::shared_ptr<std::vector<std::byte>> memory_;
  std::size_t bytes_ = 0;
  TensorView view_;
};

class PoisoningAllocator : public Allocator {
 public:
  void* allocate(std::size_t bytes) override {
    auto* memory = static_cast<std::byte*>(::operator new(bytes + 2 * kGuard, std::align_val_t{256}));
    std::fill_n(memory, bytes + 2 * kGuard, kGuardByte);
    std::fill_n(memory + kGuard, bytes, std::byte{0xff});
    return memory + kGuard;
  }
  void deallocate(void* pointer, std::size_t bytes) noexcept override {
    auto* memory = static_cast<std::byte*>(pointer) - kGuard;
    for (std::size_t i = 0; i < kGuard; ++i)
      intact_ = intact_ && memory[i] == kGuardByte && memory[kGuard + bytes + i] == kGuardByte;
    ::operator delete(memory, std::align_val_t{256});
  }
  bool intact() const { return intact_; }

 private:
  bool intact_ = true;
};

using Outputs = std::map<std::string, Tensor>;

/// Gives every output of an operation fresh poisoned memory; what is read and written starts as a copy.
struct FreshOutputs {
  Outputs outputs;
  void in(const char*, TensorView&) {}
  void optional_in(const char*, TensorView&) {}
  template <class T>
  void value(const char*, T&) {}
  void out(const char* name, TensorView& v) { replace(name, v, false); }
  void optional_out(const char* name, TensorView& v) { replace(name, v, false); }
  void inout(const char* name, TensorView& v) { replace(name, v, true); }
  void optional_inout(const char* name, TensorView& v) { replace(name, v, true); }

  void replace(const char* name, TensorView& v, bool copy) {
    if (!v.defined()) return;
    const Tensor fresh(v.dtype, {v.shape.begin(), v.shape.begin() + v.rank});
    if (copy && fresh.bytes() > 0) std::memcpy(fresh.view().data, v.data, fresh.bytes());
    v = fresh.view();
    outputs.emplace(name, fresh);
  }
};

template <class Op>
inline void accumulates(FreshOutputs&, Op&) {}
inline void accumulates(FreshOutputs& fresh, BiasBackward& op) {  // its outputs are read when it accumulates
  if (!op.accumulate) return;
  fresh.optional_inout("db_up", op.db_up);
  fresh.optional_inout("db_down", op.db_down);
}

template <class Op>
Outputs run_on(Op op, Backend backend, int threads) {
  PoisoningAllocator allocator;
  FreshOutputs fresh;
  accumulates(fresh, op);
  if (fresh.outputs.empty()) fields(fresh, op);
  set_num_threads(threads);
  run(op, Context{.backend = backend, .allocator = &allocator});
  EXPECT_TRUE(allocator.intact()) << Op::kName << ": wrote beyond its workspace";
  for (const auto& [name, tensor] : fresh.outputs) EXPECT_TRUE(tensor.guards_intact()) << Op::kName << ": " << name;
  return fresh.outputs;
}

constexpr double kFp32Error = 4e-6;  // of a short fp32 sum, over the sum of its absolute terms

inline double unit(DType dtype) { return dtype == DType::bfloat16 ? 0x1p-7 : dtype == DType::float16 ? 0x1p-10 : kFp32Error; }

/// Integers: equal. Floats: within the dtype's unit of the tensor's largest value, plus what fp32 sums whose absolute terms add
/// up to `terms` may lose by cancellation.
inline void expect_close(const Tensor& got, const Tensor& expected, double terms, const std::string& what) {
  double largest = 0;
  for (std::int64_t i = 0; i < got.numel(); ++i) largest = std::max(largest, std::abs(expected[i]));
  const DType dtype = got.view().dtype;
  const double limit = dtype == DType::int32 || dtype == DType::int64 ? 0 : unit(dtype) * largest + kFp32Error * terms;
  for (std::int64_t i = 0; i < got.numel(); ++i)
    ASSERT_TRUE(std::abs(got[i] - expected[i]) <= limit) << what << "[" << i << "]: " << got[i] << ", expected " << expected[i];
}

/// Runs `op` on the CPU backend with 1, 2 and 3 threads and on the reference backend; returns what the CPU wrote.
template <class Op>
Outputs verify(const Op& op, double terms = 0) {
  const Outputs one = run_on(op, Backend::cpu, 1), expected = run_on(op, Backend::reference, 1);
  for (const int threads : {2, 3})
    for (const auto& [name, tensor] : run_on(op, Backend::cpu, threads))
      EXPECT_TRUE(tensor.same_bits(one.at(name))) << Op::kName << ": " << name << " depends on the number of threads";
  for (const auto& [name, tensor] : one) expect_close(tensor, expected.at(name), terms, std::string(Op::kName) + ": " + name);
  return one;
}

/// Seeded afresh by every run; gtest prints nothing of it, so a failure names its sizes.
inline std::mt19937& generator() {
  static std::mt19937 random(std::random_device{}());
  return random;
}
inline std::int64_t below(std::int64_t n) { return std::uniform_int_distribution<std::int64_t>(0, n - 1)(generator()); }

inline Tensor normal(DType dtype, std::vector<std::int64_t> shape, double scale = 1) {
  std::normal_distribution<double> distribution;
  return Tensor(dtype, std::move(shape)).fill([&](std::int64_t) { return scale * distribution(generator()); });
}

}  // namespace intarsia::poisoned
