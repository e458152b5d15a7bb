// What the wgmma kernels can take: 16-bit elements in rows of whole 16-byte chunks, weights that are one or two plain matrices.
#include <cstdint>

#include "cuda/sm90/sm90.h"
#include "cuda/sm90/weight_maps.h"
#include "cuda/supports.h"

namespace intarsia::cuda::sm90 {
namespace {

class Reason : public cuda::Reason {
 public:
  Reason() : cuda::Reason("wgmma") {}

  void rows_exist(std::int64_t rows) { need(rows > 0, "there are no rows"); }
  /// Tensor maps have no rows that overlap.
  void rows(const char* name, const TensorView& v) {
    cuda::Reason::rows(name, v);
    if (v.defined() && v.numel() > 0) need(v.step(0) >= v.size(1), name, ": rows must not overlap");
  }
  void gathered(const char* name, const TensorView& v) {
    rows(name, v);
    countable(name, v);
  }
  void weights(const char* name, const Weights& w, int halves) {
    for (int half = 0; half < halves; ++half) {
      const WeightHalf h = weight_half(w, halves, half);
      const std::int64_t chunk = 16 / static_cast<std::int64_t>(size_of(h.dtype));
      const auto steps = [&](std::int64_t step) { return step % chunk == 0 && step > 0; };
      need((h.in_step == 1 && steps(h.out_step)) || (h.out_step == 1 && steps(h.in_step)), name,
           ": one axis of its matrices must be contiguous, the other a multiple of 16 bytes");
      need(on_chunk(h.data) && (h.experts == 1 || steps(h.expert_step)), name, ": experts must begin at multiples of 16 bytes");
      if (!h.blocked()) continue;
      need(h.in_contiguous(), name, ": gates and ups in blocks need a contiguous in axis");
      need(128 % h.block == 0 || h.block % 128 == 0, name, ": blocks of gates must divide 128 or be its multiples, not ",
           h.block);
    }
  }
  void gradient(const char* name, const Weights& w, int halves) { weights(name, w, halves); }
};

}  // namespace

#define INTARSIA_DEFINE(Op) \
  bool supports(const Op& op, std::string* why_not) { return supported<Reason>(op, why_not); }
INTARSIA_FOR_EACH_PRODUCT(INTARSIA_DEFINE)
#undef INTARSIA_DEFINE

}  // namespace intarsia::cuda::sm90
