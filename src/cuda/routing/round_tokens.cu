// round_tokens: each token's top-k by softmax, then every expert's count f is rounded to a multiple of `tile`: down drops its
// rows of lowest probability, up adds the tokens of highest probability that did not choose it (ties to the lowest token).
// Counts are capped at the valid tokens. Rows carry their softmax probability as it is. expert_offsets (E+1), row_token,
// row_slot, token_rows, row_score (R), token_offsets (T+1); entries past the last row: -1, score 0.
// No sort, no host sync: route; the experts' counts (index_tiles.cuh); their targets (one block, `balanced` in one thread);
// keys (round_keys.cuh); a block for each expert selects its rows (round_border.cuh) and leaves a bit for each token; counts
// and lists of tokens from those bits. Nine launches, two more for each further panel of experts. Moves T*E logits three times,
// T*E keys (4 bytes) about six times, mostly through L2. Workspace: 12 bytes a slot, 8 a token, T*E/4, and the keys of a panel
// of experts: at most 256 MiB, or 32 experts. Verify: intarsia-ops verify round_tokens (SonicMoE, section 5)
#include "base/random.h"
#include "base/softmax.h"
#include "cuda/routing/index_tiles.cuh"
#include "cuda/routing/round_border.cuh"

namespace intarsia::cuda {
namespace {

// ---- kernels

struct RoundRule {
  Rounding rounding;
  std::uint64_t seed;
  std::int64_t tile;

  __device__ bool up(int expert, std::int64_t rest) const {
    switch (rounding) {
      case Rounding::up: return true;
      case Rounding::nearest: return 2 * rest > tile;
      case Rounding::stochastic:
        return uniform01(seed, static_cast<std::uint64_t>(expert)) < static_cast<double>(rest) / static_cast<double>(tile);
      default: return false;
    }
  }
};

constexpr int kTargetWarps = 32, kTargetThreads = kTargetWarps * kWarpSize;

/// One block: counts (E) -> targets (E), expert_offsets (E+1), the number of valid tokens.
__global__ void __launch_bounds__(kTargetThreads)
    target_kernel(const std::int32_t* counts, int experts, const std::int32_t* valid, int valid_count, RoundRule rule,
                  std::int32_t* targets, std::int32_t* valid_tokens, std::int32_t* expert_offsets) {
  __shared__ int target[kMaxExperts];
  std::int64_t tokens = 0;
  for (int i = threadIdx.x; i < valid_count; i += kTargetThreads) tokens += valid[i];
  tokens = block_reduce<kTargetWarps>(tokens, Add{});
  if (threadIdx.x == 0) *valid_tokens = static_cast<std::int32_t>(tokens);

  for (int e = threadIdx.x; e < experts; e += kTargetThreads) {
    const std::int64_t count = counts[e], rest = count % rule.tile, down = count - rest;
    const std::int64_t up = min(down + rule.tile, tokens);
    target[e] = static_cast<int>(rest == 0 ? count : rule.up(e, rest) ? up : down);
  }
  __syncthreads();
  if (rule.rounding == Rounding::balanced && threadIdx.x == 0) {
    std::int64_t deviation = 0;
    for (int e = 0; e < experts; ++e) {
      const std::int64_t count = counts[e], down = target[e], up = min(down + rule.tile, tokens);
      if (count == down) continue;  // a multiple already
      const std::int64_t if_up = deviation + up - count, if_down = deviation + down - count;
      const bool choose_up = llabs(if_up) < llabs(if_down);
      deviation = choose_up ? if_up : if_down;
      target[e] = static_cast<int>(choose_up ? up : down);
    }
  }
  __syncthreads();

  constexpr int kEach = kMaxExperts / kTargetThreads;
  int sum = 0, total;
  for (int i = 0; i < kEach; ++i)
    if (const int e = static_cast<int>(threadIdx.x) * kEach + i; e < experts) sum += target[e];
  int offset = block_exclusive_scan<kTargetWarps>(sum, total);
  for (int i = 0; i < kEach; ++i) {
    const int e = static_cast<int>(threadIdx.x) * kEach + i;
    if (e >= experts) break;
    targets[e] = target[e];
    expert_offsets[e] = offset;
    offset += target[e];
  }
  if (threadIdx.x == 0) expert_offsets[experts] = total;
}

constexpr int kTokenWarps = 8, kTokenThreads = kTokenWarps * kWarpSize;

/// A warp takes a word of tokens, a lane each: token_offsets[t] = the rows of token t, for now; block_rows = the block's.
__global__ void __launch_bounds__(kTokenThreads) token_count_kernel(RowWords words, std::int64_t tokens, int experts,
                                                                    std::int32_t* token_offsets, std::int32_t* block_rows) {
  const std::int64_t word = std::int64_t{blockIdx.x} * kTokenWarps + warp_index(), t = word * kWarpSize + lane_index();
  int rows = 0;
  if (word * kWarpSize < tokens) {
#pragma unroll 8
    for (int e = 0; e < experts; ++e) rows += words.kept[word * experts + e] >> lane_index() & 1u;
  }
  if (t < tokens) token_offsets[t] = rows;
  rows = block_reduce<kTokenWarps>(rows, Add{});
  if (threadIdx.x == 0) block_rows[blockIdx.x] = rows;
}

struct TokenLists {
  const std::int32_t *expert_offsets, *block_rows;
  std::int32_t *token_offsets, *token_rows, *row_token, *row_slot;
  void* row_score;
  DType score_dtype;
  std::int64_t row_token_size, row_slot_size, token_rows_size, row_score_size;
};

/// Same grid: token_offsets, token_rows, row_slot, and the ends of the lists. Experts ascend, so a token's rows do.
__global__ void __launch_bounds__(kTokenThreads)
    token_list_kernel(RowWords words, std::int64_t tokens, int experts, const __grid_constant__ TokenLists lists) {
  const std::int64_t word = std::int64_t{blockIdx.x} * kTokenWarps + warp_index(), t = word * kWarpSize + lane_index();
  int earlier = 0;
  for (unsigned b = threadIdx.x; b < blockIdx.x; b += kTokenThreads) earlier += lists.block_rows[b];
  earlier = block_reduce<kTokenWarps>(earlier, Add{});
  int total;
  int place = earlier + block_exclusive_scan<kTokenWarps>(t < tokens ? lists.token_offsets[t] : 0, total);
  if (t < tokens) lists.token_offsets[t] = place;
  const int rows = lists.expert_offsets[experts];
  if (blockIdx.x == 0 && threadIdx.x == 0) lists.token_offsets[tokens] = rows;

  if (word * kWarpSize < tokens) {
#pragma unroll 4
    for (int e = 0; e < experts; ++e) {
      const unsigned kept = words.kept[word * experts + e];
      if (!(kept >> lane_index() & 1u)) continue;
      const int row = words.first_row[word * experts + e] + __popc(kept & lanes_below());
      lists.token_rows[place] = row;
      lists.row_slot[row] = place++;
    }
  }

  const std::int64_t thread = std::int64_t{blockIdx.x} * kTokenThreads + threadIdx.x,
                     threads = std::int64_t{gridDim.x} * kTokenThreads;
  for (std::int64_t r = rows + thread; r < lists.row_token_size; r += threads) lists.row_token[r] = -1;
  for (std::int64_t r = rows + thread; r < lists.row_slot_size; r += threads) lists.row_slot[r] = -1;
  for (std::int64_t r = rows + thread; r < lists.token_rows_size; r += threads) lists.token_rows[r] = -1;
  for (std::int64_t r = rows + thread; r < lists.row_score_size; r += threads)
    store_any(lists.row_score, lists.score_dtype, r, 0.0f);
}

// ---- launchers

constexpr std::int64_t kKeyBytes = std::int64_t{256} << 20;

template <class S>
struct Scratch {
  IndexTiles tiles;
  std::int64_t words, pitch, token_blocks;
  int panel;  // experts whose keys are there at once
  std::int32_t* ids;
  S* scores;
  std::int32_t *counts, *totals, *targets, *valid, *valid_tokens, *block_rows;
  RowSoftmax<S>* softmax;
  RowWords row_words;
  OrderKey<S>* keys;

