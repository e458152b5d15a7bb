// Which tile comes next: a walk over experts that every role of a CTA makes for itself, from the offsets on the device. Static:
// CTA i takes tiles i, i + grid, ... so there is no counter to reset and the order never changes. The same code is tested on
// the CPU, where it must hand out every tile exactly once (tests/cpp/scheduler_test.cpp).
//
// Rows operations (m = rows of an expert): tiles of an expert are ceil(rows / tile_m) by n_tiles. With a cluster of two, the
// CTAs of a pair take neighbouring m tiles and share the right operand; an odd last m tile is run by the pair as two n tiles,
// each CTA loading its own operand (`multicast` false), so that nothing is rounded up to 256 rows.
// Weight operations (k = rows of an expert): m_tiles by n_tiles for every expert, empty ones too: their gradient is zero.
#pragma once

#include <cstdint>

#include "base/activation.h"
#include "cuda/sm90/config.h"

namespace intarsia::cuda::sm90 {

struct Tile {
  int expert;
  int m, n;        ///< tile coordinates; n may be n_tiles or more for the idle half of a pair
  int first_row;   ///< of the expert
  int rows;        ///< of the expert
  bool multicast;  ///< both CTAs of the pair want the same right operand
};

struct ScheduleArguments {
  const std::int32_t* expert_offsets;
  int experts;
  int capacity;  ///< rows that exist; offsets are clamped to it
  int m_tiles;   ///< weight operations
  int n_tiles;
  Raster raster;
  int slice = 0;  ///< without a list: expert e has the rows from e * slice on, so many
};

/// Which of the launch's clusters this is; on the GPU nothing but special registers.
struct DevicePlace {
#if defined(__CUDACC__)
  template <int kCluster>
  __device__ static int cluster() {
    return blockIdx.x / kCluster;
  }
  template <int kCluster>
  __device__ static int clusters() {
    return gridDim.x / kCluster;
  }
  template <int kCluster>
  __device__ static int rank() {
    return blockIdx.x % kCluster;
  }
#endif
};

template <int kTileM, int kCluster, bool kWeightGradient, class Place = DevicePlace>
class Scheduler {
 public:
  INTARSIA_HOST_DEVICE explicit Scheduler(const ScheduleArguments& arguments, Place place = {})
      : a_(arguments), place_(place), tile_(place_.template cluster<kCluster>()) {}

  INTARSIA_HOST_DEVICE bool next(Tile& tile) {
    while (tile_ >= tiles_) {
      tile_ -= tiles_;
      if (!next_expert()) return false;
    }
    tile.expert = expert_;
    tile.first_row = first_row_;
    tile.rows = rows_;
    const int rank = place_.template rank<kCluster>(), last = tile_ - m_count_ * a_.n_tiles;
    if (kCluster > 1 && !kWeightGradient && last >= 0) {  // the odd last m tile, as pairs of n tiles
      tile.m = (m_begin_ + m_count_) * kCluster;
      tile.n = last * kCluster + rank;
      tile.multicast = false;
    } else {
      const int group = a_.raster.group, sweep = group * a_.n_tiles;
      const int first = tile_ / sweep * group, inside = tile_ % sweep;
      const int height = m_count_ - first < group ? m_count_ - first : group;
      tile.m = (m_begin_ + first + inside % height) * kCluster + rank;
      tile.n = inside / height;
      tile.multicast = kCluster > 1;
    }
    tile_ += place_.template clusters<kCluster>();
    return true;
  }

 private:
  INTARSIA_HOST_DEVICE int offset_of(int expert) const {
    const int offset = a_.expert_offsets ? a_.expert_offsets[expert] : expert * a_.slice;
    return offset < 0 ? 0 : (offset > a_.capacity ? a_.capacity : offset);
  }

  INTARSIA_HOST_DEVICE bool next_expert() {
    if (++expert_ >= a_.experts) {
      if (++band_ >= a_.raster.bands) return false;
      expert_ = 0;
    }
    first_row_ = offset_of(expert_);
    const int end = offset_of(expert_ + 1);
    rows_ = end > first_row_ ? end - first_row_ : 0;
    const int m_tiles = kWeightGradient ? a_.m_tiles : (rows_ + kTileM - 1) / kTileM;
    const int units = m_tiles / kCluster;  // of kCluster m tiles
    m_begin_ = units * band_ / a_.raster.bands;
    m_count_ = units * (band_ + 1) / a_.raster.bands - m_begin_;
    tiles_ = m_count_ * a_.n_tiles;
    const bool odd = kCluster > 1 && !kWeightGradient && m_tiles % kCluster != 0 && band_ == a_.raster.bands - 1;
    if (odd) tiles_ += (a_.n_tiles + kCluster - 1) / kCluster;
    return true;
  }

  const ScheduleArguments& a_;
  Place place_;
  int tile_;       // next tile of this cluster, counted from the current expert's first
  int tiles_ = 0;  // of the current expert in this band
  int expert_ = -1, band_ = 0;
  int first_row_ = 0, rows_ = 0;
  int m_begin_ = 0, m_count_ = 0;  // units of this expert in this band
};

}  // namespace intarsia::cuda::sm90
