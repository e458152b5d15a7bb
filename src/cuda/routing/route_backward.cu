// route_backward: dscores -> dlogits (T, E), for ids (T, K) or for the CSR lists of round_tokens (always softmax).
//   softmax         dlogits = p (g - <g, p>), dense over E; g = dscores at the chosen experts
//   softmax_renorm  s (g - <g, s>)            sigmoid  g s (1 - s)            both at the chosen experts only
//   sigmoid_group   s (g - <g, s> / scale) (1 - raw), or scale g raw (1 - raw) without renormalisation
// Tokens without a choice get zeros. A team of threads takes a token as in route: it writes the row as if nothing were chosen,
// then each lane corrects the elements of the choices it holds; equal ids in a token are added up by the first of them, in
// order. One launch, no workspace; any K. Reads T*E logits (softmax only), writes T*E: bound by memory.
// Verify: intarsia-ops verify route_backward
#include "base/rows.h"
#include "cuda/routing/top_k.cuh"

namespace intarsia::cuda {
namespace {

template <class S>
struct Arguments {
  TeamRows logits;  // softmax only
  TeamRows dlogits;
  Ids ids;  // data is null in the CSR form
  const S *scores, *dscores, *raw_scores;
  const std::int32_t *expert_offsets, *token_offsets, *token_rows;
  std::int64_t tokens, rows, list_size;
  int experts, k_count;
  RouterScores kind;
  bool dense, renormalise;
  S scale;

  explicit Arguments(const RouteBackward& op)
      : logits(op.logits),
        dlogits(op.dlogits),
        ids(op.ids),
        scores(op.scores.as<const S>()),
        dscores(op.dscores.as<const S>()),
        raw_scores(op.raw_scores.defined() ? op.raw_scores.as<const S>() : nullptr),
        expert_offsets(list(op.expert_offsets)),
        token_offsets(list(op.token_offsets)),
        token_rows(list(op.token_rows)),
        tokens(op.dlogits.size(0)),
        rows(op.scores.size(0)),
        list_size(op.token_rows.defined() ? op.token_rows.size(0) : 0),
        experts(static_cast<int>(op.dlogits.size(1))),
        k_count(op.ids.defined() ? static_cast<int>(op.ids.size(1)) : 0),
        kind(op.scores_kind),
        dense(op.scores_kind == RouterScores::softmax || !op.ids.defined()),
        renormalise(op.renormalise),
        scale(static_cast<S>(op.scale)) {}
};

// ---- kernels

/// A token's chosen expert (-1: none) with its score and gradient.
template <class S>
struct Choice {
  int expert = -1;
  S score = S(0), dscore = S(0), raw = S(0);
};

/// The choices of one token, by their place in it; thread `rank` of its team keeps the one of that place.
template <class S>
struct Choices {
  const Arguments<S>& a;
  std::int64_t first;
  int count, rank;
  Choice<S> mine;

  __device__ Choices(const Arguments<S>& a_, std::int64_t t, bool exists, int rank_)
      : a(a_), first(t * a_.k_count), count(a_.k_count), rank(rank_) {
    if (!a.ids.data) {
      first = min(max(std::int64_t{a.token_offsets[t]}, std::int64_t{0}), a.list_size);
      const std::int64_t last = min(max(std::int64_t{a.token_offsets[t + 1]}, first), a.list_size);
      count = static_cast<int>(min(last - first, std::int64_t{a.experts}));  // a token has at most one row in each expert
    }
    if (!exists) count = 0;
    mine = load(rank);
  }

  __device__ __forceinline__ Choice<S> operator[](int i) const { return i == rank ? mine : load(i); }

  __device__ Choice<S> load(int i) const {
    Choice<S> c;
    if (i >= count) return c;
    std::int64_t place = first + i;
    if (a.ids.data) {
      c.expert = a.ids.expert(place, a.experts);
    } else {
      place = a.token_rows[place];
      if (place < 0 || place >= a.rows) return c;
      c.expert = expert_of_row(static_cast<int>(place));
    }
    if (c.expert < 0) return c;
    c.score = a.scores[place];
    c.dscore = a.dscores[place];
    if (a.raw_scores) c.raw = a.raw_scores[place];
    return c;
  }

