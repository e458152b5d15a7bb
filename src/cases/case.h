// A case: one call of one operation, with everything that is needed to check it and to time it. The table of an operation's
// cases is `cases<Op>()`, in the file named after the operation.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cases/tensors.h"
#include "intarsia/moe.h"

namespace intarsia::cases {

template <class Op>
struct Case {
  std::string name;
  /// Makes the arguments; called once per run, always with the same random numbers.
  std::function<Op(Tensors&)> build;
  double flops = 0;
  /// What errors of float outputs are measured by: the operation's own result on absolute values, or max(|result|, scale).
  std::optional<double> scale = {};
  /// dtype whose rounding the tolerance allows for, when it is not that of each output: intermediate results are rounded to it.
  std::optional<DType> rounding = {};
  /// Values that the outputs must have, whatever any backend says; returns what is wrong.
  std::function<std::string(const Op&)> expect = {};
  /// Choices between nearly equal ranks are made in float32, so float64 arithmetic may choose differently.
  bool ranks_in_float = false;
};

/// Cases that are checked.
template <class Op>
std::vector<Case<Op>> cases();
/// Larger ones that are timed, and checked on demand.
template <class Op>
std::vector<Case<Op>> benchmarks();

#define INTARSIA_DECLARE(Op)         \
  template <>                        \
  std::vector<Case<Op>> cases<Op>(); \
  template <>                        \
  std::vector<Case<Op>> benchmarks<Op>();
INTARSIA_FOR_EACH_OPERATION(INTARSIA_DECLARE)
INTARSIA_FOR_EACH_COMPOSITION(INTARSIA_DECLARE)
#undef INTARSIA_DECLARE

constexpr DType kDTypes[] = {DType::float32, DType::bfloat16, DType::float16};
constexpr DType kBenchmarkDTypes[] = {DType::float32, DType::bfloat16};

/// dtype of scores, statistics and losses beside activations of dtype x.
constexpr DType score_dtype(DType x) { return x == DType::float64 ? DType::float64 : DType::float32; }

inline std::string named(const std::string& name, DType dtype) { return name + "/" + std::string(to_string(dtype)); }

}  // namespace intarsia::cases
