// Guarded, poisoned, reproducible memory.
#include "cases/tensors.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numbers>
#include <utility>

#include "base/random.h"
#include "reference/element.h"

namespace intarsia::cases {
namespace {

constexpr std::size_t kGuard = 64;  // bytes before and after each tensor
constexpr auto kGuardByte = std::byte{0xa5};

bool is_float(DType dtype) { return dtype <= DType::float16; }
std::byte poison(DType dtype) { return is_float(dtype) ? std::byte{0xff} : std::byte{0x5a}; }

/// Strides of `layout`, in elements.
std::array<std::int64_t, kMaxRank> strides(const Shape& shape, Layout layout) {
  std::array<std::int64_t, kMaxRank> stride{};
  const auto rank = shape.size();
  std::int64_t step = layout == Layout::strided ? 2 : 1;
  for (std::size_t i = 0; i < rank; ++i) {
    const std::size_t axis = layout == Layout::permuted ? i : rank - 1 - i;
    stride[axis] = step;
    step *= shape[axis];
    if (layout == Layout::padded && i == 0) step += 3;
  }
  if (layout == Layout::expanded) stride[0] = 0;
  if (layout == Layout::reversed) stride[0] = -stride[0];
  return stride;
}

/// Address of element i in row-major order.
std::byte* address(const TensorView& v, std::int64_t i) {
  std::int64_t place = 0;
  for (int axis = v.rank - 1; axis >= 0; --axis) {
    place += i % v.size(axis) * v.step(axis);
    i /= v.size(axis);
  }
  return v.as<std::byte>() + place * static_cast<std::int64_t>(size_of(v.dtype));
}

TensorView scalar(const TensorView& v, std::int64_t i) { return TensorView(address(v, i), v.dtype, {1}); }

}  // namespace

double element(const TensorView& v, std::int64_t i) { return reference::load(scalar(v, i), 0); }
void set_element(const TensorView& v, std::int64_t i, double value) { reference::store(scalar(v, i), value, 0); }

bool poisoned(const TensorView& v, std::int64_t i) {
  const std::byte* bytes = address(v, i);
  return std::all_of(bytes, bytes + size_of(v.dtype), [&](std::byte b) { return b == poison(v.dtype); });
}

double round_to(DType dtype, double value) {
  std::byte memory[8];
  const TensorView v(memory, dtype, {1});
  reference::store(v, value, 0);
  return reference::load(v, 0);
}

double Tensors::random() { return uniform01(seed_, counter_++); }
std::int64_t Tensors::random(std::int64_t count) {
  return std::min(static_cast<std::int64_t>(random() * static_cast<double>(count)), count - 1);
}

TensorView Tensors::allocate(DType declared, const Shape& shape, Layout layout, bool output) {
  TensorView v;
  v.dtype = is_float(declared) && precision_ != Precision::stored ? DType::float64 : declared;
  v.rank = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), v.shape.begin());
  v.stride = strides(shape, layout);
  if (v.numel() == 0) return v;  // no memory at all: the null pointer of an empty torch tensor

  std::int64_t lowest = 0, highest = 0;
  for (int axis = 0; axis < v.rank; ++axis) {
    const std::int64_t reach = (v.size(axis) - 1) * v.step(axis);
    (reach < 0 ? lowest : highest) += reach;
  }
  const std::size_t size = size_of(v.dtype), lead = layout == Layout::padded ? size : 0;
  const std::size_t extent = static_cast<std::size_t>(highest - lowest + 1) * size;
  memories_.push_back({std::vector<std::byte>(extent + lead + 3 * kGuard, kGuardByte), {}, declared});
  std::byte* start = memories_.back().bytes.data() + kGuard;
  start += kGuard - reinterpret_cast<std::uintptr_t>(start) % kGuard;  // aligned, as far as the layout lets it be
  v.data = start + lead - lowest * static_cast<std::int64_t>(size);
  if (output)
    for (std::int64_t i = 0; i < v.numel(); ++i) std::fill_n(address(v, i), size, poison(v.dtype));
  return v;
}

template <class Value>
TensorView Tensors::fill(DType dtype, const Shape& shape, Layout layout, Value value) {
  const TensorView v = allocate(dtype, shape, layout, false);
  for (std::int64_t i = 0; i < v.numel(); ++i) {
    const double rounded = round_to(dtype, value(i));
    set_element(v, i, precision_ == Precision::absolute && is_float(dtype) ? std::abs(rounded) : rounded);
  }
  return v;
}

TensorView Tensors::normal(DType dtype, const Shape& shape, double deviation, Layout layout) {
  return fill(dtype, shape, layout, [&](std::int64_t) {
    const double radius = std::sqrt(-2 * std::log(1 - random()));
    return deviation * radius * std::cos(2 * std::numbers::pi * random());
  });
}

TensorView Tensors::uniform(DType dtype, const Shape& shape, double low, double high, Layout layout) {
  return fill(dtype, shape, layout, [&](std::int64_t) { return low + (high - low) * random(); });
}

TensorView Tensors::constant(DType dtype, const Shape& shape, double value, Layout layout) {
  return fill(dtype, shape, layout, [&](std::int64_t) { return value; });
}

TensorView Tensors::values(DType dtype, const Shape& shape, const std::vector<double>& values, Layout layout) {
  return fill(dtype, shape, layout, [&](std::int64_t i) { return values.at(static_cast<std::size_t>(i)); });
}

TensorView Tensors::out(DType dtype, const Shape& shape, Layout layout) { return allocate(dtype, shape, layout, true); }

const Tensors::Memory& Tensors::memory_of(const TensorView& v) const {
  const auto* data = v.as<const std::byte>();
  return *std::find_if(memories_.begin(), memories_.end(), [&](const Memory& m) {
    return !std::less<>{}(data, m.bytes.data()) && std::less<>{}(data, m.bytes.data() + m.bytes.size());
  });
}

void Tensors::set(const TensorView& v, double value, std::int64_t i, std::int64_t j) {
  const double rounded = round_to(memory_of(v).declared, value);
  const std::int64_t index = v.rank == 2 ? i * v.size(1) + j : i;
  set_element(v, index, precision_ == Precision::absolute && is_float(v.dtype) ? std::abs(rounded) : rounded);
}

void Tensors::set_row(const TensorView& v, double value, std::int64_t i) {
  if (v.rank == 1) return set(v, value, i);
  for (std::int64_t j = 0; j < v.size(1); ++j) set(v, value, i, j);
}

void Tensors::remember() {
  for (Memory& m : memories_) m.before = m.bytes;
}

std::string Tensors::damage(const std::vector<TensorView>& outputs) const {
  std::vector<std::vector<bool>> writable;
  for (const Memory& m : memories_) writable.emplace_back(m.bytes.size(), false);
  for (const TensorView& v : outputs) {
    for (std::int64_t i = 0; i < v.numel(); ++i) {
      const Memory& m = memory_of(v);
      const auto first = address(v, i) - m.bytes.data();
      auto& flags = writable[static_cast<std::size_t>(&m - memories_.data())];
      std::fill_n(flags.begin() + first, size_of(v.dtype), true);
    }
  }
  for (std::size_t k = 0; k < memories_.size(); ++k) {
    const Memory& m = memories_[k];
    for (std::size_t i = 0; i < m.bytes.size(); ++i)
      if (!writable[k][i] && m.bytes[i] != m.before[i])
        return "byte " + std::to_string(i) + " of tensor number " + std::to_string(k + 1) +
               " of the case was written, outside every output";
  }
  return {};
}

}  // namespace intarsia::cases
