// How the CPU backend cuts the layer's work: pure arithmetic, shared by the plan and by src/cpu.
#pragma once

#include <cstddef>
#include <cstdint>

#include "intarsia/plan.h"

namespace intarsia {

struct CpuBlocking {
  std::int64_t block_rows;       ///< rows of one (expert, block) task
  std::int64_t chunk_rows;       ///< rows of one chunk of tokens: what `rows` and `dx_rows` hold; at least one token's most
  std::int64_t segment_entries;  ///< int32 entries that say which rows of each expert belong to a chunk
  std::size_t scratch_bytes;     ///< scratch of one worker in layer_forward and layer_backward, aligned to 256
};

CpuBlocking cpu_blocking(const LayerShape&);

}  // namespace intarsia
