// What tensor-core kernels need of each product. `Reason` is a set of kernels' own (reason.h), with
//   rows_exist(R)                  for kernels that cannot describe nothing
//   gathered(name, x)              rows that are read by token
//   weights(name, w, halves)       read as so many plain matrices
//   gradient(name, dw, halves)     written as those
#pragma once

#include <string>

#include "cuda/expert_weights.h"
#include "cuda/reason.h"
#include "intarsia/ops.h"

namespace intarsia::cuda {

template <class Reason>
void look(Reason& r, const UpForward& op) {
  r.dtype(op.x);
  r.rows_exist(op.a.size(0));
  r.chunks("H", op.x.size(1));
  r.chunks("I", op.a.size(1));
  r.gathered("x", op.x);
  r.weights("w_up", op.w_up, static_cast<int>(gate_factor(op.activation)));
  r.rows("z", op.z);
  r.rows("a", op.a);
}

template <class Reason>
void look(Reason& r, const DownForward& op) {
  r.dtype(op.a);
  r.rows_exist(op.a.size(0));
  r.chunks("I", op.a.size(1));
  r.chunks("H", op.rows.size(1));
  r.rows("a", op.a);
  r.weights("w_down", op.w_down, 1);
  r.rows("rows", op.rows);
}

template <class Reason>
void look(Reason& r, const DownBackward& op) {
  r.dtype(op.dy);
  r.rows_exist(op.z.size(0));
  r.chunks("H", op.dy.size(1));
  r.chunks("I", op.z.size(1) / gate_factor(op.activation));
  r.gathered("dy", op.dy);
  r.weights("w_down", op.w_down, 1);
  r.rows("z", op.z);
  r.rows("dz", op.dz);
  r.rows("a_scaled", op.a_scaled);
}

template <class Reason>
void look(Reason& r, const UpBackward& op) {
  r.dtype(op.dz);
  r.rows_exist(op.dz.size(0));
  r.chunks("I", op.dz.size(1) / halves_of(op.w_up));
  r.chunks("H", op.dx_rows.size(1));
  r.rows("dz", op.dz);
  r.weights("w_up", op.w_up, halves_of(op.w_up));
  r.rows("dx_rows", op.dx_rows);
}

template <class Reason>
void look(Reason& r, const DownWeightBackward& op) {
  r.dtype(op.dy);
  r.rows_exist(op.a_scaled.size(0));
  r.chunks("H", op.dy.size(1));
  r.chunks("I", op.a_scaled.size(1));
  r.gathered("dy", op.dy);
  r.rows("a_scaled", op.a_scaled);
  r.gradient("dw_down", op.dw_down, 1);
}

template <class Reason>
void look(Reason& r, const UpWeightBackward& op) {
  r.dtype(op.x);
  r.rows_exist(op.dz.size(0));
  r.chunks("H", op.x.size(1));
  r.chunks("I", op.dz.size(1) / halves_of(op.dw_up));
  r.gathered("x", op.x);
  r.rows("dz", op.dz);
  r.gradient("dw_up", op.dw_up, halves_of(op.dw_up));
}

/// False: `why_not`, which may be null, says in words what is missing.
template <class Reason, class Op>
bool supported(const Op& op, std::string* why_not) {
  Reason reason;
  look(reason, op);
  return reason.verdict(why_not);
}

}  // namespace intarsia::cuda
