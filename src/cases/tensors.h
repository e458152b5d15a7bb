// The memory of one case: random inputs, poisoned outputs, and guard zones around everything, so that a byte written outside an
// output, or an input that changed, is seen.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "intarsia/types.h"

namespace intarsia::cases {

using Shape = std::vector<std::int64_t>;

/// How a tensor lies in memory.
///   dense; padded: rows longer than they are read, starting one element in (so nothing is aligned); expanded: stride 0 along
///   axis 0; reversed: negative stride along axis 0; strided: every second element along the last axis; permuted: axis 0
///   fastest.
enum class Layout { dense, padded, expanded, reversed, strided, permuted };

/// What is stored.
///   stored    each tensor in its own dtype
///   exact     the same values, rounded to their dtype, kept in float64: the arithmetic of the case without its roundings
///   absolute  their absolute values in float64: with them an operation computes the sums of absolute products, the scale that
///             rounding errors are measured by
enum class Precision { stored, exact, absolute };

class Tensors {
 public:
  /// The same seed and the same calls give the same values in every precision.
  Tensors(std::uint64_t seed, Precision precision) : seed_(seed), precision_(precision) {}
  Tensors(const Tensors&) = delete;
  Tensors& operator=(const Tensors&) = delete;

  TensorView normal(DType, const Shape&, double deviation = 1, Layout = Layout::dense);
  TensorView uniform(DType, const Shape&, double low, double high, Layout = Layout::dense);
  TensorView constant(DType, const Shape&, double value, Layout = Layout::dense);
  /// Values in row-major order.
  TensorView values(DType, const Shape&, const std::vector<double>&, Layout = Layout::dense);
  /// An output: floating-point elements are NaN (every bit set), integers 0x5a5a5a5a.
  TensorView out(DType, const Shape&, Layout = Layout::dense);

  /// Element of a rank-1 or rank-2 tensor made here, rounded to its declared dtype.
  void set(const TensorView&, double value, std::int64_t i, std::int64_t j = 0);
  void set_row(const TensorView&, double value, std::int64_t i);

  double random();                          ///< uniform in [0, 1)
  std::int64_t random(std::int64_t count);  ///< uniform in [0, count)

  /// Remembers every byte; `damage` then names what changed outside the given outputs, or is empty.
  void remember();
  std::string damage(const std::vector<TensorView>& outputs) const;

 private:
  struct Memory {
    std::vector<std::byte> bytes, before;
    DType declared;
  };
  TensorView allocate(DType, const Shape&, Layout, bool output);
  template <class Value>
  TensorView fill(DType, const Shape&, Layout, Value value);
  const Memory& memory_of(const TensorView&) const;

  std::uint64_t seed_;
  std::uint64_t counter_ = 0;
  Precision precision_;
  std::vector<Memory> memories_;
};

double round_to(DType, double value);
/// Element i of a view in row-major order, as a double.
double element(const TensorView&, std::int64_t i);
void set_element(const TensorView&, std::int64_t i, double value);
/// True when `out` wrote this element and nobody did since.
bool poisoned(const TensorView&, std::int64_t i);

}  // namespace intarsia::cases
