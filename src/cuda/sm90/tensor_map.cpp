#include "cuda/sm90/tensor_map.h"

#include <algorithm>
#include <string>

#include "cuda/launch.h"

namespace intarsia::cuda::sm90 {
namespace {

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/// From the driver that is loaded, so that nothing links libcuda.
Encode encoder() {
  static const Encode function = [] {
    void* pointer = nullptr;
    cudaDriverEntryPointQueryResult found{};
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &pointer, 12000, cudaEnableDefault, &found),
          "cudaGetDriverEntryPointByVersion");
    if (pointer == nullptr) throw Unsupported("the CUDA driver has no cuTensorMapEncodeTiled; update it to 525 or later");
    return reinterpret_cast<Encode>(pointer);
  }();
  return function;
}

CUtensorMapDataType type_of(DType dtype) {
  switch (dtype) {
    case DType::bfloat16: return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case DType::float16: return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    default: return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  }
}

CUtensorMap encode(const void* data, DType dtype, const cuuint64_t (&dims)[4], const cuuint64_t (&strides)[3],
                   const cuuint32_t (&box)[4]) {
  CUtensorMap map;
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const CUresult result =
      encoder()(&map, type_of(dtype), 4, const_cast<void*>(data), dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw Error("cuTensorMapEncodeTiled failed with code " + std::to_string(static_cast<int>(result)));
  return map;
}

}  // namespace

CUtensorMap make_map(const RowsMap& r) {
  constexpr cuuint64_t kFold = 0x7fff0000u, kWrap = cuuint64_t{1} << 34;
  const auto row = static_cast<cuuint64_t>(r.step) * size_of(r.dtype);
  return encode(r.data, r.dtype, {static_cast<cuuint64_t>(r.columns), kRaggedRows, kFold, kFold}, {row, kWrap - row, row},
                {static_cast<cuuint32_t>(r.box_columns), static_cast<cuuint32_t>(r.box_rows), 1, 1});
}

CUtensorMap make_map(const MatricesMap& m) {
  const auto bytes = [&](std::int64_t step) { return static_cast<cuuint64_t>(step) * size_of(m.dtype); };
  const std::int64_t rows = std::min<std::int64_t>(m.block, m.box_rows), blocks = m.box_rows / rows;
  const bool blocked = m.block < m.outer;
  // A dimension of one block still needs a stride that the encoder accepts; any multiple of 16 will do.
  return encode(
      m.data, m.dtype,
      {static_cast<cuuint64_t>(m.inner), static_cast<cuuint64_t>(m.block), static_cast<cuuint64_t>(ceil_div(m.outer, m.block)),
       static_cast<cuuint64_t>(m.experts)},
      {bytes(m.row_step), bytes(blocked ? m.block_step : m.row_step), bytes(m.experts > 1 ? m.expert_step : m.row_step)},
      {static_cast<cuuint32_t>(m.box_inner), static_cast<cuuint32_t>(blocked ? rows : m.box_rows),
       static_cast<cuuint32_t>(blocked ? blocks : 1), 1});
}

}  // namespace intarsia::cuda::sm90
