// build_index: the four lists of the dispatch from ids (T, K), without a sort and without atomics on global memory: count the
// slots of each expert in each tile of slots; scan the (tiles, E) counts; rank inside the tile and write. Stable.
// expert_offsets (E+1), row_token (R), row_slot (R), slot_row (T, K), expert_counts (E); row entries past the last row are -1.
// Three launches. Moves 2 T*K ids, 3 T*K list entries and 3 tiles*E counts. Workspace: the counts and their totals.
// Any E (panels of 1024 experts), any K, T*K < 2^31; ids outside [0, E) and masked tokens have no row.
// Verify: intarsia-ops verify build_index                                                              (MoEBlaze, section 4)
#include "cuda/routing/index_tiles.cuh"

namespace intarsia::cuda {
namespace {

struct Lists {
  const std::int32_t *counts, *totals;
  std::int32_t *expert_offsets, *row_token, *row_slot, *slot_row, *expert_counts;  // the last: null when not wanted
  std::int64_t row_token_size, row_slot_size;
};

// ---- kernels

/// First rows of the panel's experts in this tile -> start[]; the rows of all experts are returned. Block 0 of a panel writes
/// offsets and counts.
__device__ int start_rows(const IndexTiles& tiles, const Lists& lists, int first_expert, int panel,
                          int (&start)[kExpertPanel]) {
  constexpr int kEach = kExpertPanel / kIndexThreads;
  int before = 0, all = 0;
  for (int e = threadIdx.x; e < tiles.experts; e += kIndexThreads) {
    const int total = lists.totals[e];
    all += total;
    before += e < first_expert ? total : 0;
  }
  before = block_reduce<kIndexWarps>(before, Add{});
  all = block_reduce<kIndexWarps>(all, Add{});

  int total[kEach], sum = 0, panel_rows;
  for (int i = 0; i < kEach; ++i) {
    const int place = static_cast<int>(threadIdx.x) * kEach + i;
    total[i] = place < panel ? lists.totals[first_expert + place] : 0;
    sum += total[i];
  }
  before += block_exclusive_scan<kIndexWarps>(sum, panel_rows);
  const std::int32_t* const earlier = lists.counts + std::int64_t{blockIdx.x} * tiles.experts + first_expert;
  for (int i = 0; i < kEach; ++i) {
    const int place = static_cast<int>(threadIdx.x) * kEach + i;
    if (place < panel) {
      start[place] = before + earlier[place];
      if (blockIdx.x == 0) {
        lists.expert_offsets[first_expert + place] = before;
        if (lists.expert_counts) lists.expert_counts[first_expert + place] = total[i];
      }
    }
    before += total[i];
  }
  if (blockIdx.x == 0 && threadIdx.x == 0 && first_expert + panel == tiles.experts) lists.expert_offsets[tiles.experts] = all;
  return all;
}

/// Grid (tiles, panels). Each warp takes a contiguous share of the tile, so that order is kept.
__global__ void __launch_bounds__(kIndexThreads)
    rank_kernel(const __grid_constant__ Slots slots, const __grid_constant__ Lists lists) {
  __shared__ int start[kExpertPanel];
  __shared__ int next[kIndexWarps][kExpertPanel];  // counts of a warp's share, then the next row of each expert in it
  const IndexTiles& tiles = slots.tiles;
  const int first_expert = static_cast<int>(blockIdx.y) * kExpertPanel, panel = min(kExpertPanel, tiles.experts - first_expert);
  const int w = warp_index(), share = tiles.tile / kIndexWarps;
  const std::int64_t first = std::int64_t{blockIdx.x} * tiles.tile + w * share;
  const std::int64_t last = min(first + share, static_cast<std::int64_t>(tiles.slots));

  for (int i = threadIdx.x; i < panel; i += kIndexThreads)
    for (int other = 0; other < kIndexWarps; ++other) next[other][i] = 0;
  const int rows = start_rows(tiles, lists, first_expert, panel, start);
  __syncthreads();
#pragma unroll 4
  for (std::int64_t slot = first + lane_index(); slot < last; slot += kWarpSize) {
    const int i = slots.expert(slot) - first_expert;
    if (i >= 0 && i < panel) atomicAdd(&next[w][i], 1);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < panel; i += kIndexThreads) {
    int row = start[i];
    for (int other = 0; other < kIndexWarps; ++other) {
      const int count = next[other][i];
      next[other][i] = row;
      row += count;
    }
  }
  __syncthreads();

  const auto expert = [&](std::int64_t slot) { return slot < last ? slots.expert(slot) : -1; };
  int following = expert(first + lane_index());
  for (std::int64_t base = first; base < last; base += kWarpSize) {
    const std::int64_t slot = base + lane_index();
    const int e = following, i = e - first_expert;
    following = expert(slot + kWarpSize);  // while this one is ranked
    const bool here = e >= 0 && i >= 0 && i < panel;
    const unsigned peers = __match_any_sync(kAllLanes, here ? i : -1);
    const int row = here ? next[w][i] + __popc(peers & lanes_below()) : -1;
    __syncwarp();
    if (here && (peers & lanes_below()) == 0) next[w][i] += __popc(peers);
    __syncwarp();
    if (here) {
      lists.row_token[row] = static_cast<std::int32_t>(static_cast<unsigned>(slot) / static_cast<unsigned>(tiles.k_count));
      lists.row_slot[row] = static_cast<std::int32_t>(slot);
    }
    if (here || (e < 0 && blockIdx.y == 0 && slot < last)) lists.slot_row[slot] = row;
  }

  const std::int64_t thread = (std::int64_t{blockIdx.y} * gridDim.x + blockIdx.x) * kIndexThreads + threadIdx.x;
  const std::int64_t threads = std::int64_t{gridDim.x} * gridDim.y * kIndexThreads;
  for (std::int64_t r = rows + thread; r < lists.row_token_size; r += threads) lists.row_token[r] = -1;
  for (std::int64_t r = rows + thread; r < lists.row_slot_size; r += threads) lists.row_slot[r] = -1;
}

// ---- launchers

IndexTiles tiles_of(const BuildIndex& op) { return {op.ids.size(0), op.ids.size(1), op.expert_offsets.size(0) - 1}; }

struct Scratch {
  std::int32_t *counts, *totals;
  Scratch(Workspace& workspace, const IndexTiles& tiles)
      : counts(workspace.take<std::int32_t>(tiles.cells())), totals(workspace.take<std::int32_t>(tiles.experts)) {}
};

}  // namespace

std::size_t workspace_bytes(const BuildIndex& op) {
  Workspace workspace;
  const Scratch scratch(workspace, tiles_of(op));
  return workspace.bytes();
}

std::string explain(const BuildIndex& op) {
  const IndexTiles tiles = tiles_of(op);
  return "cuda: count, scan, rank in three launches; " + std::to_string(tiles.count) + " tiles of " +
         std::to_string(tiles.tile) + " slots, " + std::to_string(tiles.panels) + " panels of experts";
}

void run(const BuildIndex& op, const Execution& execution) {
  const DeviceGuard guard(op.ids.device.index);
  const cudaStream_t stream = stream_of(execution.stream);
  Workspace workspace(execution.workspace);
  const Slots slots{op.ids, op.token_mask, tiles_of(op)};
  const Scratch scratch(workspace, slots.tiles);
  launch_count(BuildIndex::kName, slots, scratch.counts, scratch.totals, stream);
  const Lists lists{scratch.counts,
                    scratch.totals,
                    op.expert_offsets.as<std::int32_t>(),
                    op.row_token.as<std::int32_t>(),
                    op.row_slot.as<std::int32_t>(),
                    op.slot_row.as<std::int32_t>(),
                    op.expert_counts.defined() ? op.expert_counts.as<std::int32_t>() : nullptr,
                    op.row_token.size(0),
                    op.row_slot.size(0)};
  launch(BuildIndex::kName, rank_kernel, slots.tiles.grid(), kIndexThreads, stream, 0, slots, lists);
}

}  // namespace intarsia::cuda
