#include "api/choose.h"

#include "intarsia/error.h"
#if defined(INTARSIA_CUDA)
#include "cuda/cuda.h"
#endif

namespace intarsia {
namespace {

std::string device_text(Device device) {
  return device.type == DeviceType::cpu ? "cpu" : "cuda:" + std::to_string(device.index);
}

/// Empty when this process can compute on that CUDA device.
std::string cuda_problem([[maybe_unused]] int index) {
#if defined(INTARSIA_CUDA)
  return cuda::device_problem(index);
#else
  return "this build has no CUDA kernels; move the tensors to the CPU, or build where nvcc is";
#endif
}

}  // namespace

void Survey::fail(const char* name, Device other) const {
  throw InvalidArgument(std::string(operation) + ": " + name + ": expected a tensor on " + device_text(device) + " like " +
                        first + ", got one on " + device_text(other) + "; move it there");
}

Choice choose(const Survey& s, Backend wanted) {
  if (s.device.type == DeviceType::cuda) {
    if (wanted == Backend::reference || wanted == Backend::cpu)
      return {wanted, "",
              "backend \"" + std::string(to_string(wanted)) + "\" computes on the CPU, and the tensors are on CUDA; move them"};
    return {Backend::cuda, "the tensors are on CUDA", cuda_problem(s.device.index)};
  }
  if (wanted == Backend::cuda) return {wanted, "", "backend \"cuda\" wants CUDA tensors, and these are on the CPU; move them"};
  if (wanted == Backend::reference) return {wanted, "asked for", ""};
  if (s.float64 && wanted == Backend::cpu)
    return {wanted, "", "backend \"cpu\" has no float64; use backend \"reference\" or float32"};
  if (s.float64) return {Backend::reference, "float64 has plain loops only", ""};
  return {Backend::cpu, wanted == Backend::cpu ? "asked for" : "the tensors are on the CPU", ""};
}

void check_stream([[maybe_unused]] const Survey& s, [[maybe_unused]] const Choice& choice, [[maybe_unused]] void* stream) {
#if defined(INTARSIA_CUDA)
  if (choice.backend == Backend::cuda && choice.refusal.empty()) cuda::check_stream(s.operation, s.device.index, stream);
#endif
}

}  // namespace intarsia
