// From an operation to a launch.
#pragma once

#include <algorithm>
#include <array>
#include <initializer_list>
#include <utility>

#include "cuda/gemm_launch.h"
#include "cuda/sm90/choose.h"
#include "cuda/sm90/kernel.h"
#include "cuda/sm90/weight_maps.h"

namespace intarsia::cuda::sm90 {

inline constexpr GemmConfig kTile256{};
inline constexpr GemmConfig kTile256Pair{.cluster = 2};
inline constexpr GemmConfig kTile256Three{.stages = 3};  // room for z
inline constexpr GemmConfig kTile192PingPong{
    .tile_n = 192, .ping_pong = true, .cluster = 2, .store_tiles = 4, .store_round = 2};
inline constexpr GemmConfig kTile128{.tile_n = 128};
inline constexpr GemmConfig kTile128PingPong{.tile_n = 128, .ping_pong = true, .z_slots = 4};
inline constexpr GemmConfig kTile128PingPongDeep{.tile_n = 128, .stages = 5, .ping_pong = true};

/// Kernels beyond the first of a product exist for bfloat16 alone.
template <class Element>
inline constexpr bool kCommon = std::is_same_v<Element, __nv_bfloat16>;

/// The choice as it is launched: its kernel where the call is of the common kind and the product has that kernel (`others`),
/// else the product's `first`.
inline Choice settled(Choice choice, bool common, Kernel first, std::initializer_list<Kernel> others) {
  if (!common || std::find(others.begin(), others.end(), choice.kernel) == others.end()) choice.kernel = first;
  return choice;
}

template <class Op, class Epilogue>
void launch_gemm(const char* operation, GemmArguments<typename Op::Element>& a, int n_tiles, int device, void* stream) {
  constexpr int kShared = shared_bytes<Op, Epilogue>();
  static_assert(kShared <= 232448, "more shared memory than an SM has");
  ScheduleArguments& s = a.schedule;
  s.n_tiles = n_tiles;
  s.raster.group = std::max(1, s.raster.group / Op::kCluster);
  if constexpr (Op::kWeightGradient) s.m_tiles = static_cast<int>(ceil_div(a.hidden, Op::kTileM * Op::kCluster)) * Op::kCluster;
  const std::int64_t m_tiles = Op::kWeightGradient ? static_cast<std::int64_t>(s.experts) * s.m_tiles
                                                   : most_row_tiles(s.capacity, s.experts, Op::kTileM) + s.experts;
  const std::int64_t clusters =
      persistent_grid(operation, m_tiles * n_tiles, device_figures(device).multiprocessors / Op::kCluster);
  if (clusters == 0) return;
  constexpr auto kKernel = &gemm_kernel<Op, Epilogue>;
  allow_shared<kKernel>(device, kShared);

  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(clusters * Op::kCluster));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kShared;
  config.stream = stream_of(stream);
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;  // the kernel waits for its predecessor itself
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {Op::kCluster, 1, 1};
  config.attrs = attributes;
  config.numAttrs = Op::kCluster > 1 ? 2 : 1;
  check(cudaLaunchKernelEx(&config, kKernel, a), operation);
}

/// Arguments with what every product has; launch_gemm fills in the schedule's tiles.
template <class Element>
GemmArguments<Element> gemm_arguments(const ScheduleArguments& schedule) {
  GemmArguments<Element> a = {};
  a.schedule = schedule;
  a.right_block = a.store_block = std::numeric_limits<int>::max();
  a.grad_scale = 1.0f;
  return a;
}

template <class Element>
GemmArguments<Element> gemm_arguments(const TensorView& expert_offsets, std::int64_t rows, const Raster& raster) {
  return gemm_arguments<Element>(
      {list(expert_offsets), static_cast<int>(expert_offsets.size(0) - 1), static_cast<int>(rows), 0, 0, raster});
}

/// body(element) for bfloat16 and float16.
template <class Body>
void dispatch_half(DType dtype, Body&& body) {
  if (dtype == DType::float16) body(Tag<__half>{});
  else body(Tag<__nv_bfloat16>{});
}

}  // namespace intarsia::cuda::sm90
