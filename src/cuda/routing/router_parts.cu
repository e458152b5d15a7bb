// part[p] = bfloat16(from - part[0] - ... - part[p - 1]). A warp takes a row, a lane four neighbouring columns at a time.
// Bytes: 4 or 2 a number read, 2 a number and part written.
// Verify: routing_check --only router_logits
#include "cuda/routing/router_parts.h"

#include "cuda/routing/vector.cuh"

namespace intarsia::cuda {
namespace {

constexpr int kWarps = 8, kLaneColumns = 4;

struct Parts {
  __nv_bfloat16* data;
  std::int64_t row_step, part_step;
  int count;
};

// ---- kernels

/// Grid: kWarps rows a block. `whole`: four columns are aligned and contiguous.
template <class T>
__global__ void __launch_bounds__(kWarps* kWarpSize)
    split_kernel(const Rows<const T> from, const Parts to, std::int64_t rows, int columns, bool whole, std::int32_t* token) {
  const std::int64_t r = std::int64_t{blockIdx.x} * kWarps + warp_index();
  if (r >= rows) return;
  bool any = false;
  for (int c = lane_index() * kLaneColumns; c < columns; c += kWarpSize * kLaneColumns) {
    float value[kLaneColumns] = {};
    if (whole) {
      if constexpr (sizeof(T) <= sizeof(float)) {
        Vector<T, kLaneColumns> v;
        v.load(from.at(r, c));
        for (int i = 0; i < kLaneColumns; ++i) value[i] = v[i];
      }
    } else {
      for (int i = 0; i < kLaneColumns; ++i) {
        if (c + i >= columns) continue;
        const Wide<T> wide = widen(*from.at(r, c + i));
        any = any || wide != 0;  // of a double too small for a float as well
        value[i] = static_cast<float>(wide);
      }
    }
    for (int i = 0; i < kLaneColumns; ++i) any = any || value[i] != 0.0f;
    for (int p = 0; p < to.count; ++p) {
      Vector<__nv_bfloat16, kLaneColumns> packed;
      for (int i = 0; i < kLaneColumns; ++i) {
        packed.set(i, value[i]);
        value[i] -= packed[i];
      }
      __nv_bfloat16* const out = to.data + p * to.part_step + r * to.row_step + c;
      if (c + kLaneColumns <= columns) {
        packed.store(out);
      } else {
#pragma unroll
        for (int i = 0; i < kLaneColumns; ++i)
          if (c + i < columns) out[i] = packed.element[i];
      }
    }
  }
  if (token == nullptr) return;
  any = __any_sync(kAllLanes, any);
  if (lane_index() == 0) token[r] = any ? static_cast<std::int32_t>(r) : -1;
}

std::int64_t padded(std::int64_t columns) { return ceil_div(columns, 8) * 8; }

}  // namespace

// ---- launchers

std::size_t parts_bytes(std::int64_t rows, std::int64_t columns, int parts) {
  return align_up(static_cast<std::size_t>(rows * padded(columns) * parts) * 2);
}

void split_rows(const char* operation, const TensorView& from, int parts, void* memory, TensorView* part, std::int32_t* token,
                void* stream) {
  const std::int64_t rows = from.size(0), columns = from.size(1);
  const Parts to{static_cast<__nv_bfloat16*>(memory), padded(columns), rows * padded(columns), parts};
  for (int p = 0; p < parts; ++p) {
    part[p] = TensorView(to.data + p * to.part_step, DType::bfloat16, {rows, columns}, from.device);
    part[p].stride[0] = to.row_step;
  }
  const std::size_t size = size_of(from.dtype);
  const bool whole = size <= sizeof(float) && from.step(1) == 1 && from.step(0) % kLaneColumns == 0 &&
                     columns % kLaneColumns == 0 && reinterpret_cast<std::uintptr_t>(from.data) % (kLaneColumns * size) == 0;
  dispatch_device_float(from.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch(operation, split_kernel<T>, blocks(rows, kWarps), kWarps * kWarpSize, stream_of(stream), 0, Rows<const T>(from), to,
           rows, static_cast<int>(columns), whole, token);
  });
}

}  // namespace intarsia::cuda
