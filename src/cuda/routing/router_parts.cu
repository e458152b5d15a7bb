// part[p] = bfloat16(from - part[0] - ... - part[p - 1]). A warp takes a row, a lane four neighbouring columns at a time.
// Bytes: 4 or 2 a number read, 2 a number and part written.
// Verify: routing_check --only router_logits
#include "cuda/routing/router_parts.h"

#include "cuda/routing/kernel.cuh"

namespace intarsia::cuda {
namespace {

constexpr int kWarps = 8, kLaneColumns = 4;

struct Parts {
  __nv_bfloat16* data;
  std::int64_t row_step, part_step;
  int count;
};

// ---- kernels

/// Grid: kWarps rows a block.
__global__ void __launch_bounds__(kWarps* kWarpSize)
    split_kernel(const AnyRows from, const Parts to, std::int64_t rows, std::int64_t columns, bool whole, std::int32_t* token) {
  const std::int64_t r = std::int64_t{blockIdx.x} * kWarps + warp_index();
  if (r >= rows) return;
  bool any = false;
  for (std::int64_t c = lane_index() * kLaneColumns; c < columns; c += kWarpSize * kLaneColumns) {
    float value[kLaneColumns];
    if (whole) {
      const float4 v = *reinterpret_cast<const float4*>(static_cast<const float*>(from.data) + r * from.row_step + c);
      value[0] = v.x, value[1] = v.y, value[2] = v.z, value[3] = v.w;
    } else {
      for (int i = 0; i < kLaneColumns; ++i) {
        const double wide = c + i < columns ? from.template load<double>(r, c + i) : 0.0;
        any = any || wide != 0.0;  // of a double too small for a float as well
        value[i] = static_cast<float>(wide);
      }
    }
    for (int i = 0; i < kLaneColumns; ++i) any = any || value[i] != 0.0f;
    for (int p = 0; p < to.count; ++p) {
      union {
        uint2 bits;
        __nv_bfloat16 element[kLaneColumns];
      } packed;
      for (int i = 0; i < kLaneColumns; ++i) {
        packed.element[i] = narrow<__nv_bfloat16>(value[i]);
        value[i] -= widen(packed.element[i]);
      }
      __nv_bfloat16* const out = to.data + p * to.part_step + r * to.row_step + c;
      if (c + kLaneColumns <= columns) {
        *reinterpret_cast<uint2*>(out) = packed.bits;
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
  const bool whole = from.dtype == DType::float32 && from.step(1) == 1 && from.step(0) % kLaneColumns == 0 &&
                     columns % kLaneColumns == 0 && reinterpret_cast<std::uintptr_t>(from.data) % 16 == 0;
  launch(operation, split_kernel, blocks(rows, kWarps), kWarps * kWarpSize, stream_of(stream), 0, AnyRows(from), to, rows,
         columns, whole, token);
}

}  // namespace intarsia::cuda
