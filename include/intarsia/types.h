// Tensors as the library sees them: a pointer, a dtype, a device, a shape and strides. Views never own memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "intarsia/export.h"

namespace intarsia {

enum class DType : std::uint8_t { float64, float32, bfloat16, float16, int64, int32, boolean };

/// Bytes of one element.
constexpr std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::float64:
    case DType::int64: return 8;
    case DType::float32:
    case DType::int32: return 4;
    case DType::bfloat16:
    case DType::float16: return 2;
    case DType::boolean: return 1;
  }
  return 0;
}

enum class DeviceType : std::uint8_t { cpu, cuda };

struct Device {
  DeviceType type = DeviceType::cpu;
  int index = 0;
  friend bool operator==(const Device&, const Device&) = default;
};

inline constexpr int kMaxRank = 3;

/// A view of a tensor. Strides are in elements; any stride, zero and negative included, is legal for an input.
/// A view of rank 0 is an absent argument: the default of every optional field.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::float32;
  Device device = {};
  int rank = 0;
  std::array<std::int64_t, kMaxRank> shape{};
  std::array<std::int64_t, kMaxRank> stride{};

  TensorView() = default;

  /// A contiguous view.
  TensorView(void* data_, DType dtype_, std::initializer_list<std::int64_t> shape_, Device device_ = {})
      : data(data_), dtype(dtype_), device(device_), rank(static_cast<int>(shape_.size())) {
    int i = 0;
    for (std::int64_t n : shape_) shape[static_cast<std::size_t>(i++)] = n;
    std::int64_t step = 1;
    for (i = rank - 1; i >= 0; --i) {
      stride[static_cast<std::size_t>(i)] = step;
      step *= shape[static_cast<std::size_t>(i)];
    }
  }

  bool defined() const { return rank > 0; }
  std::int64_t size(int axis) const { return shape[static_cast<std::size_t>(axis)]; }
  std::int64_t step(int axis) const { return stride[static_cast<std::size_t>(axis)]; }

  std::int64_t numel() const {
    std::int64_t n = rank > 0 ? 1 : 0;
    for (int i = 0; i < rank; ++i) n *= size(i);
    return n;
  }

  bool contiguous() const {
    std::int64_t expected = 1;
    for (int i = rank - 1; i >= 0; --i) {
      if (size(i) != 1 && step(i) != expected) return false;
      expected *= size(i);
    }
    return true;
  }

  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

/// Where memory comes from. The caller of an operation owns the allocator; `intarsia::host_allocator()` is the default on the
/// CPU.
class INTARSIA_EXPORT Allocator {
 public:
  virtual ~Allocator();
  /// At least `bytes` bytes aligned to 256; never null for bytes > 0. Throws std::bad_alloc.
  virtual void* allocate(std::size_t bytes) = 0;
  virtual void deallocate(void* pointer, std::size_t bytes) noexcept = 0;
};

/// Bytes that an allocator has handed out: now, at most since the last reset, and how often.
struct AllocatorStats {
  std::size_t live = 0;
  std::size_t peak = 0;
  std::size_t count = 0;
};

/// The process-wide counting host allocator and its figures (bytes as requested).
INTARSIA_EXPORT Allocator& host_allocator();
INTARSIA_EXPORT AllocatorStats host_allocator_stats();
/// Sets peak to the bytes that are live now and count to zero.
INTARSIA_EXPORT void reset_host_allocator_stats();

}  // namespace intarsia
