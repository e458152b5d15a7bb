// build_index: the four lists of the dispatch from ids (T, K). An id outside [0, E), or any id of a masked token, has no row.
// expert_offsets (E+1), row_token (R), row_slot (R), slot_row (T, K), expert_counts (E); row entries past the last row are -1.
// Verify: intarsia-ops verify build_index                                                              (MoEBlaze, section 4)
#include "reference/expert.h"
#include "reference/reference.h"

namespace intarsia::reference {

void run(const BuildIndex& op, const Execution&) {
  const std::int64_t experts = expert_count(op.expert_offsets), k_count = op.ids.size(1);
  std::vector<std::vector<std::int64_t>> slots(static_cast<std::size_t>(experts));  // of each expert, ascending
  for (std::int64_t t = 0; t < op.ids.size(0); ++t) {
    if (op.token_mask.defined() && load(op.token_mask, t) == 0) continue;
    for (std::int64_t k = 0; k < k_count; ++k) {
      const std::int64_t e = load_integer(op.ids, t, k);
      if (e >= 0 && e < experts) slots[static_cast<std::size_t>(e)].push_back(t * k_count + k);
    }
  }

  fill(op.row_token, -1);
  fill(op.row_slot, -1);
  fill(op.slot_row, -1);
  std::int64_t row = 0;
  for (std::int64_t e = 0; e < experts; ++e) {
    store(op.expert_offsets, static_cast<double>(row), e);
    if (op.expert_counts.defined()) store(op.expert_counts, static_cast<double>(slots[static_cast<std::size_t>(e)].size()), e);
    for (const std::int64_t slot : slots[static_cast<std::size_t>(e)]) {
      store(op.row_token, static_cast<double>(slot / k_count), row);
      store(op.row_slot, static_cast<double>(slot), row);
      store(op.slot_row, static_cast<double>(row), slot / k_count, slot % k_count);
      ++row;
    }
  }
  store(op.expert_offsets, static_cast<double>(row), experts);
}

}  // namespace intarsia::reference
