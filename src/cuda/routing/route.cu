// route: logits (T, E) -> ids, scores (T, K), in descending order of what the family ranks by; ties go to the lowest id.
//   softmax         scores = softmax(logits) of the chosen         softmax_renorm  softmax over the chosen logits
//   sigmoid         sigmoid of the chosen
//   sigmoid_group   ranks by sigmoid(logit) + bias within the best groups; scale * sigmoid (over its sum when `renormalise`)
// A token that is masked, or not routable (NaN, infinite largest logit), gets ids -1 and scores 0; the latter is counted.
// A warp takes a token whose logits lie in its registers (E <= 1024), four warps up to E = 4096: K rounds of a warp-wide
// maximum. Reads T*E logits once, writes T*K ids and scores. One launch, and one more to add up the NaN tokens. Workspace: a
// byte for each token when they are counted. Verify: intarsia-ops verify route
#include "cuda/routing/softmax.cuh"
#include "cuda/routing/top_k.cuh"

namespace intarsia::cuda {
namespace {

template <class T>
struct Arguments {
  using S = Wide<T>;
  Rows<const T> logits;
  const S* expert_bias;
  TokenMask mask;
  std::int64_t tokens;
  int experts, k_count, groups, top_groups;
  RouterScores kind;
  bool renormalise, wide_ids;
  S scale;
  void* ids;
  S *scores, *raw_scores;
  std::uint8_t* nan_token;  // (T): set for tokens to be counted
  AnyRows rounded;

  Arguments(const Route& op, std::uint8_t* nan_token_)
      : logits(op.logits),
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
        nan_token(nan_token_),
        rounded(op.rounded_logits) {}

