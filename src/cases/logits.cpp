// Patterns of logits and the table that every reader of logits is checked with.
#include "cases/logits.h"

#include <algorithm>
#include <limits>

namespace intarsia::cases {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN(), kInfinity = std::numeric_limits<double>::infinity();

void break_tokens(Tensors& t, const TensorView& logits) {
  const std::int64_t experts = logits.size(1);
  for (std::int64_t token = 0; token < logits.size(0); ++token) {
    const std::int64_t e = t.random(experts);
    switch (token % 6) {
      case 0: t.set(logits, kNaN, token, e); break;
      case 1: t.set(logits, kInfinity, token, e); break;
      case 2: t.set_row(logits, -kInfinity, token); break;
      case 3:
        t.set(logits, kInfinity, token, 0);
        t.set(logits, kNaN, token, experts - 1);
        break;
      case 4:
        for (std::int64_t other = 0; other < experts; ++other)
          if (other != e && other % 2 == 0) t.set(logits, -kInfinity, token, other);
        break;
      default: break;
    }
  }
}

}  // namespace

TensorView make_logits(Tensors& t, const Logits& l, DType dtype) {
  const Shape shape{l.tokens, l.experts};
  switch (l.pattern) {
    case Pattern::large: return t.uniform(dtype, shape, -1e4, 1e4, l.layout);
    case Pattern::far_below: return t.uniform(dtype, shape, -200, -60, l.layout);
    case Pattern::nan_everywhere: return t.constant(dtype, shape, kNaN, l.layout);
    case Pattern::near: {
      std::vector<double> values;
      for (std::int64_t i = 0; i < l.tokens * l.experts; ++i) values.push_back(1 + 1e-6 * static_cast<double>(t.random(16)));
      return t.values(dtype, shape, values, l.layout);
    }
    default: break;
  }
  const TensorView logits = t.normal(dtype, shape, 2, l.layout);
  if (l.pattern == Pattern::broken) break_tokens(t, logits);
  if (l.pattern == Pattern::tied)
    for (std::int64_t token = 0; token < l.tokens; ++token)
      for (std::int64_t e = 0; e < l.experts; ++e)
        t.set(logits, token % 2 == 0 ? 0.5 : static_cast<double>(e / 2 % 3), token, e);
  return logits;
}

TensorView make_mask(Tensors& t, const Logits& l, const TensorView& logits) {
  if (!l.mask) return {};
  std::vector<double> keep;
  for (std::int64_t token = 0; token < l.tokens; ++token) {
    keep.push_back(token % 3 != 0);
    if (token % 3 == 0 && token % 2 == 0) t.set_row(logits, kNaN, token);
  }
  return t.values(DType::boolean, {l.tokens}, keep);
}

std::vector<Logits> logits_table() {
  std::vector<Logits> table{
      {.name = "no_tokens", .tokens = 0},
      {.name = "one_token", .tokens = 1},
      {.name = "one_expert", .experts = 1, .choices = 1},
      {.name = "all_chosen", .experts = 6, .choices = 6},
      {.name = "masked", .mask = true},
      {.name = "everybody_masked", .tokens = 1, .mask = true},
      {.name = "tied", .pattern = Pattern::tied},
      {.name = "tied_k8", .experts = 40, .choices = 8, .pattern = Pattern::tied},
      {.name = "near", .pattern = Pattern::near},
      {.name = "broken", .tokens = 40, .pattern = Pattern::broken},
      {.name = "broken_masked", .tokens = 40, .pattern = Pattern::broken, .mask = true},
      {.name = "nan_everywhere", .pattern = Pattern::nan_everywhere},
      {.name = "large", .pattern = Pattern::large},
      {.name = "far_below", .pattern = Pattern::far_below},
      {.name = "padded", .layout = Layout::padded},
      {.name = "strided", .layout = Layout::strided},
      {.name = "permuted", .layout = Layout::permuted},
      {.name = "reversed", .layout = Layout::reversed},
      {.name = "expanded", .layout = Layout::expanded},
  };
  for (const std::int64_t experts :
       {1, 2, 3, 5, 16, 60, 96, 127, 128, 129, 160, 255, 256, 384, 512, 1023, 1024, 1025, 2048, 4096})
    table.push_back({.name = "e" + std::to_string(experts),
                     .tokens = 5,
                     .experts = experts,
                     .choices = std::min<std::int64_t>(experts, 8)});
  for (const std::int64_t tokens : {15, 16, 31, 33, 1000})
    table.push_back({.name = "t" + std::to_string(tokens), .tokens = tokens});
  for (const std::int64_t choices : {1, 3, 4, 8, 16, 22, 64})
    table.push_back({.name = "k" + std::to_string(choices), .experts = 128, .choices = choices});
  return table;
}

}  // namespace intarsia::cases
