#include "api/doctor.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "base/parallel.h"
#include "cpu/cpu.h"
#include "intarsia/ops.h"
#include "intarsia/version.h"

namespace intarsia {
namespace {

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (char ch : text) out += ch == '"' || ch == '\\' ? std::string{'\\', ch} : std::string(1, ch);
  return out + "\"";
}

const char* cuda_kernels() {
#if defined(INTARSIA_CUDA)
  return "true";
#else
  return "false";
#endif
}

/// JSON has no NaN.
std::string number(double value) {
  if (!std::isfinite(value)) return "null";
  char text[32];
  std::snprintf(text, sizeof text, "%.3g", value);
  return text;
}

std::string cpu_features() {
  std::string list;
#if defined(__x86_64__)
  const auto feature = [&](const char* name, bool present) {
    if (present) list += (list.empty() ? "" : ", ") + quoted(name);
  };
  feature("avx2", __builtin_cpu_supports("avx2"));
  feature("fma", __builtin_cpu_supports("fma"));
  feature("avx512f", __builtin_cpu_supports("avx512f"));
  feature("avx512bw", __builtin_cpu_supports("avx512bw"));
  feature("avx512bf16", __builtin_cpu_supports("avx512bf16"));
#endif
  return "[" + list + "]";
}

/// A small layer, forward, on the CPU backend against the reference: relative error of y.
double self_test() {
  constexpr std::int64_t kT = 33, kH = 40, kI = 24, kE = 5, kK = 2, kR = kT * kK;
  std::uint64_t state = 0x9e3779b97f4a7c15u;
  const auto draw = [&] {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<float>(static_cast<double>(state >> 11) / 9007199254740992.0 - 0.5);
  };
  const auto random = [&](std::int64_t n) {
    std::vector<float> values(static_cast<std::size_t>(n));
    std::generate(values.begin(), values.end(), draw);
    return values;
  };
  std::vector<float> x = random(kT * kH), w_up = random(kE * 2 * kI * kH), w_down = random(kE * kH * kI), scores = random(kR);
  std::vector<std::int32_t> ids(kR), offsets(kE + 1), row_token(kR), row_slot(kR), slot_row(kR);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>((i * 7 + i / 3) % kE);
  run(BuildIndex{.ids = {ids.data(), DType::int32, {kT, kK}},
                 .expert_offsets = {offsets.data(), DType::int32, {kE + 1}},
                 .row_token = {row_token.data(), DType::int32, {kR}},
                 .row_slot = {row_slot.data(), DType::int32, {kR}},
                 .slot_row = {slot_row.data(), DType::int32, {kT, kK}}});
  const auto forward = [&](Backend backend) {
    std::vector<float> y(kT * kH, std::nanf(""));
    run(LayerForward{.x = {x.data(), DType::float32, {kT, kH}},
                     .expert_offsets = {offsets.data(), DType::int32, {kE + 1}},
                     .row_token = {row_token.data(), DType::int32, {kR}},
                     .row_slot = {row_slot.data(), DType::int32, {kR}},
                     .slot_row = {slot_row.data(), DType::int32, {kT, kK}},
                     .scores = {scores.data(), DType::float32, {kT, kK}},
                     .w_up = {.weight = {w_up.data(), DType::float32, {kE, 2 * kI, kH}}},
                     .w_down = {.weight = {w_down.data(), DType::float32, {kE, kH, kI}}},
                     .y = {y.data(), DType::float32, {kT, kH}}},
        Context{.backend = backend});
    return y;
  };
  const std::vector<float> expected = forward(Backend::reference), got = forward(Backend::cpu);
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    error += std::pow(static_cast<double>(got[i]) - static_cast<double>(expected[i]), 2);
    norm += std::pow(static_cast<double>(expected[i]), 2);
  }
  return std::sqrt(error / norm);
}

}  // namespace

std::string doctor_json() {
  constexpr double kTolerance = 1e-5;
  const double error = self_test();
  return "{\"version\": " + quoted(INTARSIA_VERSION) + ", \"cpu_features\": " + cpu_features() +
         ", \"threads\": " + std::to_string(num_threads()) +
         ", \"products\": {\"float32\": " + quoted(cpu::describe_gemm(DType::float32)) +
         ", \"bfloat16\": " + quoted(cpu::describe_gemm(DType::bfloat16)) +
         ", \"float16\": " + quoted(cpu::describe_gemm(DType::float16)) + "}, \"cuda_kernels\": " + cuda_kernels() +
         ", \"self_test\": {\"relative_error\": " + number(error) +
         ", \"tolerance\": 0.00001, \"passed\": " + (error <= kTolerance ? "true" : "false") + "}}";
}

}  // namespace intarsia
