// load_balance_loss and its backward: both normalisations, softmax and sigmoid, on the table of logits.h.
#include "cases/logits.h"

namespace intarsia::cases {
namespace {

struct Loss {
  RouterScores kind;
  BalanceNormalisation normalisation;
};

const std::vector<Loss> kLosses{{RouterScores::softmax, BalanceNormalisation::huggingface},
                                {RouterScores::softmax_renorm, BalanceNormalisation::megatron},
                                {RouterScores::sigmoid, BalanceNormalisation::megatron},
                                {RouterScores::sigmoid_group, BalanceNormalisation::huggingface}};

/// The choices of `route`, so that invalid tokens have ids -1.
TensorView make_ids(Tensors& t, const Logits& l, const TensorView& logits, const TensorView& mask) {
  const Route route{.logits = logits,
                    .token_mask = mask,
                    .ids = t.out(DType::int32, {l.tokens, l.choices}),
                    .scores = t.out(score_dtype(logits.dtype), {l.tokens, l.choices})};
  run(route, Context{.backend = Backend::reference});
  return route.ids;
}

LoadBalanceLoss forward(Tensors& t, const Logits& l, const Loss& loss, DType dtype) {
  LoadBalanceLoss op{.logits = make_logits(t, l, dtype), .scores_kind = loss.kind, .normalisation = loss.normalisation};
  op.token_mask = make_mask(t, l, op.logits);
  op.ids = make_ids(t, l, op.logits, op.token_mask);
  const DType scores = score_dtype(dtype);
  op.loss = t.out(scores, {1});
  op.expert_fraction = t.out(scores, {l.experts});
  op.valid_tokens = t.out(scores, {1});
  return op;
}

LoadBalanceLossBackward backward(Tensors& t, const Logits& l, const Loss& loss, DType dtype) {
  const LoadBalanceLoss f = forward(t, l, loss, dtype);
  run(f, Context{.backend = Backend::reference});
  // dloss of the size of T makes a gradient of the size of a probability, as the tolerance expects.
  return {.dloss = t.constant(score_dtype(dtype), {1}, 0.7 * static_cast<double>(l.tokens) / static_cast<double>(l.experts)),
          .logits = f.logits,
          .token_mask = f.token_mask,
          .expert_fraction = f.expert_fraction,
          .valid_tokens = f.valid_tokens,
          .experts_per_token = l.choices,
          .scores_kind = loss.kind,
          .normalisation = loss.normalisation,
          .dlogits = t.out(l.tokens % 2 == 1 ? score_dtype(dtype) : dtype, {l.tokens, l.experts})};
}

template <class Op, class Make>
std::vector<Case<Op>> all(const std::vector<Logits>& table, Make make) {
  std::vector<Case<Op>> result;
  for (const Logits& l : table) {
    for (const Loss& loss : kLosses) {
      for (const DType dtype : kDTypes) {
        const std::string kind = std::string(to_string(loss.kind)) + "_" + std::string(to_string(loss.normalisation));
        Case<Op> c{.name = named(kind + "/" + l.name, dtype), .scale = 1.0};
        c.build = [=](Tensors& t) { return make(t, l, loss, dtype); };
        result.push_back(std::move(c));
      }
    }
  }
  return result;
}

const std::vector<Logits> kBenchmarks{{.name = "t8192_e128_k8", .tokens = 8192, .experts = 128, .choices = 8}};

}  // namespace

template <>
std::vector<Case<LoadBalanceLoss>> cases() {
  return all<LoadBalanceLoss>(logits_table(), forward);
}
template <>
std::vector<Case<LoadBalanceLoss>> benchmarks() {
  return all<LoadBalanceLoss>(kBenchmarks, forward);
}
template <>
std::vector<Case<LoadBalanceLossBackward>> cases() {
  return all<LoadBalanceLossBackward>(logits_table(), backward);
}
template <>
std::vector<Case<LoadBalanceLossBackward>> benchmarks() {
  return all<LoadBalanceLossBackward>(kBenchmarks, backward);
}

}  // namespace intarsia::cases
