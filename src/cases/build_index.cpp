// build_index: sizes around every power of two that a scan could trip over, ids out of range, masks; the worked example.
#include "cases/problem.h"

namespace intarsia::cases {
namespace {

struct Ids {
  std::string name;
  std::int64_t tokens, choices, experts;
  std::int64_t outside = 0;  ///< one id in so many is not in [0, E)
  bool one_expert = false;
  bool mask = false;
  std::int64_t slack = 0;
};

BuildIndex make(Tensors& t, const Ids& i, DType dtype) {
  std::vector<double> ids, keep;
  for (std::int64_t k = 0; k < i.tokens * i.choices; ++k) {
    constexpr std::int64_t kFar = 1 << 30;
    const std::int64_t bad[] = {-1, i.experts, kFar, -kFar};
    const bool outside = i.outside > 0 && t.random(i.outside) == 0;
    ids.push_back(static_cast<double>(outside ? bad[t.random(4)] : i.one_expert ? i.experts - 1 : t.random(i.experts)));
  }
  for (std::int64_t k = 0; k < i.tokens; ++k) keep.push_back(t.random(3) != 0);
  const std::int64_t rows = i.tokens * i.choices + i.slack;
  return {.ids = t.values(dtype, {i.tokens, i.choices}, ids),
          .token_mask = i.mask ? t.values(DType::boolean, {i.tokens}, keep) : TensorView{},
          .expert_offsets = t.out(DType::int32, {i.experts + 1}),
          .row_token = t.out(DType::int32, {rows}),
          .row_slot = t.out(DType::int32, {rows}),
          .slot_row = t.out(DType::int32, {i.tokens, i.choices}),
          .expert_counts = i.slack > 0 ? TensorView{} : t.out(DType::int32, {i.experts})};
}

std::vector<Case<BuildIndex>> all(const std::vector<Ids>& table) {
  std::vector<Case<BuildIndex>> result;
  for (const Ids& i : table) {
    for (const DType dtype : {DType::int32, DType::int64}) {
      Case<BuildIndex> c{.name = named(i.name, dtype), .scale = 0.0};
      c.build = [=](Tensors& t) { return make(t, i, dtype); };
      result.push_back(std::move(c));
    }
  }
  return result;
}

std::string wrong(const std::string& name, const TensorView& v, const std::vector<double>& expected) {
  for (std::size_t i = 0; i < expected.size(); ++i)
    if (element(v, static_cast<std::int64_t>(i)) != expected[i])
      return name + " is not that of the worked example at " + std::to_string(i) + "; ";
  return {};
}

/// design.md section 2: MoEBlaze's example with the pair that its text drops.
Case<BuildIndex> worked_example() {
  Case<BuildIndex> c{.name = "worked_example/int32", .scale = 0.0};
  c.build = [](Tensors& t) {
    return BuildIndex{.ids = t.values(DType::int32, {5, 2}, {2, 3, 0, 1, 0, 3, 1, 2, 0, 3}),
                      .expert_offsets = t.out(DType::int32, {5}),
                      .row_token = t.out(DType::int32, {12}),
                      .row_slot = t.out(DType::int32, {12}),
                      .slot_row = t.out(DType::int32, {5, 2}),
                      .expert_counts = t.out(DType::int32, {4})};
  };
  c.expect = [](const BuildIndex& op) {
    return wrong("expert_offsets", op.expert_offsets, {0, 3, 5, 7, 10}) +
           wrong("row_token", op.row_token, {1, 2, 4, 1, 3, 0, 3, 0, 2, 4, -1, -1}) +
           wrong("row_slot", op.row_slot, {2, 4, 8, 3, 6, 0, 7, 1, 5, 9, -1, -1}) +
           wrong("slot_row", op.slot_row, {5, 7, 0, 3, 1, 8, 4, 6, 2, 9}) +
           wrong("expert_counts", op.expert_counts, {3, 2, 2, 3});
  };
  return c;
}

}  // namespace

template <>
std::vector<Case<BuildIndex>> cases() {
  std::vector<Ids> table{
      {"no_tokens", 0, 2, 4},
      {"no_tokens_slack", 0, 2, 4, 0, false, false, 7},
      {"one_token", 1, 1, 1},
      {"duplicates", 40, 6, 2},
      {"all_outside", 30, 2, 4, 1, false, false, 3},
      {"some_outside", 333, 4, 7, 3, false, false, 3},
      {"all_to_one", 200, 3, 9, 0, true},
      {"masked", 200, 3, 9, 5, false, true},
      {"large", 5000, 8, 64},
  };
  for (const std::int64_t tokens : {15, 16, 17, 31, 33, 127, 128, 129, 255, 256, 257, 1000, 1025})
    table.push_back({"t" + std::to_string(tokens), tokens, 2, 5});
  for (const std::int64_t experts : {1, 2, 3, 60, 127, 128, 129, 255, 256, 384, 1023, 1024, 1025, 2048, 4096})
    table.push_back({"e" + std::to_string(experts), 300, 4, experts, 9, false, true});
  auto result = all(table);
  result.push_back(worked_example());
  return result;
}

template <>
std::vector<Case<BuildIndex>> benchmarks() {
  return all({{"t8192_k8_e128", 8192, 8, 128}, {"t65536_k8_e256", 65536, 8, 256}});
}

}  // namespace intarsia::cases