  Scratch(Workspace& workspace, const RoundTokens& op)
      : tiles(op.logits.size(0), op.experts_per_token, op.logits.size(1)),
        words(ceil_div(op.logits.size(0), kTokenTile)),
        pitch(words * kTokenTile),
        token_blocks(std::max<std::int64_t>(1, ceil_div(words, kTokenWarps))) {
    const std::int64_t experts = tiles.experts, fit = kKeyBytes / std::max<std::int64_t>(1, pitch * sizeof(OrderKey<S>));
    panel = static_cast<int>(std::min(experts, std::max<std::int64_t>(32, fit / 32 * 32)));
    ids = workspace.take<std::int32_t>(tiles.slots);
    scores = workspace.take<S>(tiles.slots);
    counts = workspace.take<std::int32_t>(tiles.cells());
    totals = workspace.take<std::int32_t>(experts);
    targets = workspace.take<std::int32_t>(experts);
    valid = workspace.take<std::int32_t>(words);
    valid_tokens = workspace.take<std::int32_t>(1);
    block_rows = workspace.take<std::int32_t>(token_blocks);
    softmax = workspace.take<RowSoftmax<S>>(op.logits.size(0));
    row_words.kept = workspace.take<std::uint32_t>(words * experts);
    row_words.first_row = workspace.take<std::int32_t>(words * experts);
    keys = workspace.take<OrderKey<S>>(panel * pitch);
  }
};

/// Each token's choices, and how many choose each expert.
template <class S>
void choose(const RoundTokens& op, const Scratch<S>& s, const Execution& execution) {
  const std::int64_t tokens = op.logits.size(0), k = op.experts_per_token;
  Route route{.logits = op.logits, .token_mask = op.token_mask, .scores_kind = RouterScores::softmax};
  route.ids = TensorView(s.ids, DType::int32, {tokens, k}, op.logits.device);
  route.scores = TensorView(s.scores, sizeof(S) == 8 ? DType::float64 : DType::float32, {tokens, k}, op.logits.device);
  run(route, Execution{execution.stream, nullptr, execution.workers});
  launch_count(RoundTokens::kName, Slots{route.ids, TensorView(), s.tiles}, s.counts, s.totals, stream_of(execution.stream));
}

template <class T>
void launch_round(const RoundTokens& op, const Execution& execution) {
  using S = Wide<T>;
  const char* const name = RoundTokens::kName;
  const cudaStream_t stream = stream_of(execution.stream);
  Workspace workspace(execution.workspace);
  const Scratch<S> s(workspace, op);
  const std::int64_t tokens = op.logits.size(0);
  const int experts = s.tiles.experts, k_count = s.tiles.k_count;
  const Rows<const T> logits(op.logits);
  auto* const offsets = op.expert_offsets.as<std::int32_t>();
  constexpr int kTileThreads = kTileWarps<S> * kWarpSize;

  choose(op, s, execution);
  launch(name, softmax_kernel<T>, static_cast<unsigned>(s.words), kTileThreads, stream, 0, logits, tokens, experts,
         static_cast<const std::int32_t*>(s.ids), k_count, s.softmax, s.valid);
  const RoundRule rule{op.rounding, static_cast<std::uint64_t>(op.seed), op.tile};
  launch(name, target_kernel, 1, kTargetThreads, stream, 0, static_cast<const std::int32_t*>(s.totals), experts,
         static_cast<const std::int32_t*>(s.valid), static_cast<int>(s.words), rule, s.targets, s.valid_tokens, offsets);
  for (int first = 0; first < experts && tokens > 0; first += s.panel) {
    const int last = std::min(first + s.panel, experts);
    launch(name, key_kernel<T>, dim3(static_cast<unsigned>(s.words), blocks(last - first, kTileThreads)), kTileThreads, stream,
           0, logits, tokens, first, last, static_cast<const std::int32_t*>(s.ids), k_count,
           static_cast<const RowSoftmax<S>*>(s.softmax), s.keys, s.pitch);
    launch(name, select_kernel<S>, static_cast<unsigned>(last - first), kSelectThreads, stream, 0,
           static_cast<const OrderKey<S>*>(s.keys), s.pitch, first, experts, static_cast<const std::int32_t*>(s.totals),
           static_cast<const std::int32_t*>(s.targets), static_cast<const std::int32_t*>(s.valid_tokens),
           static_cast<const std::int32_t*>(offsets), s.row_words, op.row_token.as<std::int32_t>(), op.row_score.as<S>());
  }

  auto* const token_offsets = op.token_offsets.as<std::int32_t>();
  const auto token_blocks = static_cast<unsigned>(s.token_blocks);
  launch(name, token_count_kernel, token_blocks, kTokenThreads, stream, 0, s.row_words, tokens, experts, token_offsets,
         s.block_rows);
  const TokenLists lists{offsets,
                         s.block_rows,
                         token_offsets,
                         op.token_rows.as<std::int32_t>(),
                         op.row_token.as<std::int32_t>(),
                         op.row_slot.as<std::int32_t>(),
                         op.row_score.data,
                         op.row_score.dtype,
                         op.row_token.size(0),
                         op.row_slot.size(0),
                         op.token_rows.size(0),
                         op.row_score.size(0)};
  launch(name, token_list_kernel, token_blocks, kTokenThreads, stream, 0, s.row_words, tokens, experts, lists);
}

}  // namespace

std::size_t workspace_bytes(const RoundTokens& op) {
  return dispatch_device_float(op.logits.dtype, [&](auto tag) {
    Workspace workspace;
    const Scratch<Wide<typename decltype(tag)::type>> scratch(workspace, op);
    return workspace.bytes();
  });
}

std::string explain(const RoundTokens& op) {
  return dispatch_device_float(op.logits.dtype, [&](auto tag) {
    Workspace workspace;
    const Scratch<Wide<typename decltype(tag)::type>> scratch(workspace, op);
    return "cuda: radix selection in a block for each expert, keys of " + std::to_string(scratch.panel) + " experts at a time";
  });
}

void run(const RoundTokens& op, const Execution& execution) {
  const DeviceGuard guard(op.logits.device.index);
  dispatch_device_float(op.logits.dtype, [&](auto tag) { launch_round<typename decltype(tag)::type>(op, execution); });
}

}  // namespace intarsia::cuda
