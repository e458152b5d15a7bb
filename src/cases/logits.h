// Logits with what a router must survive: ties, tokens with NaN or infinities, masks.
#pragma once

#include "cases/case.h"

namespace intarsia::cases {

///   random; tied: all equal in one token, pairs in others; near: 1e-6 apart (float32 tells them apart, bfloat16 does not);
///   broken: tokens with a NaN, +inf, all -inf, NaN and inf, and healthy ones with some -inf; nan_everywhere; large: up to 1e4;
///   far_below: -60 to -200, where a sigmoid underflows in float32
enum class Pattern { random, tied, near, broken, nan_everywhere, large, far_below };

struct Logits {
  std::string name;
  std::int64_t tokens = 17, experts = 8, choices = 2;
  Pattern pattern = Pattern::random;
  bool mask = false;
  Layout layout = Layout::dense;
};

TensorView make_logits(Tensors&, const Logits&, DType);
/// Every third token is masked, and its logits are NaN: nobody may read them.
TensorView make_mask(Tensors&, const Logits&, const TensorView& logits);

/// Sizes and patterns common to everything that reads logits.
std::vector<Logits> logits_table();

}  // namespace intarsia::cases
