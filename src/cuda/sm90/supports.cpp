// What the wgmma kernels can take: 16-bit elements in rows of whole 16-byte chunks, weights that are one or two plain matrices.
#include <cstdint>
#include <limits>

#include "cuda/reason.h"
#include "cuda/sm90/sm90.h"
#include "cuda/sm90/weight_maps.h"

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
  /// Gathered rows are addressed in 32-bit counts of 16 bytes.
  void gathered(const char* name, const TensorView& v) {
    rows(name, v);
    need(v.size(0) * (v.step(0) / kChunk) <= std::numeric_limits<std::uint32_t>::max(), name, ": 64 GiB or more");
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
};

int halves_of(const Weights& w) { return w.second.defined() || w.gate_block > 0 ? 2 : 1; }

}  // namespace

bool supports(const UpForward& op, std::string* why_not) {
  Reason r;
  r.dtype(op.x);
  r.rows_exist(op.a.size(0));
  r.chunks("H", op.x.size(1));
  r.chunks("I", op.a.size(1));
  r.gathered("x", op.x);
  r.weights("w_up", op.w_up, static_cast<int>(gate_factor(op.activation)));
  r.rows("z", op.z);
  r.rows("a", op.a);
  return r.verdict(why_not);
}

bool supports(const DownForward& op, std::string* why_not) {
  Reason r;
  r.dtype(op.a);
  r.rows_exist(op.a.size(0));
  r.chunks("I", op.a.size(1));
  r.chunks("H", op.rows.size(1));
  r.rows("a", op.a);
  r.weights("w_down", op.w_down, 1);
  r.rows("rows", op.rows);
  return r.verdict(why_not);
}

bool supports(const DownBackward& op, std::string* why_not) {
  Reason r;
  r.dtype(op.dy);
  r.rows_exist(op.z.size(0));
  r.chunks("H", op.dy.size(1));
  r.chunks("I", op.z.size(1) / gate_factor(op.activation));
  r.gathered("dy", op.dy);
  r.weights("w_down", op.w_down, 1);
  r.rows("z", op.z);
  r.rows("dz", op.dz);
  r.rows("a_scaled", op.a_scaled);
  return r.verdict(why_not);
}

bool supports(const UpBackward& op, std::string* why_not) {
  Reason r;
  r.dtype(op.dz);
  r.rows_exist(op.dz.size(0));
  r.chunks("I", op.dz.size(1) / halves_of(op.w_up));
  r.chunks("H", op.dx_rows.size(1));
  r.rows("dz", op.dz);
  r.weights("w_up", op.w_up, halves_of(op.w_up));
  r.rows("dx_rows", op.dx_rows);
  return r.verdict(why_not);
}

bool supports(const DownWeightBackward& op, std::string* why_not) {
  Reason r;
  r.dtype(op.dy);
  r.rows_exist(op.a_scaled.size(0));
  r.chunks("H", op.dy.size(1));
  r.chunks("I", op.a_scaled.size(1));
  r.gathered("dy", op.dy);
  r.rows("a_scaled", op.a_scaled);
  r.weights("dw_down", op.dw_down, 1);
  return r.verdict(why_not);
}

bool supports(const UpWeightBackward& op, std::string* why_not) {
  Reason r;
  r.dtype(op.x);
  r.rows_exist(op.dz.size(0));
  r.chunks("H", op.x.size(1));
  r.chunks("I", op.dz.size(1) / halves_of(op.dw_up));
  r.gathered("x", op.x);
  r.rows("dz", op.dz);
  r.weights("dw_up", op.dw_up, halves_of(op.dw_up));
  return r.verdict(why_not);
}

}  // namespace intarsia::cuda::sm90
