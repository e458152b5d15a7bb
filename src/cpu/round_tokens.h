// The scratch of round_tokens: keys that order rows by probability, a token's softmax in two numbers, and the pieces of
// workspace.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>

#include "cpu/cpu.h"
#include "cpu/partition.h"
#include "cpu/row_scan.h"
#include "cpu/workspace.h"

namespace intarsia::cpu {

/// A row as one number: probability first, then the lowest token. Probabilities are >= 0, so their bits order as they do.
class RowKey {
 public:
  RowKey() = default;
  RowKey(float probability, std::int32_t token)
      : bits_(static_cast<std::uint64_t>(std::bit_cast<std::uint32_t>(probability)) << 32 |
              ~static_cast<std::uint32_t>(token)) {}
  float probability() const { return std::bit_cast<float>(static_cast<std::uint32_t>(bits_ >> 32)); }
  std::int32_t token() const { return static_cast<std::int32_t>(~static_cast<std::uint32_t>(bits_)); }
  static bool by_token(RowKey a, RowKey b) { return a.token() < b.token(); }
  friend bool operator>(RowKey a, RowKey b) { return a.bits_ > b.bits_; }  // better

 private:
  std::uint64_t bits_;
};

/// softmax of one row in two numbers: the very operations of softmax_row, so the very same probabilities.
struct TokenSoftmax {
  float largest, sum;  // sum is 0 for a token that is not valid

  static TokenSoftmax of(const float* logits, std::int64_t experts) {
    TokenSoftmax softmax{*std::max_element(logits, logits + experts), 0.0f};
    for (std::int64_t e = 0; e < experts; ++e) softmax.sum += std::exp(logits[e] - softmax.largest);
    return softmax;
  }
  bool valid() const { return sum > 0.0f; }
  float operator()(float logit) const { return std::exp(logit - largest) / sum; }
};

constexpr std::int64_t kExpertPanel = 16;  // 64 bytes of fp32 logits: a cache line is used whole

/// Panels of experts: narrower when there are few, so that there are tasks enough.
inline Partition expert_panels(std::int64_t experts) {
  return {experts, std::clamp<std::int64_t>(experts / 16, 1, kExpertPanel)};
}

struct RoundScratch {
  std::int32_t* ids;                                        // (T, K)
  float* chosen_probability;                                // (T, K)
  TokenSoftmax* softmax;                                    // (T)
  std::int32_t *offsets, *row_token, *row_slot, *slot_row;  // lists of the choices before rounding
  RowKey* keys;                                             // (T*K) rows of those lists
  std::int32_t *kept, *need, *added_count;                  // (E)
  std::int64_t added_step;                                  // most rows that an expert can gain
  RowKey* added_keys;                                       // (E, added_step)
  WorkerRows<float> logits;
  WorkerRows<std::uint64_t> rank_keys;
  std::byte* index_workspace;

  RoundScratch(Workspace& workspace, const RoundTokens& op, int workers)
      : ids(workspace.take<std::int32_t>(slots(op))),
        chosen_probability(workspace.take<float>(slots(op))),
        softmax(workspace.take<TokenSoftmax>(op.logits.size(0))),
        offsets(workspace.take<std::int32_t>(op.logits.size(1) + 1)),
        row_token(workspace.take<std::int32_t>(slots(op))),
        row_slot(workspace.take<std::int32_t>(slots(op))),
        slot_row(workspace.take<std::int32_t>(slots(op))),
        keys(workspace.take<RowKey>(slots(op))),
        kept(workspace.take<std::int32_t>(op.logits.size(1))),
        need(workspace.take<std::int32_t>(op.logits.size(1))),
        added_count(workspace.take<std::int32_t>(op.logits.size(1))),
        added_step(std::min(op.tile, op.logits.size(0))),
        added_keys(workspace.take<RowKey>(op.logits.size(1) * added_step)),
        logits(workspace, workers, op.logits.size(1)),
        rank_keys(workspace, workers, top_k_scratch(op.logits.size(1))),
        index_workspace(workspace.take<std::byte>(static_cast<std::int64_t>(workspace_bytes(index(op), workers)))) {}

  /// build_index of the choices.
  BuildIndex index(const RoundTokens& op) const {
    const std::int64_t tokens = op.logits.size(0), k_count = op.experts_per_token;
    return {.ids = {ids, DType::int32, {tokens, k_count}},
            .expert_offsets = {offsets, DType::int32, {op.logits.size(1) + 1}},
            .row_token = {row_token, DType::int32, {tokens * k_count}},
            .row_slot = {row_slot, DType::int32, {tokens * k_count}},
            .slot_row = {slot_row, DType::int32, {tokens, k_count}}};
  }

  RowKey* added(std::int64_t e) const { return added_keys + e * added_step; }

  /// Keeps the `need[e]` best keys offered to expert e.
  void offer(std::int64_t e, RowKey key) const {
    RowKey* const heap = added(e);
    std::int32_t& count = added_count[e];
    if (count == need[e]) {
      if (!(key > heap[0])) return;
      std::pop_heap(heap, heap + count--, std::greater<>());
    }
    heap[count++] = key;
    std::push_heap(heap, heap + count, std::greater<>());
  }

 private:
  static std::int64_t slots(const RoundTokens& op) { return op.logits.size(0) * op.experts_per_token; }
};

}  // namespace intarsia::cpu
