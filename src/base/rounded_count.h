// Token rounding's one decision, the same in every backend: how many rows an expert keeps.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "base/random.h"
#include "intarsia/ops.h"

namespace intarsia {

/// The rounded count of expert e. `deviation` is the running sum of (rounded - count) that `balanced` keeps small.
inline std::int64_t rounded_count(const RoundTokens& op, std::int64_t e, std::int64_t count, std::int64_t valid,
                                  std::int64_t& deviation) {
  const std::int64_t rest = count % op.tile, down = count - rest;
  if (rest == 0) return count;
  const std::int64_t up = std::min(down + op.tile, valid);
  const auto choose_up = [&] {
    switch (op.rounding) {
      case Rounding::up: return true;
      case Rounding::down: return false;
      case Rounding::nearest: return 2 * rest > op.tile;
      case Rounding::stochastic:
        return uniform01(static_cast<std::uint64_t>(op.seed), static_cast<std::uint64_t>(e)) <
               static_cast<double>(rest) / static_cast<double>(op.tile);
      case Rounding::balanced: return std::abs(deviation + up - count) < std::abs(deviation + down - count);
    }
    return false;
  };
  const std::int64_t rounded = choose_up() ? up : down;
  deviation += rounded - count;
  return rounded;
}

}  // namespace intarsia
