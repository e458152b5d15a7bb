// route_backward: dscores -> dlogits (T, E), for ids (T, K) or for the CSR lists of round_tokens (always softmax).
//   softmax         dlogits = p (g - <g, p>), dense over E; g = dscores at the chosen experts
//   softmax_renorm  s (g - <g, s>)            sigmoid  g s (1 - s)            both at the chosen experts only
//   sigmoid_group   s (g - <g, s> / scale) (1 - raw), or scale g raw (1 - raw) without renormalisation
// Tokens without a choice get zeros. A warp takes a token: it writes the row as if nothing were chosen, then each lane corrects
// the elements of the choices it holds; equal ids in a token are added up by the first of them, in order. One launch, no
// workspace; any E and K. Reads T*E logits twice (softmax only), writes T*E: bound by memory.
// Verify: intarsia-ops verify route_backward
#include "base/rows.h"
#include "cuda/routing/softmax.cuh"

namespace intarsia::cuda {
namespace {

template <class T, class D>
struct Arguments {
  using S = Wide<T>;
  Rows<const T> logits;  // softmax only
  Rows<D> dlogits;
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

/// The choices of one token, by their place in it.
template <class T, class D>
struct Choices {
  using S = Wide<T>;
  const Arguments<T, D>& a;
  std::int64_t first;
  int count;

  __device__ Choices(const Arguments<T, D>& a_, std::int64_t t) : a(a_), first(t * a_.k_count), count(a_.k_count) {
    if (a.ids.data) return;
    first = min(max(std::int64_t{a.token_offsets[t]}, std::int64_t{0}), a.list_size);
    const std::int64_t last = min(max(std::int64_t{a.token_offsets[t + 1]}, first), a.list_size);
    count = static_cast<int>(min(last - first, std::int64_t{a.experts}));  // a token has at most one row in each expert
  }

  __device__ Choice<S> operator[](int i) const {
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
template <class T, class D, class S>
__device__ S chosen_gradient(const Arguments<T, D>& a, const Choice<S>& c, S mean) {
  if (a.kind == RouterScores::softmax_renorm) return c.score * (c.dscore - mean);
  if (a.kind == RouterScores::sigmoid) return c.dscore * c.score * (S(1) - c.score);
  if (!a.renormalise) return a.scale * c.dscore * c.raw * (S(1) - c.raw);
  return a.scale == S(0) ? S(0) : c.score * (c.dscore - mean / a.scale) * (S(1) - c.raw);  // score = scale * raw / sum of raw
}

/// Writes value(e, sum) for each chosen expert e of the token, `sum` being the sum of term(choice) over its choices.
template <class T, class D, class Term, class Value>
__device__ void write_chosen(const Choices<T, D>& choices, std::int64_t t, Term term, Value value) {
  using S = Wide<T>;
  for (int base = 0; base < choices.count; base += kWarpSize) {
    const Choice<S> mine = choices[base + lane_index()];
    S sum = S(0);
    bool first = mine.expert >= 0;
    for (int other_base = 0; other_base < choices.count; other_base += kWarpSize) {
      const Choice<S> other = choices[other_base + lane_index()];
      const S other_term = term(other);
      const int lanes = min(kWarpSize, choices.count - other_base);
      for (int l = 0; l < lanes; ++l) {
        const int expert = __shfl_sync(kAllLanes, other.expert, l);
        const S add = __shfl_sync(kAllLanes, other_term, l);
        if (expert != mine.expert) continue;
        sum += add;
        first &= other_base + l >= base + lane_index();
      }
    }
    if (first) *choices.a.dlogits.at(t, mine.expert) = narrow<D>(value(mine.expert, sum));
  }
}

constexpr int kRowWarps = 8;

template <class T, class D>
__global__ void __launch_bounds__(kRowWarps* kWarpSize, 4) route_backward_kernel(const __grid_constant__ Arguments<T, D> a) {
  using S = Wide<T>;
  const std::int64_t t = std::int64_t{blockIdx.x} * kRowWarps + warp_index();
  if (t >= a.tokens) return;
  const Choices<T, D> choices(a, t);
  bool any = false;
  S mean = S(0);  // of dscore * score, or of dscore * p
  for (int i = lane_index(); i < choices.count; i += kWarpSize) {
    const Choice<S> c = choices[i];
    any |= c.expert >= 0;
    mean += c.dscore * c.score;
  }
  any = __any_sync(kAllLanes, any);
  mean = warp_reduce(mean, Add{});

  if (!a.dense || !any) {
    for (int e = lane_index(); e < a.experts; e += kWarpSize) *a.dlogits.at(t, e) = narrow<D>(S(0));
    if (!any) return;
    __syncwarp();  // orders the writes of a row by its lanes
    write_chosen(choices, t, [&](const Choice<S>& c) { return chosen_gradient(a, c, mean); }, [](int, S sum) { return sum; });
    return;
  }

  const RowSoftmax<S> softmax = warp_softmax(a.logits, t, a.experts, true, false);
  if (!softmax.valid()) {  // route chooses nothing there, whatever the ids say
    for (int e = lane_index(); e < a.experts; e += kWarpSize) *a.dlogits.at(t, e) = narrow<D>(S(0));
    return;
  }
  const auto p = [&](int e) { return softmax(static_cast<S>(widen(*a.logits.at(t, e)))); };
  mean = S(0);  // with p of the logits, not with the scores, which may have been rounded
  for (int i = lane_index(); i < choices.count; i += kWarpSize)
    if (const Choice<S> c = choices[i]; c.expert >= 0) mean += c.dscore * p(c.expert);
  mean = warp_reduce(mean, Add{});
  for (int e = lane_index(); e < a.experts; e += kWarpSize) *a.dlogits.at(t, e) = narrow<D>(-p(e) * mean);
  __syncwarp();
  write_chosen(choices, t, [](const Choice<S>& c) { return c.dscore; }, [&](int e, S g) { return p(e) * (g - mean); });
}

// ---- launchers

template <class T>
void launch_backward(const RouteBackward& op, cudaStream_t stream) {
  dispatch_device_float(op.dlogits.dtype, [&](auto tag) {
    using D = typename decltype(tag)::type;
    const Arguments<T, D> a(op);
    launch(RouteBackward::kName, route_backward_kernel<T, D>, blocks(a.tokens, kRowWarps), kRowWarps * kWarpSize, stream, 0, a);
  });
}

}  // namespace

std::size_t workspace_bytes(const RouteBackward&) { return 0; }

std::string explain(const RouteBackward&) { return "cuda: a warp for each token"; }

void run(const RouteBackward& op, const Execution& execution) {
  const DeviceGuard guard(op.dlogits.device.index);
  const cudaStream_t stream = stream_of(execution.stream);
  const DType logits = op.logits.defined() ? op.logits.dtype : op.scores.dtype;
  dispatch_device_float(logits, [&](auto tag) { launch_backward<typename decltype(tag)::type>(op, stream); });
}

}  // namespace intarsia::cuda
