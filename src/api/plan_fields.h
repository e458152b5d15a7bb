// The fields of a plan's request, for the C interface and the command line; see fields.h.
#pragma once

#include "intarsia/plan.h"

namespace intarsia {

template <class V>
void fields(V& v, LayerShape& s) {
  v.value("tokens", s.tokens);
  v.value("hidden", s.hidden);
  v.value("width", s.width);
  v.value("experts", s.experts);
  v.value("experts_per_token", s.experts_per_token);
  v.value("rows", s.rows);
  v.value("dtype", s.dtype);
  v.value("activation", s.activation);
  v.value("token_rows", s.token_rows);
  v.value("sorted_rows", s.sorted_rows);
}

template <class V>
void fields(V& v, PlanOptions& o) {
  v.value("save", o.save);
  v.value("router", o.router);
  v.value("training", o.training);
  v.value("overwrite_z", o.overwrite_z);
  v.value("router_keeps_logits", o.router_keeps_logits);
  v.value("has_router", o.has_router);
  v.value("weight_gradient", o.weight_gradient);
  v.value("bias_gradient", o.bias_gradient);
  v.value("backend", o.backend);
  v.value("threads", o.threads);
}

}  // namespace intarsia
