// What the mma.sync kernels can take: 16-bit elements in rows of whole 16-byte chunks. Everything else is a reason in words.
#include <cstdint>
#include <initializer_list>

#include "cuda/expert_weights.h"
#include "cuda/sm80/sm80.h"

namespace intarsia::cuda::sm80 {
namespace {

constexpr std::int64_t kChunk = 8;  // 16-bit elements of 16 bytes

bool on_chunk(const TensorView& v) { return reinterpret_cast<std::uintptr_t>(v.data) % 16 == 0; }

/// The first thing that is missing.
class Reason {
 public:
  void need(bool condition, const std::string& text) {
    if (!condition && text_.empty()) text_ = text;
  }
  void dtype(const TensorView& v) {
    need(v.dtype == DType::bfloat16 || v.dtype == DType::float16,
         "mma.sync kernels take bfloat16 and float16, not " + std::string(to_string(v.dtype)));
  }
  void chunks(const char* letter, std::int64_t size) {
    need(size % kChunk == 0, std::string(letter) + " = " + std::to_string(size) + " is not a multiple of 8");
  }
  void rows(const char* name, const TensorView& v) {
    if (!v.defined() || v.numel() == 0) return;
    need(v.step(1) == 1 && v.step(0) % kChunk == 0 && on_chunk(v),
         std::string(name) + ": rows must be contiguous and begin at multiples of 16 bytes");
  }
  void weights(const char* name, const Weights& w) {
    need(contiguous_axis(w) != Contiguous::neither, std::string(name) +
                                                        ": one axis of its matrices must be contiguous in runs of 16 aligned "
                                                        "bytes (if it is the out axis, with gates and ups "
                                                        "in turn or in blocks of a multiple of 8)");
  }
  bool verdict(std::string* why_not) const {
    if (why_not) *why_not = text_;
    return text_.empty();
  }

 private:
  std::string text_;
};

bool contiguous_in(const TensorView& v, int axis, int other) {
  return v.step(axis) == 1 && v.step(other) % kChunk == 0 && v.step(0) % kChunk == 0 && on_chunk(v);
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
