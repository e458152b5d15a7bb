// z_loss and its backward on the table of logits.h.
#include "cases/logits.h"

namespace intarsia::cases {
namespace {

ZLoss forward(Tensors& t, const Logits& l, DType dtype) {
  ZLoss op{.logits = make_logits(t, l, dtype)};
  op.token_mask = make_mask(t, l, op.logits);
  op.loss = t.out(score_dtype(dtype), {1});
  op.valid_tokens = t.out(score_dtype(dtype), {1});
  return op;
}

ZLossBackward backward(Tensors& t, const Logits& l, DType dtype) {
  const ZLoss f = forward(t, l, dtype);
  run(f, Context{.backend = Backend::reference});
  return {.dloss = t.constant(score_dtype(dtype), {1}, 0.7),
          .logits = f.logits,
          .token_mask = f.token_mask,
          .valid_tokens = f.valid_tokens,
          .dlogits = t.out(l.tokens % 2 == 1 ? score_dtype(dtype) : dtype, {l.tokens, l.experts})};
}

/// dlogits is of the size of the logits, so errors are measured by that.
template <class Op, class Make>
std::vector<Case<Op>> all(const std::vector<Logits>& table, Make make) {
  std::vector<Case<Op>> result;
  for (const Logits& l : table) {
    for (const DType dtype : kDTypes) {
      Case<Op> c{.name = named(l.name, dtype),
                 .scale = l.pattern == Pattern::large       ? 1e4
                          : l.pattern == Pattern::far_below ? 200.0
                                                            : 1.0};
      c.build = [=](Tensors& t) { return make(t, l, dtype); };
      result.push_back(std::move(c));
    }
  }
  return result;
}

const std::vector<Logits> kBenchmarks{{.name = "t8192_e128", .tokens = 8192, .experts = 128}};

}  // namespace

template <>
std::vector<Case<ZLoss>> cases() {
  return all<ZLoss>(logits_table(), forward);
}
template <>
std::vector<Case<ZLoss>> benchmarks() {
  return all<ZLoss>(kBenchmarks, forward);
}
template <>
std::vector<Case<ZLossBackward>> cases() {
  return all<ZLossBackward>(logits_table(), backward);
}
template <>
std::vector<Case<ZLossBackward>> benchmarks() {
  return all<ZLossBackward>(kBenchmarks, backward);
}

}  // namespace intarsia::cases
