// What makes one GEMM operation of the six: where its operands come from and how its tile leaves. One struct per kernel
// instance.
#pragma once

#include "cuda/sm90/config.h"

namespace intarsia::cuda::sm90 {

enum class Left {
  gathered_rows,    ///< rows of x or dy by token, K-major, cp.async
  rows,             ///< rows of a buffer, K-major, TMA
  gathered_along_k  ///< columns of x or dy, k is the expert's rows: MN-major, cp.async
};

enum class Right {
  rows,          ///< K-major weights
  panels,        ///< MN-major weights
  ragged_panels  ///< MN-major rows of an expert, zeros past its end
};

/// Where the two halves [gate, up] of a gated operation lie; each half has its own tensor map.
enum class Halves {
  none,
  stacked,        ///< up_forward: the tile's first half of columns is the gate's, the second the up's
  along_k,        ///< up_backward: k runs over gate, then up
  along_k_three,  ///< the router: an fp32 operand enters as 16-bit parts, k runs over three pairs of operands
  along_n         ///< up_weight_backward: n runs over gate panels, then up panels
};

template <class Element_, GemmConfig kConfig_, Left kLeft_, Right kRight_, Halves kHalves_>
struct Operands {
  using Element = Element_;
  static constexpr GemmConfig kConfig = kConfig_;
  static constexpr Left kLeft = kLeft_;
  static constexpr Right kRight = kRight_;
  static constexpr Halves kHalves = kHalves_;

  static constexpr int kTileM = kConfig.tile_m, kTileN = kConfig.tile_n, kStages = kConfig.stages, kCluster = kConfig.cluster;
  static constexpr bool kPingPong = kConfig.ping_pong;
  static constexpr bool kWeightGradient = kLeft == Left::gathered_along_k;
  static constexpr bool kLeftMnMajor = kLeft == Left::gathered_along_k;
  static constexpr bool kRightMnMajor = kRight != Right::rows;
  /// The right map is in blocks of gate and up rows (Weights::gate_block).
  static constexpr bool kBlocked =
      (kHalves == Halves::stacked && !kRightMnMajor) || (kHalves == Halves::along_k && kRightMnMajor);
  static constexpr bool kGathered = kLeft != Left::rows;
  static constexpr int kPartsOfK = kHalves == Halves::along_k ? 2 : kHalves == Halves::along_k_three ? 3 : 1;

  /// m64 blocks that one warpgroup accumulates.
  static constexpr int kBlocksM = kPingPong ? kTileM / 64 : kTileM / 64 / kConsumers;
  static constexpr int kLeftBytes = kTileM * kTileK * 2, kRightBytes = kTileN * kTileK * 2,
                       kStageBytes = kLeftBytes + kRightBytes;
  static constexpr int kProducerRegisters = kGathered ? 56 : 40, kConsumerRegisters = kGathered ? 224 : 232;

  static_assert(sizeof(Element) == 2 && (kCluster == 1 || kCluster == 2) && kTileN % 64 == 0 && kTileM == 128);
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= 504, "65536 registers over 384 threads");

  using Accumulators = float[kBlocksM][kTileN / 2];
};

}  // namespace intarsia::cuda::sm90
