#include "cuda/sm90/tensor_map.h"

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

}  // namespace

CUtensorMap encode(const MapLayout& m) {
  static_assert(sizeof(cuuint64_t) == sizeof(m.dims[0]) && sizeof(cuuint32_t) == sizeof(m.box[0]));
  // Not the caller's temporary: g++ 12 may put that at a multiple of 16, and the encoder wants one of 64.
  static thread_local CUtensorMap map;
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const CUresult result = encoder()(&map, type_of(m.dtype), 4, const_cast<void*>(m.data), m.dims, m.strides, m.box, steps,
                                    CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                    CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw Error("cuTensorMapEncodeTiled failed with code " + std::to_string(static_cast<int>(result)));
  return map;
}

}  // namespace intarsia::cuda::sm90
