// Which of the three sets of kernels runs a product: wgmma (sm90), mma.sync (sm80), or plain (general), the first that can.
#include "cuda/cuda.h"
#include "cuda/general/general.h"
#include "cuda/launch.h"
#include "cuda/sm80/sm80.h"
#if defined(INTARSIA_SM90)
#include "cuda/sm90/sm90.h"
#endif

namespace intarsia::cuda {
namespace {

enum class Path { sm90, sm80, general };

/// Null pointers: the reasons are not wanted.
template <class Op>
bool sm90_can(const Op& op, const DeviceFigures& device, std::string* why_not) {
#if defined(INTARSIA_SM90)
  if (device.major == 9) return sm90::supports(op, why_not);
  if (why_not)
    *why_not = "they need compute capability 9.0, this device has " + std::to_string(device.major) + "." +
               std::to_string(device.minor);
#else
  (void)op, (void)device;
  if (why_not) *why_not = "this build has none";
#endif
  return false;
}

template <class Op>
Path choose(const Op& op, std::string* why_not_sm90 = nullptr, std::string* why_not_sm80 = nullptr) {
  if (sm90_can(op, device_figures(op.expert_offsets.device.index), why_not_sm90)) return Path::sm90;
  return sm80::supports(op, why_not_sm80) ? Path::sm80 : Path::general;
}

template <class Op>
void run_product(const Op& op, const Execution& execution) {
  const DeviceGuard guard(op.expert_offsets.device.index);
  switch (choose(op)) {
#if defined(INTARSIA_SM90)
    case Path::sm90: return sm90::run(op, execution);
#endif
    case Path::sm80: return sm80::run(op, execution);
    default: return general::run(op, execution);
  }
}

template <class Op>
std::size_t workspace_of_product(const Op& op) {
  switch (choose(op)) {
#if defined(INTARSIA_SM90)
    case Path::sm90: return sm90::workspace_bytes(op);
#endif
    case Path::sm80: return sm80::workspace_bytes(op);
    default: return general::workspace_bytes(op);
  }
}

template <class Op>
std::string explain_product(const Op& op) {
  std::string why_not_sm90, why_not_sm80;
  switch (choose(op, &why_not_sm90, &why_not_sm80)) {
#if defined(INTARSIA_SM90)
    case Path::sm90: return "cuda: wgmma, " + sm90::explain(op);
#endif
    case Path::sm80: return "cuda: mma.sync, tile 128 x 128 x 32; no wgmma kernels: " + why_not_sm90;
    default: return "cuda: general kernels; no wgmma kernels: " + why_not_sm90 + "; no mma.sync kernels: " + why_not_sm80;
  }
}

}  // namespace

#define INTARSIA_DEFINE(Op)                                                          \
  void run(const Op& op, const Execution& execution) { run_product(op, execution); } \
  std::size_t workspace_bytes(const Op& op) { return workspace_of_product(op); }     \
  std::string explain(const Op& op) { return explain_product(op); }
INTARSIA_FOR_EACH_PRODUCT(INTARSIA_DEFINE)
#undef INTARSIA_DEFINE

}  // namespace intarsia::cuda
