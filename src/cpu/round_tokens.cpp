// round_tokens: each token's top-k by softmax, then every expert's count f is rounded to a multiple of `tile`: down drops its
// rows of lowest probability, up adds the tokens of highest probability that did not choose it (ties to the lowest token).
// Counts are capped at the valid tokens. Rows carry their softmax probability as it is. expert_offsets (E+1), row_token,
// row_slot, token_rows, row_score (R), token_offsets (T+1); entries past the last row: -1, score 0.
// Only the border of an expert is found, by partial selection; probabilities are never stored for all (T, E), but formed again
// from the token's maximum and sum. Workspace: about 28 bytes for each slot, 8 for each token, 12 * tile for each expert.
// Verify: intarsia-ops verify round_tokens                                                              (SonicMoE, section 5)
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <utility>

#include "base/parallel.h"
#include "base/rounded_count.h"
#include "base/rows.h"
#include "base/softmax.h"
#include "cpu/cpu.h"
#include "cpu/partition.h"
#include "cpu/round_tokens.h"
#include "cpu/row_io.h"
#include "cpu/row_scan.h"
#include "cpu/token_mask.h"

namespace intarsia::cpu {
namespace {

/// Fills chosen ids, their probabilities, and each token's maximum and sum; returns the number of valid tokens.
std::int64_t choose(const RoundTokens& op, const RoundScratch& s, int workers) {
  const std::int64_t experts = op.logits.size(1), k_count = op.experts_per_token;
  const Partition blocks = row_blocks(op.logits.size(0), experts);
  const TokenMask mask(op.token_mask);
  std::atomic<std::int64_t> valid = 0;  // a sum of integers: the same in any order
  parallel_for(blocks.count, workers, [&](std::int64_t block, int worker) {
    float* const logits = s.logits(worker);
    for (std::int64_t t = blocks.first(block); t < blocks.last(block); ++t) {
      std::int32_t* const ids = s.ids + t * k_count;
      s.softmax[t] = {0, 0};
      std::fill_n(ids, k_count, -1);
      if (!mask(t)) continue;
      widen_row(op.logits, t, 0, experts, logits);
      if (!routable_row(logits, experts)) continue;
      top_k(logits, experts, k_count, s.rank_keys(worker), ids);
      s.softmax[t] = TokenSoftmax::of(logits, experts);
      for (std::int64_t k = 0; k < k_count; ++k) s.chosen_probability[t * k_count + k] = s.softmax[t](logits[ids[k]]);
      ++valid;
    }
  });
  return valid;
}

/// The lists of the choices before rounding: tokens of each expert, ascending, with their probability keys.
void list_choices(const RoundTokens& op, const RoundScratch& s, const Execution& execution) {
  const std::int64_t tokens = op.logits.size(0), k_count = op.experts_per_token, slots = tokens * k_count;
  const BuildIndex index = s.index(op);
  run(index, Execution{execution.stream, s.index_workspace, execution.workers});
  const Partition blocks(slots, 16384);
  parallel_for(blocks.count, execution.workers, [&](std::int64_t block, int) {
    for (std::int64_t r = blocks.first(block); r < std::min<std::int64_t>(blocks.last(block), s.offsets[op.logits.size(1)]);
         ++r)
      s.keys[r] = RowKey(s.chosen_probability[s.row_slot[r]], s.row_token[r]);
  });
}

/// Keeps the `target` best of an expert's choices, in ascending token order.
void drop_rows(const RoundScratch& s, std::int64_t e, std::int64_t target) {
  RowKey* const keys = s.keys + s.offsets[e];
  RowKey* const end = s.keys + s.offsets[e + 1];
  if (keys + target == end) return;  // they are in that order already
  std::nth_element(keys, keys + target, end, std::greater<>());
  std::sort(keys, keys + target, RowKey::by_token);
}

/// The best unchosen tokens of a panel of experts: for each expert, a heap of the `need` best with the worst in front.
void add_rows(const RoundTokens& op, const RoundScratch& s, std::int64_t first, std::int64_t last) {
  const std::int64_t tokens = op.logits.size(0), k_count = op.experts_per_token;
  std::fill(s.added_count + first, s.added_count + last, 0);
  if (std::none_of(s.need + first, s.need + last, [](std::int32_t need) { return need > 0; })) return;
  for (std::int64_t t = 0; t < tokens; ++t) {
    if (!s.softmax[t].valid()) continue;
    std::uint32_t chosen = 0;
    for (std::int64_t k = 0; k < k_count; ++k) {
      const auto place = static_cast<std::uint64_t>(s.ids[t * k_count + k] - first);
      chosen |= place < static_cast<std::uint64_t>(last - first) ? 1u << place : 0u;
    }
    float logits[kExpertPanel];
    widen_row(op.logits, t, first, last - first, logits);
    for (std::int64_t e = first; e < last; ++e)
      if (s.need[e] > 0 && !(chosen >> (e - first) & 1u))
        s.offer(e, RowKey(s.softmax[t](logits[e - first]), static_cast<std::int32_t>(t)));
  }
  for (std::int64_t e = first; e < last; ++e) std::sort(s.added(e), s.added(e) + s.added_count[e], RowKey::by_token);
}

/// Rows of expert e: its kept choices and its added tokens, merged by token.
void write_rows(const RoundTokens& op, const RoundScratch& s, std::int64_t e) {
  const RowKey* kept = s.keys + s.offsets[e];
  const RowKey* const kept_end = kept + s.kept[e];
  const RowKey* added = s.added(e);
  const RowKey* const added_end = added + s.added_count[e];
  for (std::int32_t row = list(op.expert_offsets)[e]; kept != kept_end || added != added_end; ++row) {
    const bool take_kept = added == added_end || (kept != kept_end && RowKey::by_token(*kept, *added));
    const RowKey key = take_kept ? *kept++ : *added++;
    op.row_token.as<std::int32_t>()[row] = key.token();
    op.row_score.as<float>()[row * op.row_score.step(0)] = key.probability();
  }
}

/// token_offsets, token_rows and row_slot. An expert's rows of a block of tokens are contiguous, so blocks do not meet.
void index_tokens(const RoundTokens& op, int workers) {
  const std::int64_t tokens = op.logits.size(0), experts = op.logits.size(1);
  const std::int32_t* offsets = list(op.expert_offsets);
  const std::int32_t* row_token = list(op.row_token);
  auto* const next = op.token_offsets.as<std::int32_t>();  // counts, then first positions, then (moved on by its rows) the end
  const Partition blocks(tokens, std::max<std::int64_t>(1024, 4 * experts));
  const auto for_each_row = [&](std::int64_t block, auto&& body) {
    for (std::int64_t e = 0; e < experts; ++e) {
      const std::int32_t* row = std::lower_bound(row_token + offsets[e], row_token + offsets[e + 1], blocks.first(block));
      for (; row != row_token + offsets[e + 1] && *row < blocks.last(block); ++row) body(row - row_token, *row);
    }
  };
  next[tokens] = 0;
  parallel_for(blocks.count, workers, [&](std::int64_t block, int) {
    std::fill(next + blocks.first(block), next + blocks.last(block), 0);
    for_each_row(block, [&](std::int64_t, std::int32_t t) { ++next[t]; });
  });
  for (std::int64_t t = 0, position = 0; t <= tokens; ++t)
    position += std::exchange(next[t], static_cast<std::int32_t>(position));
  parallel_for(blocks.count, workers, [&](std::int64_t block, int) {
    for_each_row(block, [&](std::int64_t row, std::int32_t t) {
      op.token_rows.as<std::int32_t>()[next[t]] = static_cast<std::int32_t>(row);
      op.row_slot.as<std::int32_t>()[row] = next[t]++;
    });
  });
  for (std::int64_t t = tokens; t > 0; --t) next[t] = next[t - 1];  // each has become the next token's first position
  next[0] = 0;
}

void clear_tail(const RoundTokens& op) {
  const std::int32_t rows = list(op.expert_offsets)[op.logits.size(1)];
  for (std::int64_t r = rows; r < op.row_token.size(0); ++r) {
    op.row_token.as<std::int32_t>()[r] = op.row_slot.as<std::int32_t>()[r] = op.token_rows.as<std::int32_t>()[r] = -1;
    op.row_score.as<float>()[r * op.row_score.step(0)] = 0.0f;
  }
}

}  // namespace

std::size_t workspace_bytes(const RoundTokens& op, int workers) {
  Workspace workspace;
  const RoundScratch scratch(workspace, op, workers);
  return workspace.bytes();
}

void run(const RoundTokens& op, const Execution& execution) {
  Workspace workspace(execution.workspace);
  const int workers = execution.workers;
  const RoundScratch s(workspace, op, workers);
  const std::int64_t experts = op.logits.size(1);
  const std::int64_t valid = choose(op, s, workers);
  list_choices(op, s, execution);

  auto* const offsets = op.expert_offsets.as<std::int32_t>();
  offsets[0] = 0;
  for (std::int64_t e = 0, deviation = 0; e < experts; ++e) {
    const std::int64_t count = s.offsets[e + 1] - s.offsets[e], target = rounded_count(op, e, count, valid, deviation);
    s.kept[e] = static_cast<std::int32_t>(std::min(count, target));
    s.need[e] = static_cast<std::int32_t>(target - s.kept[e]);
    offsets[e + 1] = offsets[e] + static_cast<std::int32_t>(target);
  }
  parallel_for(experts, workers, [&](std::int64_t e, int) { drop_rows(s, e, s.kept[e]); });
  const Partition panels = expert_panels(experts);
  parallel_for(panels.count, workers,
               [&](std::int64_t panel, int) { add_rows(op, s, panels.first(panel), panels.last(panel)); });
  parallel_for(experts, workers, [&](std::int64_t e, int) { write_rows(op, s, e); });
  index_tokens(op, workers);
  clear_tail(op);
}

}  // namespace intarsia::cpu
