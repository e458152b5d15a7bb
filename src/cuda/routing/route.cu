// route: logits (T, E) -> ids, scores (T, K), in descending order of what the family ranks by; ties go to the lowest id.
//   softmax         scores = softmax(logits) of the chosen         softmax_renorm  softmax over the chosen logits
//   sigmoid         sigmoid of the chosen
//   sigmoid_group   ranks by sigmoid(logit) + bias within the best groups; scale * sigmoid (over its sum when `renormalise`)
// A token that is masked, or not routable (NaN, infinite largest logit), gets ids -1 and scores 0; the latter is counted, by an
// atomic sum of integers. A part of a warp takes a token, up to a whole one for 256 < E <= 1024, a block beyond, its
// logits in registers: K rounds of a maximum over the team (top_k.cuh). One launch, no workspace. Reads T*E logits once, writes
// T*K ids and scores, and T*E rounded logits where asked. Verify: intarsia-ops verify route
#include "cuda/routing/groups.cuh"
#include "cuda/routing/softmax.cuh"
#include "cuda/routing/top_k.cuh"

namespace intarsia::cuda {
namespace {

template <class S>
struct Arguments {
  TeamRows logits, rounded;
  const S* expert_bias;
  TokenMask mask;
  std::int64_t tokens;
  int experts, k_count, groups, top_groups;
  RouterScores kind;
  bool renormalise, wide_ids;
  S scale;
  void* ids;
  S *scores, *raw_scores;
  std::int32_t* nan_tokens;

  explicit Arguments(const Route& op)
      : logits(op.logits),
        rounded(op.rounded_logits),
        expert_bias(op.expert_bias.defined() ? op.expert_bias.as<const S>() : nullptr),
        mask(op.token_mask),
        tokens(op.logits.size(0)),
        experts(static_cast<int>(op.logits.size(1))),
        k_count(static_cast<int>(op.ids.size(1))),
        groups(static_cast<int>(op.groups)),
        top_groups(static_cast<int>(op.top_groups)),
        kind(op.scores_kind),
        renormalise(op.renormalise),
        wide_ids(op.ids.dtype == DType::int64),
        scale(static_cast<S>(op.scale)),
        ids(op.ids.data),
        scores(op.scores.as<S>()),
        raw_scores(op.raw_scores.defined() ? op.raw_scores.as<S>() : nullptr),
        nan_tokens(op.nan_tokens.defined() ? op.nan_tokens.as<std::int32_t>() : nullptr) {}

  __host__ __device__ bool grouped() const { return kind == RouterScores::sigmoid_group && top_groups < groups; }

