// Which tokens take part: token_mask (T) boolean, absent = all.
#pragma once

#include <cstdint>

#include "intarsia/types.h"

namespace intarsia::cpu {

class TokenMask {
 public:
  explicit TokenMask(const TensorView& mask)
      : bytes_(mask.defined() ? mask.as<const std::uint8_t>() : nullptr), step_(mask.defined() ? mask.step(0) : 0) {}
  bool operator()(std::int64_t token) const { return !bytes_ || bytes_[token * step_] != 0; }

 private:
  const std::uint8_t* bytes_;
  std::int64_t step_;
};

}  // namespace intarsia::cpu