  __device__ __forceinline__ void store(std::int64_t slot, int id, S score, S raw) const {
    if (wide_ids) static_cast<std::int64_t*>(ids)[slot] = id;
    else static_cast<std::int32_t*>(ids)[slot] = id;
    scores[slot] = score;
    if (raw_scores) raw_scores[slot] = raw;
  }
};

// ---- kernels

/// Room for the ranks of a row while its groups are compared. A group's elements are read by one thread: the place of an
/// element is shifted by one for every 32, so that threads do not meet in a bank when a group's size is a multiple of 32.
template <class S, int kWarps, int kPerThread>
struct GroupRoom {
  static constexpr int kElements = Team<kWarps>::kThreads * kPerThread;
  S rank[kElements + kElements / 32];
  bool keep[kElements];  // of each group
  __device__ __forceinline__ S& at(int e) { return rank[e + e / 32]; }
};

/// Gives the elements outside the best groups the rank -inf.
template <class S, int kWarps, int kPerThread>
__device__ void keep_best_groups(GroupRoom<S, kWarps, kPerThread>& room, int experts, int groups, int top_groups,
                                 OrderKey<S> (&key)[kPerThread]) {
  using Tm = Team<kWarps>;
  const int size = experts / groups;
  Tm::sync();
#pragma unroll
  for (int j = 0; j < kPerThread; ++j)
    if (const int e = j * Tm::kThreads + Tm::rank(); e < experts) room.at(e) = number_of(key[j]);
  Tm::sync();
  for (int g = Tm::rank(); g < groups; g += Tm::kThreads) {
    S best = -INFINITY, second = -INFINITY;
    for (int e = g * size; e < (g + 1) * size; ++e) {
      const S rank = room.at(e), lower = rank < best ? rank : best;
      second = lower > second ? lower : second;
      best = rank > best ? rank : best;
    }
    room.at(g * size) = size > 1 ? best + second : best;  // its ranks have been read: the first place holds the group's worth
  }
  Tm::sync();
  for (int g = Tm::rank(); g < groups; g += Tm::kThreads) {
    const S worth = room.at(g * size);
    int better = 0;
    for (int other = 0; other < groups; ++other) {
      const S rival = room.at(other * size);
      better += rival > worth || (rival == worth && other < g);
    }
    room.keep[g] = better < top_groups;
  }
  Tm::sync();
#pragma unroll
  for (int j = 0; j < kPerThread; ++j)
    if (const int e = j * Tm::kThreads + Tm::rank(); e < experts && !room.keep[e / size]) key[j] = order_key(S(-INFINITY));
}

/// Scores of the chosen logits `value` (of thread rank + i * kThreads); `p_sum` is the softmax sum over all experts.
template <class T, int kWarps, int kChoices, class S>
__device__ void score_chosen(const Arguments<T>& a, S largest, S p_sum, const bool (&used)[kChoices], S (&value)[kChoices]) {
  using Tm = Team<kWarps>;
  if (a.kind == RouterScores::softmax) {
    for (int i = 0; i < kChoices; ++i) value[i] = exp(value[i] - largest) / p_sum;
    return;
  }
  if (a.kind == RouterScores::sigmoid || (a.kind == RouterScores::sigmoid_group && !a.renormalise)) {
    const S scale = a.kind == RouterScores::sigmoid ? S(1) : a.scale;
    for (int i = 0; i < kChoices; ++i) value[i] = scale * sigmoid(value[i]);
    return;
  }
  // Shares of the chosen; of sigmoids through their logarithm, so that logits of -1000 still give a distribution.
  const bool shares_of_sigmoid = a.kind == RouterScores::sigmoid_group;
  S best = -INFINITY, sum = S(0);
  for (int i = 0; i < kChoices; ++i) {
    value[i] = used[i] ? softmax_argument(value[i], shares_of_sigmoid) : S(-INFINITY);
    best = value[i] > best ? value[i] : best;
  }
  best = Tm::reduce(best, Max{});
  const bool none = !(best > S(-INFINITY));  // the bias chose experts whose sigmoid is exactly zero: nothing to share out
  for (int i = 0; i < kChoices; ++i) sum += value[i] = used[i] && !none ? exp(value[i] - best) : S(0);
  sum = Tm::reduce(sum, Add{});
  for (int i = 0; i < kChoices; ++i) value[i] = none ? S(0) : value[i] / sum * (shares_of_sigmoid ? a.scale : S(1));
}

constexpr int kRouteWarps = 4;

template <class T, int kWarps, int kPerThread>
__global__ void __launch_bounds__(kRouteWarps* kWarpSize) route_kernel(const __grid_constant__ Arguments<T> a) {
  using S = Wide<T>;
  using Tm = Team<kWarps>;
  constexpr int kTeams = kRouteWarps / kWarps, kChoices = kChoicesPerThread<kWarps>;
  __shared__ GroupRoom<S, kWarps, kPerThread> rooms[kTeams];

  const std::int64_t t = std::int64_t{blockIdx.x} * kTeams + threadIdx.x / Tm::kThreads;
  if (t >= a.tokens) return;  // a whole team leaves; teams of one warp meet no others, a team of four is its block

  const bool masked = !a.mask(t);
  OrderKey<S> key[kPerThread];
  S largest = -INFINITY;
  bool nan = false;
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    const int e = j * Tm::kThreads + Tm::rank();
    key[j] = 0;
    if ((masked && !a.rounded.data) || e >= a.experts) continue;
    const S x = widen(*a.logits.at(t, e));
    if (a.rounded.data) a.rounded.store(x, t, e);
    if (masked) continue;
    nan |= x != x;
    largest = x > largest ? x : largest;
    key[j] = order_key(x);
  }
  largest = Tm::reduce(nan ? S(INFINITY) : largest, Max{});
  const bool routable = fabs(largest) < S(INFINITY);
  if (a.nan_token && Tm::rank() == 0) a.nan_token[t] = !masked && !routable;

