// Choosing the rows of one expert, without ordering them: the `target` tokens of largest key, equal keys by the lowest token.
// A radix selection finds the key at the border, 11 bits of it at a time; then every token's fate is a comparison.
#pragma once

#include "cuda/routing/round_keys.cuh"

namespace intarsia::cuda {

constexpr int kSelectWarps = 32, kSelectThreads = kSelectWarps * kWarpSize;
constexpr int kRadixBits = 11, kRadixBins = 1 << kRadixBits;

/// The rows are the tokens whose key is above `key`, and the first `ties` tokens that equal it.
template <class Key>
struct Border {
  Key key;
  int ties;
};

/// The bin in which the running sum from the highest bin down reaches `wanted`; `above`: the sum of the bins above it.
static __device__ int find_bin(const int (&histogram)[kRadixBins], int wanted, int& above) {
  __shared__ int found_bin, found_above;
  constexpr int kEach = kRadixBins / kSelectThreads;
  int count[kEach], sum = 0, total;
  for (int i = 0; i < kEach; ++i) sum += count[i] = histogram[kRadixBins - 1 - (static_cast<int>(threadIdx.x) * kEach + i)];
  int before = block_exclusive_scan<kSelectWarps>(sum, total);
  for (int i = 0; i < kEach; ++i) {
    if (before < wanted && before + count[i] >= wanted) {
      found_bin = kRadixBins - 1 - (static_cast<int>(threadIdx.x) * kEach + i);
      found_above = before;
    }
    before += count[i];
  }
  __syncthreads();
  above = found_above;
  return found_bin;
}

/// By all threads of a block. 0 < target < the number of keys that are not 0.
template <class Key>
__device__ Border<Key> find_border(const Key* keys, std::int64_t count, int target) {
  __shared__ int histogram[kRadixBins];
  Key prefix = 0, known = 0;
  int wanted = target;
  for (int top = 8 * sizeof(Key); top > 0;) {
    const int bits = min(kRadixBits, top), shift = top - bits;
    __syncthreads();
    for (int i = threadIdx.x; i < kRadixBins; i += kSelectThreads) histogram[i] = 0;
    __syncthreads();
#pragma unroll 4
    for (std::int64_t i = threadIdx.x; i < count; i += kSelectThreads) {
      const Key key = keys[i];
      if ((key & known) == prefix) atomicAdd(&histogram[static_cast<int>(key >> shift) & ((1 << bits) - 1)], 1);
    }
    __syncthreads();
    int above;
    const auto bin = static_cast<Key>(find_bin(histogram, wanted, above));
    wanted -= above;
    prefix |= bin << shift;
    known |= static_cast<Key>((Key{1} << bits) - 1) << shift;
    top = shift;
  }
  return {prefix, wanted};
}

/// What an expert's rows become in the lists, 32 tokens (a word) at a time.
struct RowWords {
  std::uint32_t* kept;      // (words, E): bit i of word w: token 32 w + i is a row
  std::int32_t* first_row;  // (words, E): the row of the first of them
};

/// A block takes an expert of the panel. Each warp takes a contiguous share of the words.
template <class S>
static __global__ void __launch_bounds__(kSelectThreads)
    select_kernel(const OrderKey<S>* keys, std::int64_t pitch, int first_expert, int experts, const std::int32_t* counts,
                  const std::int32_t* targets, const std::int32_t* valid_tokens, const std::int32_t* expert_offsets,
                  RowWords words, std::int32_t* row_token, S* row_score) {
  using Key = OrderKey<S>;
  __shared__ int above_of_warp[kSelectWarps], ties_of_warp[kSelectWarps];
  const int e = first_expert + static_cast<int>(blockIdx.x), lane = lane_index(), w = warp_index();
  const Key* const column = keys + blockIdx.x * pitch;
  const int target = targets[e], chosen = counts[e];

  Border<Key> border{static_cast<Key>(RoundKey<S>::kChosen - 1), 0};  // target == chosen: the choices are the rows
  if (target == 0) border = {static_cast<Key>(~Key{0}), 0};
  else if (target >= *valid_tokens) border = {0, 0};
  else if (target != chosen) border = find_border(column, pitch, target);

  const int word_count = static_cast<int>(pitch / kWarpSize), share = (word_count + kSelectWarps - 1) / kSelectWarps;
  const int first = min(w * share, word_count), last = min(first + share, word_count);
  int above = 0, ties = 0;
#pragma unroll 4
  for (int word = first; word < last; ++word) {
    const Key key = column[std::int64_t{word} * kWarpSize + lane];
    above += __popc(__ballot_sync(kAllLanes, key > border.key));
    ties += __popc(__ballot_sync(kAllLanes, key == border.key));
  }
  if (lane == 0) above_of_warp[w] = above, ties_of_warp[w] = ties;
  __syncthreads();
  above = ties = 0;
  for (int other = 0; other < w; ++other) above += above_of_warp[other], ties += ties_of_warp[other];

  const int offset = expert_offsets[e];
#pragma unroll 2
  for (int word = first; word < last; ++word) {
    const Key key = column[std::int64_t{word} * kWarpSize + lane];
    const unsigned equal = __ballot_sync(kAllLanes, key == border.key);
    const bool keep = key > border.key || (key == border.key && ties + __popc(equal & lanes_below()) < border.ties);
    const unsigned kept = __ballot_sync(kAllLanes, keep);
    const int row = offset + above + min(ties, border.ties);
    if (lane == 0) {
      words.kept[std::int64_t{word} * experts + e] = kept;
      words.first_row[std::int64_t{word} * experts + e] = row;
    }
    if (keep) {
      const int mine = row + __popc(kept & lanes_below());
      row_token[mine] = word * kWarpSize + lane;
      row_score[mine] = RoundKey<S>::probability(key);
    }
    above += __popc(__ballot_sync(kAllLanes, key > border.key));
    ties += __popc(equal);
  }
}

}  // namespace intarsia::cuda
