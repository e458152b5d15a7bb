// The shape of one kernel: tile, pipeline, roles. A struct as a template argument, so that it shows in profiler names.
#pragma once

namespace intarsia::cuda::sm90 {

struct GemmConfig {
  int tile_m = 128;
  int tile_n = 256;
  int stages = 4;          ///< depth of the operand pipeline, 64 k each
  bool ping_pong = false;  ///< the two consumer warpgroups take whole tiles in turn, else half a tile each
  int cluster = 1;         ///< CTAs along m that share the right operand by multicast
  int store_tiles = 2;     ///< 64 x 64 staging tiles of a warpgroup for its stores
  int store_round = 1;     ///< of them, how many are written between two barriers
  int z_slots = 2;  ///< down_backward: ring of z pieces, each a gate and an up tile; a ring a warpgroup, or one in ping-pong
};

/// What one launch adds: how tiles follow one another. Never changes a result.
struct Raster {
  int group = 8;  ///< m tiles (pairs with a cluster) that share a sweep over n
  int bands = 1;  ///< parts of every expert's m tiles that run one after the other: keeps gathered tokens in the L2
};

inline constexpr int kTileK = 64;
inline constexpr int kConsumers = 2;                     // warpgroups
inline constexpr int kThreads = 128 * (kConsumers + 1);  // and one warpgroup of producers
inline constexpr int kStoreTileBytes = 64 * 64 * 2;      // one staging tile: 64 rows of 128 bytes

}  // namespace intarsia::cuda::sm90
