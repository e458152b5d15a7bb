#include "cpu/blocks.h"

#include <algorithm>
#include <cstring>

#include "cpu/gemm.h"
#include "cpu/row_io.h"

namespace intarsia::cpu {

Scratch::Scratch(std::byte* memory, const CpuBlocking& blocking, int worker) {
  left = memory + static_cast<std::size_t>(worker) * blocking.scratch_bytes;
  right = left + blocking.left_bytes;
  product = reinterpret_cast<float*>(right + blocking.right_bytes);
  packing = right + blocking.right_bytes + blocking.product_bytes;
}

void gather(const TensorView& source, const std::int32_t* row_token, const RowBlock& block, std::byte* to) {
  const std::int64_t columns = source.size(1);
  const auto bytes = static_cast<std::size_t>(columns) * size_of(source.dtype);
  dispatch_element(source.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for (std::int64_t i = 0; i < block.count; ++i) {
      const std::int64_t row = row_token ? row_token[block.first + i] : block.first + i;
      const T* from = source.as<const T>() + row * source.step(0);
      T* out = reinterpret_cast<T*>(to) + i * columns;
      if (source.step(1) == 1) std::memcpy(out, from, bytes);
      else
        for (std::int64_t j = 0; j < columns; ++j) out[j] = from[j * source.step(1)];
    }
  });
  const auto used = static_cast<std::size_t>(block.count), all = static_cast<std::size_t>(padded(block.count));
  std::memset(to + used * bytes, 0, (all - used) * bytes);
}

TensorView scratch_rows(std::byte* memory, DType dtype, std::int64_t rows, std::int64_t columns) {
  return TensorView(memory, dtype, {rows, columns});
}

TensorView rows_from(const TensorView& v, std::int64_t first, std::int64_t count) {
  TensorView part = v;
  part.data = static_cast<std::byte*>(v.data) + first * v.step(0) * static_cast<std::int64_t>(size_of(v.dtype));
  part.shape[0] = count;
  return part;
}

void zero_rows_from(const TensorView& v, std::int64_t first) {
  const std::size_t bytes = static_cast<std::size_t>(v.size(1)) * size_of(v.dtype);
  for (std::int64_t r = first; r < v.size(0); ++r) std::memset(rows_from(v, r, 1).data, 0, bytes);
}

}  // namespace intarsia::cpu