  __device__ __forceinline__ void store(std::int64_t slot, int id, S score, S raw) const {
    if (wide_ids) static_cast<std::int64_t*>(ids)[slot] = id;
    else static_cast<std::int32_t*>(ids)[slot] = id;
    scores[slot] = score;
    if (raw_scores) raw_scores[slot] = raw;
  }
};

// ---- kernels

template <int kThreads, int kFours, class S>
__device__ __forceinline__ S softmax_sum(const S (&x)[kFours][4], S largest) {
  S sum = S(0);
#pragma unroll
  for (int j = 0; j < kFours; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) sum += exp(x[j][i] - largest);
  return Team<kThreads>::reduce(sum, Add{});
}

/// x becomes what sigmoid_group ranks by.
template <int kThreads, int kFours, class S>
__device__ __forceinline__ void rank_by_sigmoid(const Arguments<S>& a, S (&x)[kFours][4]) {
#pragma unroll
  for (int j = 0; j < kFours; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (const int e = four_of<kThreads>(j) + i; e < a.experts)
        x[j][i] = sigmoid(x[j][i]) + (a.expert_bias ? a.expert_bias[e] : S(0));
  if (a.grouped()) keep_best_groups<kThreads>(a.experts, a.groups, a.top_groups, x);
}

/// Scores of the chosen logits `value` (slot i: choice rank + i * kThreads); `p_sum` is the softmax sum over all experts.
template <int kThreads, int kSlots, class S>
__device__ __forceinline__ void score_chosen(const Arguments<S>& a, S largest, S p_sum, const bool (&used)[kSlots],
                                             S (&value)[kSlots]) {
  using Tm = Team<kThreads>;
  if (a.kind == RouterScores::softmax) {
    for (int i = 0; i < kSlots; ++i) value[i] = exp(value[i] - largest) / p_sum;
    return;
  }
  if (a.kind == RouterScores::sigmoid || (a.kind == RouterScores::sigmoid_group && !a.renormalise)) {
    const S scale = a.kind == RouterScores::sigmoid ? S(1) : a.scale;
    for (int i = 0; i < kSlots; ++i) value[i] = scale * sigmoid(value[i]);
    return;
  }
  // Shares of the chosen; of sigmoids through their logarithm, so that logits of -1000 still give a distribution.
  const bool shares_of_sigmoid = a.kind == RouterScores::sigmoid_group;
  S best = -INFINITY, sum = S(0);
  for (int i = 0; i < kSlots; ++i) {
    value[i] = used[i] ? softmax_argument(value[i], shares_of_sigmoid) : S(-INFINITY);
    best = value[i] > best ? value[i] : best;
  }
  best = shares_of_sigmoid ? Tm::reduce(best, Max{}) : largest;
  const bool none = !(best > S(-INFINITY));  // the bias chose experts whose sigmoid is exactly zero: nothing to share out
  for (int i = 0; i < kSlots; ++i) sum += value[i] = used[i] && !none ? exp(value[i] - best) : S(0);
  sum = Tm::reduce(sum, Add{});
  for (int i = 0; i < kSlots; ++i) value[i] = none ? S(0) : value[i] / sum * (shares_of_sigmoid ? a.scale : S(1));
}

template <class S, int kThreads, int kFours, int kSlots>
__global__ void __launch_bounds__(Team<kThreads>::kBlockThreads, kResidentBlocks<S, kFours>)
    route_kernel(const __grid_constant__ Arguments<S> a) {
  using Tm = Team<kThreads>;
  const bool exists = Tm::token() < a.tokens;
  const std::int64_t t = exists ? Tm::token() : a.tokens - 1;  // threads without a token work along: a warp stays together
  const bool wanted = exists && a.mask(t);
  S x[kFours][4];
  a.logits.template load<kThreads>(t, x);
  if constexpr (std::is_same_v<S, float>)
    if (a.rounded.rows.data && exists) a.rounded.template store<kThreads>(t, x);

  const S largest = team_largest<kThreads>(x);
  const bool routable = fabs(largest) < S(INFINITY), routed = wanted && routable;
  if (a.nan_tokens && wanted && !routable && Tm::rank() == 0) atomicAdd(a.nan_tokens, 1);

  Candidate<OrderKey<S>> chosen[kSlots];
  bool used[kSlots];
  S value[kSlots], raw[kSlots];
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    chosen[i] = {0, -1};
    used[i] = i * kThreads + Tm::rank() < a.k_count;
    value[i] = raw[i] = S(0);
  }
  if (Tm::any_token(routed)) {
    const S p_sum = a.kind == RouterScores::softmax ? softmax_sum<kThreads>(x, largest) : S(1);
    if (a.kind == RouterScores::sigmoid_group) rank_by_sigmoid<kThreads>(a, x);
    team_top_k<kThreads>(x, a.k_count, chosen);
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      if (a.kind != RouterScores::sigmoid_group) value[i] = number_of(chosen[i].key);
      else if (routed && used[i]) value[i] = a.logits.rows.template load<S>(t, chosen[i].index);
      if (a.raw_scores) raw[i] = sigmoid(value[i]);
    }
    score_chosen<kThreads>(a, largest, p_sum, used, value);
  }
  if (!exists) return;
#pragma unroll
  for (int i = 0; i < kSlots; ++i)
    if (used[i])
      a.store(t * a.k_count + i * kThreads + Tm::rank(), routed ? chosen[i].index : -1, routed ? value[i] : S(0),
              routed ? raw[i] : S(0));
}

// ---- launchers

template <class S, int kThreads, int kFours, int kSlots>
void launch_slots(const Arguments<S>& a, cudaStream_t stream) {
  using Tm = Team<kThreads>;
  const int room = a.grouped() ? Tm::kTokens * GroupRoom<S>::bytes(a.experts) : 0;
  launch(Route::kName, route_kernel<S, kThreads, kFours, kSlots>, blocks(a.tokens, Tm::kTokens), Tm::kBlockThreads, stream,
         static_cast<std::size_t>(room), a);
}

/// A choice for each thread of the team, or as many as there can be.
template <class S, int kThreads, int kFours>
void launch_team(const Arguments<S>& a, cudaStream_t stream) {
  constexpr int kMost = std::min(static_cast<int>(kMaxChoices), kThreads * kFours * 4);
  if (a.k_count <= kThreads) return launch_slots<S, kThreads, kFours, 1>(a, stream);
  if constexpr (kMost > kThreads) launch_slots<S, kThreads, kFours, kMost / kThreads>(a, stream);
}

template <class S>
void launch_route(const Arguments<S>& a, cudaStream_t stream) {
  dispatch_team<S>(a.experts, [&](auto threads, auto fours) { launch_team<S, threads, fours>(a, stream); });
}

}  // namespace

std::size_t workspace_bytes(const Route&) { return 0; }

std::string explain(const Route& op) {
  return op.logits.size(1) <= (op.logits.dtype == DType::float64 ? 128 : 1024)
             ? "cuda: up to a warp for each token, logits in registers"
             : "cuda: a block for each token, logits in registers";
}

void run(const Route& op, const Execution& execution) {
  const DeviceGuard guard(op.logits.device.index);
  const cudaStream_t stream = stream_of(execution.stream);
  if (op.logits.dtype == DType::float64) launch_route(Arguments<double>(op), stream);
  else launch_route(Arguments<float>(op), stream);
}

}  // namespace intarsia::cuda