  int chosen[kChoices];
  bool used[kChoices];
  S value[kChoices], raw[kChoices];
  for (int i = 0; i < kChoices; ++i) {
    chosen[i] = -1;
    value[i] = raw[i] = S(0);
    used[i] = i * Tm::kThreads + Tm::rank() < a.k_count;
  }
  if (routable) {
    S p_sum = S(0);
    if (a.kind == RouterScores::softmax) {
#pragma unroll
      for (int j = 0; j < kPerThread; ++j)
        if (key[j] != 0) p_sum += exp(number_of(key[j]) - largest);
      p_sum = Tm::reduce(p_sum, Add{});
    }
    if (a.kind == RouterScores::sigmoid_group) {
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) {
        const int e = j * Tm::kThreads + Tm::rank();
        if (e < a.experts) key[j] = order_key(sigmoid(number_of(key[j])) + (a.expert_bias ? a.expert_bias[e] : S(0)));
      }
      if (a.top_groups < a.groups) keep_best_groups(rooms[threadIdx.x / Tm::kThreads], a.experts, a.groups, a.top_groups, key);
    }
    team_top_k<kWarps>(key, a.k_count, chosen);
    for (int i = 0; i < kChoices; ++i)
      if (used[i]) value[i] = widen(*a.logits.at(t, chosen[i]));
    for (int i = 0; i < kChoices; ++i) raw[i] = sigmoid(value[i]);
    score_chosen<T, kWarps>(a, largest, p_sum, used, value);
  }
  for (int i = 0; i < kChoices; ++i)
    if (used[i]) a.store(t * a.k_count + i * Tm::kThreads + Tm::rank(), chosen[i], value[i], raw[i]);
}

constexpr int kCountWarps = 32;

/// total += the number of set bytes; one block.
__global__ void __launch_bounds__(kCountWarps* kWarpSize)
    count_kernel(const std::uint8_t* set, std::int64_t n, std::int32_t* total) {
  int count = 0;
  const auto* words = reinterpret_cast<const uint4*>(set);  // workspace pieces are aligned
  for (std::int64_t i = threadIdx.x; i < n / 16; i += blockDim.x) {
    const uint4 w = words[i];
    count += __popc(w.x) + __popc(w.y) + __popc(w.z) + __popc(w.w);
  }
  for (std::int64_t i = n / 16 * 16 + threadIdx.x; i < n; i += blockDim.x) count += set[i];
  count = block_reduce<kCountWarps>(count, Add{});
  if (threadIdx.x == 0) *total += count;
}

// ---- launchers

template <class T, int kWarps, int kPerThread>
void launch_route(const Arguments<T>& a, cudaStream_t stream) {
  launch(Route::kName, route_kernel<T, kWarps, kPerThread>, blocks(a.tokens, kRouteWarps / kWarps), kRouteWarps * kWarpSize,
         stream, 0, a);
}

template <class T>
void launch_route(const Arguments<T>& a, cudaStream_t stream) {
  if (a.experts <= 32) return launch_route<T, 1, 1>(a, stream);
  if (a.experts <= 128) return launch_route<T, 1, 4>(a, stream);
  if (a.experts <= 256) return launch_route<T, 1, 8>(a, stream);
  if (a.experts <= 512) return launch_route<T, 1, 16>(a, stream);
  if (a.experts <= 1024) return launch_route<T, 1, 32>(a, stream);
  return launch_route<T, kRouteWarps, 32>(a, stream);
}

}  // namespace

std::size_t workspace_bytes(const Route& op) {
  return op.nan_tokens.defined() ? align_up(static_cast<std::size_t>(op.logits.size(0))) : 0;
}

std::string explain(const Route& op) {
  return op.logits.size(1) <= 1024 ? "cuda: a warp for each token, logits in registers"
                                   : "cuda: four warps for each token, logits in registers";
}

void run(const Route& op, const Execution& execution) {
  const DeviceGuard guard(op.logits.device.index);
  const cudaStream_t stream = stream_of(execution.stream);
  auto* const nan_token = op.nan_tokens.defined() ? reinterpret_cast<std::uint8_t*>(execution.workspace) : nullptr;
  dispatch_device_float(op.logits.dtype,
                        [&](auto tag) { launch_route(Arguments<typename decltype(tag)::type>(op, nan_token), stream); });
  if (nan_token && op.logits.size(0) > 0)
    launch("route: count", count_kernel, 1, kCountWarps * kWarpSize, stream, 0, static_cast<const std::uint8_t*>(nan_token),
           op.logits.size(0), op.nan_tokens.as<std::int32_t>());
}

}  // namespace intarsia::cuda
