// round_tokens: the five roundings on the table of logits.h, tiles of 1 to 128, and a small example by hand.
#include "cases/logits.h"

namespace intarsia::cases {
namespace {

RoundTokens make(Tensors& t, const Logits& l, std::int64_t tile, Rounding rounding, DType dtype) {
  const std::int64_t slack = l.tokens % 2 == 0 ? 3 : 0;
  const std::int64_t rows = std::min(l.tokens * l.choices + l.experts * (tile - 1), l.tokens * l.experts) + slack;
  RoundTokens op{
      .logits = make_logits(t, l, dtype), .experts_per_token = l.choices, .tile = tile, .rounding = rounding, .seed = 7};
  op.token_mask = make_mask(t, l, op.logits);
  op.expert_offsets = t.out(DType::int32, {l.experts + 1});
  op.row_token = t.out(DType::int32, {rows});
  op.row_slot = t.out(DType::int32, {rows});
  op.token_offsets = t.out(DType::int32, {l.tokens + 1});
  op.token_rows = t.out(DType::int32, {rows});
  op.row_score = t.out(score_dtype(dtype), {rows});
  return op;
}

/// Which tokens are added or dropped depends on probabilities in float32.
Case<RoundTokens> one(const Logits& l, std::int64_t tile, Rounding rounding, DType dtype) {
  const std::string name = std::string(to_string(rounding)) + "_" + std::to_string(tile) + "/" + l.name;
  Case<RoundTokens> c{.name = named(name, dtype), .scale = 1.0, .ranks_in_float = true};
  c.build = [=](Tensors& t) { return make(t, l, tile, rounding, dtype); };
  return c;
}

constexpr Rounding kRoundings[] = {Rounding::up, Rounding::down, Rounding::nearest, Rounding::stochastic, Rounding::balanced};

/// Two experts, four tokens, tile 2: worked by hand. Expert 0 is chosen by tokens 0, 1, 2, expert 1 by token 3.
Case<RoundTokens> literal(Rounding rounding, const std::vector<double>& offsets, const std::vector<double>& row_token,
                          const std::vector<double>& row_slot) {
  Case<RoundTokens> c{.name = "literal_" + std::string(to_string(rounding)) + "/float32", .scale = 1.0, .ranks_in_float = true};
  c.build = [=](Tensors& t) {
    const Logits l{.name = "", .tokens = 4, .experts = 2, .choices = 1};
    RoundTokens op = make(t, l, 2, rounding, DType::float32);
    const double logits[] = {2, 0, 1, 0, 3, 0, 0, 1};
    for (std::int64_t i = 0; i < 8; ++i) t.set(op.logits, logits[i], i / 2, i % 2);
    return op;
  };
  c.expect = [=](const RoundTokens& op) {
    for (std::size_t i = 0; i < offsets.size(); ++i)
      if (element(op.expert_offsets, static_cast<std::int64_t>(i)) != offsets[i])
        return "expert_offsets, entry " + std::to_string(i);
    for (std::size_t r = 0; r < row_token.size(); ++r)
      if (element(op.row_token, static_cast<std::int64_t>(r)) != row_token[r]) return "row_token, row " + std::to_string(r);
    for (std::size_t r = 0; r < row_slot.size(); ++r)
      if (element(op.row_slot, static_cast<std::int64_t>(r)) != row_slot[r]) return "row_slot, row " + std::to_string(r);
    return std::string();
  };
  return c;
}

}  // namespace

template <>
std::vector<Case<RoundTokens>> cases() {
  std::vector<Case<RoundTokens>> result{
      // up: expert 0 takes token 3 too, expert 1 its best other token, 1 (logit difference -1)
      literal(Rounding::up, {0, 4, 6}, {0, 1, 2, 3, 1, 3, -1}, {0, 1, 3, 4, 2, 5, -1}),
      // down: expert 0 loses token 1, expert 1 all
      literal(Rounding::down, {0, 2, 2}, {0, 2, -1}, {0, 1, -1}),
      // 3 and 1 are ties between two multiples of 2: down
      literal(Rounding::nearest, {0, 2, 2}, {0, 2, -1}, {0, 1, -1}),
      // balanced: expert 0 down (tie), which leaves -1, so expert 1 up
      literal(Rounding::balanced, {0, 2, 4}, {0, 2, 1, 3, -1}, {0, 2, 1, 3, -1}),
  };
  for (const Logits& l : logits_table()) {
    if (l.tokens * l.experts > 8192) continue;  // the reference sorts all tokens for every expert
    for (const Rounding rounding : kRoundings) result.push_back(one(l, 4, rounding, DType::float32));
    result.push_back(one(l, 4, Rounding::nearest, DType::bfloat16));
    result.push_back(one(l, 4, Rounding::balanced, DType::float16));
  }
  for (const std::int64_t tile : {1, 16, 128}) {
    for (const Rounding rounding : kRoundings) {
      result.push_back(one({.name = "t300_e6", .tokens = 300, .experts = 6}, tile, rounding, DType::float32));
      result.push_back(
          one({.name = "t300_e6_masked", .tokens = 300, .experts = 6, .mask = true}, tile, rounding, DType::bfloat16));
    }
  }
  return result;
}

template <>
std::vector<Case<RoundTokens>> benchmarks() {
  return {one({.name = "t8192_e32_k4", .tokens = 8192, .experts = 32, .choices = 4}, 128, Rounding::nearest, DType::float32),
          one({.name = "t8192_e128_k8", .tokens = 8192, .experts = 128, .choices = 8}, 128, Rounding::nearest, DType::float32)};
}

}  // namespace intarsia::cases
