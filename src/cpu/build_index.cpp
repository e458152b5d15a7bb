// build_index: the four lists of the dispatch from ids (T, K), in three passes over tiles of tokens: count the slots of each
// expert in each tile; turn the (tiles, E) counts into first rows; rank inside the tile and write. Stable, O(T*K), no atomics.
// expert_offsets (E+1), row_token (R), row_slot (R), slot_row (T, K), expert_counts (E); row entries past the last row are -1.
// Workspace: the counts, at most T*K/4 + E of them.
// Verify: intarsia-ops verify build_index                                                              (MoEBlaze, section 4)
#include <algorithm>
#include <functional>

#include "base/dispatch.h"
#include "base/parallel.h"
#include "base/rows.h"
#include "cpu/cpu.h"
#include "cpu/partition.h"
#include "cpu/token_mask.h"
#include "cpu/workspace.h"

namespace intarsia::cpu {
namespace {

/// A tile holds at least 4 * E slots, so that its counts are few beside them, and at least 4096, so that a task is worth
/// starting.
Partition token_tiles(const TensorView& ids, std::int64_t experts) {
  return {ids.size(0), std::max<std::int64_t>(4096, 4 * experts) / std::max<std::int64_t>(1, ids.size(1)) + 1};
}

std::int64_t experts_of(const BuildIndex& op) { return op.expert_offsets.size(0) - 1; }

/// body(slot, token, k, expert) for each slot of a tile that has a row, in order.
template <class Id, class Body>
void for_each_routed_slot(const BuildIndex& op, std::int64_t first, std::int64_t last, Body&& body) {
  const auto experts = static_cast<std::uint64_t>(experts_of(op));
  const std::int64_t slots = op.ids.size(1), step = op.ids.step(1);
  const TokenMask mask(op.token_mask);
  for (std::int64_t t = first; t < last; ++t) {
    if (!mask(t)) continue;
    const Id* id = op.ids.as<const Id>() + t * op.ids.step(0);
    for (std::int64_t k = 0; k < slots; ++k) {
      const auto e = static_cast<std::uint64_t>(static_cast<std::int64_t>(id[k * step]));  // a negative id becomes a huge one
      if (e < experts) body(t * slots + k, t, k, e);
    }
  }
}

/// counts (tiles, E) -> the first row of each expert in each tile; fills expert_offsets.
void scan(std::int32_t* counts, std::int64_t tiles, std::int64_t experts, std::int32_t* offsets) {
  std::fill_n(offsets, experts + 1, 0);
  for (std::int64_t tile = 0; tile < tiles; ++tile) {
    std::int32_t* count = counts + tile * experts;
    for (std::int64_t e = 0; e < experts; ++e) {
      const std::int32_t before = offsets[e + 1];
      offsets[e + 1] += count[e];
      count[e] = before;
    }
  }
  for (std::int64_t e = 0; e < experts; ++e) offsets[e + 1] += offsets[e];
}

template <class Id>
void build(const BuildIndex& op, std::int32_t* counts, int workers) {
  const std::int64_t experts = experts_of(op), slots = op.ids.size(1);
  const Partition tiles = token_tiles(op.ids, experts);
  auto* const offsets = op.expert_offsets.as<std::int32_t>();
  auto* const row_token = op.row_token.as<std::int32_t>();
  auto* const row_slot = op.row_slot.as<std::int32_t>();

  parallel_for(tiles.count, workers, [&](std::int64_t tile, int) {
    std::int32_t* count = counts + tile * experts;
    std::fill_n(count, experts, 0);
    for_each_routed_slot<Id>(op, tiles.first(tile), tiles.last(tile), [&](auto, auto, auto, std::uint64_t e) { ++count[e]; });
  });
  scan(counts, tiles.count, experts, offsets);
  if (op.expert_counts.defined())
    std::transform(offsets + 1, offsets + experts + 1, offsets, op.expert_counts.as<std::int32_t>(), std::minus<>());
  parallel_for(tiles.count, workers, [&](std::int64_t tile, int) {
    std::int32_t* next = counts + tile * experts;
    for (std::int64_t e = 0; e < experts; ++e) next[e] += offsets[e];
    for (std::int64_t t = tiles.first(tile); t < tiles.last(tile); ++t)
      for (std::int64_t k = 0; k < slots; ++k) *at<std::int32_t>(op.slot_row, t, k) = -1;
    for_each_routed_slot<Id>(op, tiles.first(tile), tiles.last(tile),
                             [&](std::int64_t slot, std::int64_t t, std::int64_t k, std::uint64_t e) {
                               const std::int32_t row = next[e]++;
                               row_token[row] = static_cast<std::int32_t>(t);
                               row_slot[row] = static_cast<std::int32_t>(slot);
                               *at<std::int32_t>(op.slot_row, t, k) = row;
                             });
  });
  std::fill(row_token + offsets[experts], row_token + op.row_token.size(0), -1);
  std::fill(row_slot + offsets[experts], row_slot + op.row_slot.size(0), -1);
}

std::int32_t* take_counts(Workspace& workspace, const BuildIndex& op) {
  return workspace.take<std::int32_t>(token_tiles(op.ids, experts_of(op)).count * experts_of(op));
}

}  // namespace

std::size_t workspace_bytes(const BuildIndex& op, int) {
  Workspace workspace;
  take_counts(workspace, op);
  return workspace.bytes();
}

void run(const BuildIndex& op, const Execution& execution) {
  Workspace workspace(execution.workspace);
  std::int32_t* const counts = take_counts(workspace, op);
  dispatch_index(op.ids.dtype, [&](auto tag) { build<typename decltype(tag)::type>(op, counts, execution.workers); });
}

}  // namespace intarsia::cpu
