// router_logits: logits = x w_router^T + bias.   x (T, H), w_router (E, H), bias (E), logits (T, E).
// router_logits_backward: dx = dlogits w_router, dw_router = dlogits^T x, dbias = column sums of dlogits.
// Verify: intarsia-ops verify router_logits, intarsia-ops verify router_logits_backward
#include "reference/element.h"
#include "reference/reference.h"

namespace intarsia::reference {

void run(const RouterLogits& op, const Execution&) {
  for (std::int64_t t = 0; t < op.x.size(0); ++t) {
    for (std::int64_t e = 0; e < op.w_router.size(0); ++e) {
      double sum = op.bias.defined() ? load(op.bias, e) : 0;
      for (std::int64_t h = 0; h < op.x.size(1); ++h) sum += load(op.x, t, h) * load(op.w_router, e, h);
      store(op.logits, sum, t, e);
    }
  }
}

void run(const RouterLogitsBackward& op, const Execution&) {
  const std::int64_t tokens = op.dlogits.size(0), experts = op.dlogits.size(1), hidden = op.x.size(1);
  if (op.dx.defined()) {
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int64_t h = 0; h < hidden; ++h) {
        double sum = op.add_to_dx ? load(op.dx, t, h) : 0;
        for (std::int64_t e = 0; e < experts; ++e) sum += load(op.dlogits, t, e) * load(op.w_router, e, h);
        store(op.dx, sum, t, h);
      }
    }
  }
  for (std::int64_t e = 0; e < experts; ++e) {
    if (op.dw_router.defined()) {
      for (std::int64_t h = 0; h < hidden; ++h) {
        double sum = 0;
        for (std::int64_t t = 0; t < tokens; ++t)  // a token that is not routed adds nothing, even when its x is NaN
          if (const double d = load(op.dlogits, t, e); d != 0) sum += d * load(op.x, t, h);
        store(op.dw_router, sum, e, h);
      }
    }
    if (op.dbias.defined()) {
      double sum = 0;
      for (std::int64_t t = 0; t < tokens; ++t) sum += load(op.dlogits, t, e);
      store(op.dbias, sum, e);
    }
  }
}

}  // namespace intarsia::reference
