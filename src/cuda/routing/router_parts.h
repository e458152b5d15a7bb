// Rows of 32 or 16 bits as sums of bfloat16 parts, for products on 16-bit tensor cores.
#pragma once

#include <cstdint>

#include "intarsia/types.h"

namespace intarsia::cuda {

/// Bytes of `parts` parts of (rows, columns): each row begins at a multiple of 16 bytes.
std::size_t parts_bytes(std::int64_t rows, std::int64_t columns, int parts);

/// part[p] (rows, columns) bfloat16, each what is left of `from` (any floating type) after the parts before it: three are
/// an fp32 exactly, two have 16 bits of it; 0 to make none. They lie in `memory`. token, when not null: row r's own number, or
/// -1 where the whole row is zero.
void split_rows(const char* operation, const TensorView& from, int parts, void* memory, TensorView* part, std::int32_t* token,
                void* stream);

}  // namespace intarsia::cuda
