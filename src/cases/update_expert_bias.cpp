// update_expert_bias: by hand, and many experts.
#include "cases/case.h"

namespace intarsia::cases {
namespace {

Case<UpdateExpertBias> make(const std::string& name, DType counts_dtype, const std::vector<double>& counts) {
  Case<UpdateExpertBias> c{.name = named(name, counts_dtype), .scale = 0.0};
  c.build = [=](Tensors& t) {
    const auto experts = static_cast<std::int64_t>(counts.size());
    return UpdateExpertBias{
        .counts = t.values(counts_dtype, {experts}, counts), .rate = 0.01, .bias = t.normal(DType::float32, {experts})};
  };
  return c;
}

/// Exactly nothing at balance, and by hand otherwise.
Case<UpdateExpertBias> literal(const std::string& name, const std::vector<double>& counts, const std::vector<double>& bias) {
  Case<UpdateExpertBias> c{.name = named(name, DType::int64), .scale = 0.0};
  c.build = [=](Tensors& t) {
    const auto experts = static_cast<std::int64_t>(counts.size());
    return UpdateExpertBias{
        .counts = t.values(DType::int64, {experts}, counts), .rate = 0.5, .bias = t.constant(DType::float32, {experts}, 1)};
  };
  c.expect = [=](const UpdateExpertBias& op) {
    for (std::size_t e = 0; e < bias.size(); ++e)
      if (element(op.bias, static_cast<std::int64_t>(e)) != bias[e])
        return "bias of expert " + std::to_string(e) + " must be " + std::to_string(bias[e]);
    return std::string();
  };
  return c;
}

}  // namespace

template <>
std::vector<Case<UpdateExpertBias>> cases() {
  std::vector<Case<UpdateExpertBias>> result{
      literal("literal", {4, 2, 0, 2}, {0.5, 1, 1.5, 1}),
      literal("balance", {7, 7, 7}, {1, 1, 1}),
      literal("nothing_routed", {0, 0, 0, 0, 0}, {1, 1, 1, 1, 1}),
      literal("thirds", {3, 3, 4}, {1.5, 1.5, 0.5}),
      literal("beyond_float", {(1 << 24) + 1, 1 << 24, 1 << 24}, {0.5, 1.5, 1.5}),
  };
  for (const DType dtype : {DType::int32, DType::int64, DType::float32}) {
    result.push_back(make("one_expert", dtype, {5}));
    std::vector<double> counts;
    for (int e = 0; e < 257; ++e) counts.push_back(e * 37 % 101);
    result.push_back(make("many", dtype, counts));
  }
  return result;
}

template <>
std::vector<Case<UpdateExpertBias>> benchmarks() {
  return {};
}

}  // namespace intarsia::cases
