// What the mma.sync kernels can take: 16-bit elements in rows of whole 16-byte chunks. Everything else is a reason in words.
#include <cstdint>
#include <initializer_list>

#include "cuda/expert_weights.h"
#include "cuda/reason.h"
#include "cuda/sm80/sm80.h"

namespace intarsia::cuda::sm80 {
namespace {

class Reason : public cuda::Reason {
 public:
  Reason() : cuda::Reason("mma.sync") {}
  void weights(const char* name, const Weights& w) {
    need(contiguous_axis(w) != Contiguous::neither, name,
         ": one axis of its matrices must be contiguous in runs of 16 aligned "
         "bytes (if it is the out axis, with gates and ups "
         "in turn or in blocks of a multiple of 8)");
  }
};

bool contiguous_in(const TensorView& v, int axis, int other) {
  return v.step(axis) == 1 && v.step(other) % kChunk == 0 && v.step(0) % kChunk == 0 && on_chunk(v.data);
}

}  // namespace

Contiguous contiguous_axis(const Weights& w) {
  const int out = w.transposed ? 2 : 1, in = w.transposed ? 1 : 2;
  const auto both = [&](int axis, int other) {
    return contiguous_in(w.weight, axis, other) && (!w.second.defined() || contiguous_in(w.second, axis, other));
  };
  if (both(in, out)) return Contiguous::in;
  if (!both(out, in)) return Contiguous::neither;
  if (w.gate_block == 1) return Contiguous::out_pairs;
  return w.gate_block % kChunk == 0 ? Contiguous::out : Contiguous::neither;
}

bool supports(const UpForward& op, std::string* why_not) {
  Reason r;
  r.dtype(op.x);
  r.chunks("H", op.x.size(1));
  r.chunks("I", op.a.size(1));
  r.rows("x", op.x);
  r.weights("w_up", op.w_up);
  r.rows("z", op.z);
  r.rows("a", op.a);
  return r.verdict(why_not);
}

bool supports(const DownForward& op, std::string* why_not) {
  Reason r;
  r.dtype(op.a);
  r.chunks("I", op.a.size(1));
  r.chunks("H", op.rows.size(1));
  r.rows("a", op.a);
  r.weights("w_down", op.w_down);
  r.rows("rows", op.rows);
  return r.verdict(why_not);
}

bool supports(const DownBackward& op, std::string* why_not) {
  Reason r;
  r.dtype(op.dy);
  r.chunks("H", op.dy.size(1));
  r.chunks("I", op.z.size(1) / gate_factor(op.activation));
  r.rows("dy", op.dy);
  r.rows("z", op.z);
  r.weights("w_down", op.w_down);
  r.rows("dz", op.dz);
  r.rows("a_scaled", op.a_scaled);
  return r.verdict(why_not);
}

bool supports(const UpBackward& op, std::string* why_not) {
  Reason r;
  r.dtype(op.dz);
  r.chunks("the width of dz", op.dz.size(1));
  r.chunks("I", op.w_up.second.defined() || op.w_up.gate_block > 0 ? op.dz.size(1) / 2 : op.dz.size(1));
  r.chunks("H", op.dx_rows.size(1));
  r.rows("dz", op.dz);
  r.weights("w_up", op.w_up);
  r.rows("dx_rows", op.dx_rows);
  return r.verdict(why_not);
}

bool supports(const DownWeightBackward& op, std::string* why_not) {
  Reason r;
  r.dtype(op.dy);
  r.chunks("H", op.dy.size(1));
  r.chunks("I", op.a_scaled.size(1));
  r.rows("dy", op.dy);
  r.rows("a_scaled", op.a_scaled);
  return r.verdict(why_not);
}

bool supports(const UpWeightBackward& op, std::string* why_not) {
  Reason r;
  r.dtype(op.x);
  r.chunks("H", op.x.size(1));
  r.chunks("the width of dz", op.dz.size(1));
  r.rows("x", op.x);
  r.rows("dz", op.dz);
  return r.verdict(why_not);
}

}  // namespace intarsia::cuda::sm80
