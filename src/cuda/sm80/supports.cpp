// What the mma.sync kernels can take: 16-bit elements in rows of whole 16-byte chunks. Everything else is a reason in words.
#include <cstdint>

#include "cuda/expert_weights.h"
#include "cuda/sm80/sm80.h"
#include "cuda/supports.h"

namespace intarsia::cuda::sm80 {
namespace {

class Reason : public cuda::Reason {
 public:
  Reason() : cuda::Reason("mma.sync") {}
  void rows_exist(std::int64_t) {}
  void rows(const char* name, const TensorView& v) {
    cuda::Reason::rows(name, v);
    countable(name, v);
  }
  void gathered(const char* name, const TensorView& v) { rows(name, v); }
  void weights(const char* name, const Weights& w, int) {
    need(contiguous_axis(w) != Contiguous::neither, name,
         ": one axis of its matrices must be contiguous in runs of 16 aligned bytes (if it is the out axis, with gates and ups "
         "in turn or in blocks of a multiple of 8)");
    for (int axis = 1; axis <= 2; ++axis)  // as the backward products address them
      need(w.weight.step(axis) >= 0 && w.weight.size(axis) * (w.weight.step(axis) / kChunk) <= kMostChunks, name,
           ": descending steps, or an expert of 64 GiB and more");
  }
  void gradient(const char*, const Weights&, int) {}  // any strides will do
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

#define INTARSIA_DEFINE(Op) \
  bool supports(const Op& op, std::string* why_not) { return supported<Reason>(op, why_not); }
INTARSIA_FOR_EACH_PRODUCT(INTARSIA_DEFINE)
#undef INTARSIA_DEFINE

}  // namespace intarsia::cuda::sm80