  __device__ int expert_of_row(int row) const {
    int low = 0, high = a.experts;  // the first expert whose rows end after `row`
    while (low < high) {
      const int middle = (low + high) / 2;
      if (a.expert_offsets[middle + 1] > row) high = middle;
      else low = middle + 1;
    }
    return low < a.experts ? low : -1;
  }
};

/// The gradient of one chosen logit of the sparse families. `mean` is the sum of dscore * score.
template <class S>
__device__ __forceinline__ S chosen_gradient(const Arguments<S>& a, const Choice<S>& c, S mean) {
  if (a.kind == RouterScores::softmax_renorm) return c.score * (c.dscore - mean);
  if (a.kind == RouterScores::sigmoid) return c.dscore * c.score * (S(1) - c.score);
  if (!a.renormalise) return a.scale * c.dscore * c.raw * (S(1) - c.raw);
  return a.scale == S(0) ? S(0) : c.score * (c.dscore - mean / a.scale) * (S(1) - c.raw);  // score = scale * raw / sum of raw
}

/// Whether any two threads of a team, for any team of the warp, have the same expert.
template <int kLanes>
__device__ __forceinline__ bool repeated(int expert) {
  const int team = lane_index() / kLanes * 4096;
  const unsigned peers = __match_any_sync(kAllLanes, expert < 0 ? -1 - lane_index() : team + expert);
  return __any_sync(kAllLanes, (peers & lanes_below()) != 0);
}

/// Writes value(e, sum) for each chosen expert e of the token, `sum` being the sum of term(choice) over its choices. For the
/// first warp of a team; `valid`: for this token.
template <int kLanes, class S, class Term, class Value>
__device__ void write_chosen(const Choices<S>& choices, std::int64_t t, bool valid, Term term, Value value) {
  const int most = __reduce_max_sync(kAllLanes, choices.count);  // of the warp's tokens: its lanes stay together
  const bool once = most <= kLanes && !repeated<kLanes>(choices.mine.expert);
  for (int base = 0; base < most; base += kLanes) {
    const Choice<S> mine = choices[base + choices.rank];
    S sum = term(mine);
    bool first = mine.expert >= 0;
    if (!once) {
      sum = S(0);
      for (int other_base = 0; other_base < most; other_base += kLanes) {
        const Choice<S> other = choices[other_base + choices.rank];
        const S other_term = term(other);
        const int lanes = min(kLanes, most - other_base);
        for (int l = 0; l < lanes; ++l) {
          const int expert = __shfl_sync(kAllLanes, other.expert, l, kLanes);
          const S add = __shfl_sync(kAllLanes, other_term, l, kLanes);
          if (expert != mine.expert) continue;
          sum += add;
          first &= other_base + l >= base + choices.rank;
        }
      }
    }
    if (first && valid) choices.a.dlogits.rows.store(value(mine.expert, sum), t, mine.expert);
  }
}

/// x = exp(x - largest); returns their sum.
template <int kThreads, int kFours, class S>
__device__ __forceinline__ S exponentials(S (&x)[kFours][4], S largest) {
  S sum = S(0);
#pragma unroll
  for (int j = 0; j < kFours; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) sum += x[j][i] = exp(x[j][i] - largest);
  return Team<kThreads>::reduce(sum, Add{});
}

template <class S, int kThreads, int kFours>
__global__ void __launch_bounds__(Team<kThreads>::kBlockThreads, kResidentBlocks<S, kFours>)
    route_backward_kernel(const __grid_constant__ Arguments<S> a) {
  using Tm = Team<kThreads>;
  const bool exists = Tm::token() < a.tokens;
  const std::int64_t t = exists ? Tm::token() : a.tokens - 1;  // threads without a token work along: a warp stays together
  S x[kFours][4] = {};
  if (a.dense) a.logits.template load<kThreads>(t, x);
  const Choices<S> choices(a, t, exists, Tm::rank());
  const auto sum_of = [&](auto term) {
    S sum = S(0);
    for (int i = Tm::rank(); i < choices.count; i += kThreads) sum += term(choices[i]);
    return Tm::reduce(sum, Add{});
  };
  bool valid = sum_of([](const Choice<S>& c) { return S(c.expert >= 0); }) > S(0);
  S largest = S(0), p_sum = S(1), mean;
  const auto p = [&](int e) { return exp(a.logits.rows.template load<S>(t, e) - largest) / p_sum; };
  if (a.dense) {
    largest = team_largest<kThreads>(x);
    valid = valid && fabs(largest) < S(INFINITY);  // else route chooses nothing there, whatever the ids say
    p_sum = exponentials<kThreads>(x, largest);
    // With p of the logits, not with the scores, which may have been rounded.
    mean = sum_of([&](const Choice<S>& c) { return c.expert >= 0 ? c.dscore * p(c.expert) : S(0); });
    const S factor = mean / p_sum;
#pragma unroll
    for (int j = 0; j < kFours; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) x[j][i] = valid ? -x[j][i] * factor : S(0);
  } else {
    mean = sum_of([](const Choice<S>& c) { return c.dscore * c.score; });
  }
  if (exists) a.dlogits.template store<kThreads>(t, x);
  Tm::sync();  // orders the writes of a row by its threads
  if (Tm::rank() >= kWarpSize) return;
  if (a.dense) {
    const auto value = [&](int e, S g) { return p(e) * (g - mean); };
    write_chosen<Tm::kLanes>(choices, t, valid, [](const Choice<S>& c) { return c.dscore; }, value);
  } else {
    const auto term = [&](const Choice<S>& c) { return chosen_gradient(a, c, mean); };
    write_chosen<Tm::kLanes>(choices, t, valid, term, [](int, S sum) { return sum; });
  }
}

// ---- launchers

template <class S>
void launch_backward(const Arguments<S>& a, cudaStream_t stream) {
  dispatch_team<S>(a.experts, [&](auto threads, auto fours) {
    using Tm = Team<threads>;
    launch(RouteBackward::kName, route_backward_kernel<S, threads, fours>, blocks(a.tokens, Tm::kTokens), Tm::kBlockThreads,
           stream, 0, a);
  });
}

}  // namespace

std::size_t workspace_bytes(const RouteBackward&) { return 0; }

std::string explain(const RouteBackward&) { return "cuda: teams of threads as in route, rows in registers"; }

void run(const RouteBackward& op, const Execution& execution) {
  const DeviceGuard guard(op.dlogits.device.index);
  const cudaStream_t stream = stream_of(execution.stream);
  const DType logits = op.logits.defined() ? op.logits.dtype : op.scores.dtype;
  if (logits == DType::float64) launch_backward(Arguments<double>(op), stream);
  else launch_backward(Arguments<float>(op), stream);
}

}  // namespace intarsia::cuda
