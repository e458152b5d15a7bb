// The tolerance of one output.
#include "cases/compare.h"

#include <fmt/format.h>

#include <cmath>

namespace intarsia::cases {
namespace {

std::string place(const TensorView& v, std::int64_t i) {
  std::string text;
  for (int axis = v.rank - 1; axis >= 0; --axis) {
    text = std::to_string(i % v.size(axis)) + (text.empty() ? "" : ", ") + text;
    i /= v.size(axis);
  }
  return "[" + text + "]";
}

bool is_float(DType dtype) { return dtype <= DType::float16; }

/// Half the spacing of the dtype's smallest numbers: rounding to it is an error even of a tiny value.
double floor_of(DType dtype) { return dtype == DType::float16 ? 0x1p-24 : dtype == DType::float64 ? 0 : 0x1p-126; }

}  // namespace

double unit(DType dtype) {
  switch (dtype) {
    case DType::float64: return 1e-13;
    case DType::bfloat16: return 0x1p-7;
    case DType::float16: return 0x1p-10;
    default: return 1e-6;
  }
}

Comparison compare(std::string_view name, const TensorView& actual, const TensorView& expected, const Scale& scale,
                   double unit) {
  Comparison result;
  double error_norm = 0, scale_norm = 0;
  const auto fail = [&](std::int64_t i, std::string_view what, double got, double want) {
    if (result.failure.empty())
      result.failure = fmt::format("{}{}: {}: expected {:.9g}, got {:.9g}", name, place(actual, i), what, want, got);
    result.ratio = INFINITY;
  };

  for (std::int64_t i = 0; i < actual.numel(); ++i) {
    const double got = element(actual, i), want = element(expected, i);
    if (poisoned(expected, i)) {
      if (!poisoned(actual, i)) fail(i, "must stay unwritten", got, want);
      continue;
    }
    if (!is_float(actual.dtype) || !std::isfinite(want)) {
      if (got != want && !(std::isnan(got) && std::isnan(want))) fail(i, "differs", got, want);
      continue;
    }
    const double error = std::abs(got - want), n = scale(i), allowed = 4 * unit * n + floor_of(actual.dtype);
    error_norm += error * error;
    scale_norm += n * n;
    if (!(error <= allowed)) fail(i, fmt::format("error {:.3g} above {:.3g}", error, allowed), got, want);
    if (error > 0) result.ratio = std::max(result.ratio, error / allowed);
  }

  const double norm = std::sqrt(error_norm);
  const double allowed = unit * std::sqrt(scale_norm) + floor_of(actual.dtype) * std::sqrt(static_cast<double>(actual.numel()));
  if (norm > 0) result.ratio = std::max(result.ratio, norm / allowed);
  if (!(norm <= allowed) && result.failure.empty())
    result.failure = fmt::format("{}: norm of the error {:.3g} above {:.3g}", name, norm, allowed);
  return result;
}

}  // namespace intarsia::cases
