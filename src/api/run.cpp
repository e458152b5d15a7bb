// run, supports, explain, workspace_bytes of every operation: check, choose a backend, give it memory, compute.
#include <cstdlib>
#include <string>
#include <string_view>

#include "api/choose.h"
#include "api/host_lists.h"
#include "api/validate.h"
#include "api/workspace_block.h"
#include "base/parallel.h"
#include "cpu/cpu.h"
#include "reference/reference.h"

namespace intarsia {
namespace {

template <class Op>
std::size_t bytes_for(const Op& op, Backend backend, int workers) {
#if defined(INTARSIA_CUDA)
  if (backend == Backend::cuda) return cuda::workspace_bytes(op);
#endif
  return backend == Backend::cpu ? cpu::workspace_bytes(op, workers) : 0;
}

#if defined(INTARSIA_CUDA)
/// INTARSIA_CHECK=1: lists on a GPU are checked like those on the CPU, at the price of a copy and a wait for each.
bool device_lists_are_checked() {
  static const bool asked = [] {
    const char* text = std::getenv("INTARSIA_CHECK");
    return text != nullptr && *text != '\0' && std::string_view(text) != "0";
  }();
  return asked;
}

void copy_list(const char* operation, void* to, const void* from, std::size_t bytes, int device, void* stream) {
  if (cuda::is_captured(device, stream))
    throw Unsupported(std::string(operation) +
                      ": INTARSIA_CHECK=1 copies the index lists to the host, which cannot be part of a CUDA graph; unset it "
                      "where graphs are captured");
  cuda::copy_to_host(to, from, bytes, device, stream);
}
#endif

template <class Op>
void validate_call(const Op& op, [[maybe_unused]] const Choice& choice, [[maybe_unused]] int device,
                   [[maybe_unused]] void* stream) {
#if defined(INTARSIA_CUDA)
  if (choice.backend == Backend::cuda && choice.refusal.empty() && device_lists_are_checked()) {
    HostLists lists(
        [&](void* to, const void* from, std::size_t bytes) { copy_list(Op::kName, to, from, bytes, device, stream); });
    return validate(lists.of(op));
  }
#endif
  validate(op);
}

struct Checked {
  Backend backend;
  Device device;
};

template <class Op>
Checked checked(const Op& op, const Context& context) {
  const Survey s = survey(op);
  const Choice choice = choose(s, context.backend);
  check_stream(s, choice, context.stream);
  validate_call(op, choice, s.device.index, context.stream);
  if (!choice.refusal.empty()) throw Unsupported(std::string(Op::kName) + ": " + choice.refusal);
  return {choice.backend, s.device};
}

template <class Op>
void run_op(const Op& op, const Context& context) {
  const auto [backend, device] = checked(op, context);
  const int workers = backend == Backend::cuda ? 1 : max_workers();
  const WorkspaceBlock workspace(device, context, bytes_for(op, backend, workers));
  const Execution execution{context.stream, workspace.get(), workers};
#if defined(INTARSIA_CUDA)
  if (backend == Backend::cuda) return cuda::run(op, execution);
#endif
  if (backend == Backend::cpu) cpu::run(op, execution);
  else reference::run(op, execution);
}

template <class Op>
std::string supports_op(const Op& op, const Context& context) {
  try {
    checked(op, context);
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

template <class Op>
std::string explain_op(const Op& op, const Context& context) {
  const Survey s = survey(op);
  const Choice choice = choose(s, context.backend);
  validate(op);  // lists on a GPU are not read, whatever INTARSIA_CHECK says: an explanation waits for nothing
  const std::string head = std::string(Op::kName) + ": ";
  if (!choice.refusal.empty()) return head + "cannot run: " + choice.refusal;
  if (choice.backend == Backend::reference)
    return head + "backend reference (" + choice.why + "): plain loops in double, one thread";
#if defined(INTARSIA_CUDA)
  if (choice.backend == Backend::cuda) return head + "backend cuda (" + choice.why + "): " + cuda::explain(op);
#endif
  const int workers = max_workers();
  return head + "backend cpu (" + choice.why + "), " + std::to_string(workers) + (workers == 1 ? " thread" : " threads") +
         "; products: " + cpu::describe_gemm(s.widest_float) + "; workspace " +
         std::to_string(bytes_for(op, Backend::cpu, workers)) + " bytes";
}

}  // namespace

#define INTARSIA_DEFINE(Op)                                                                       \
  void run(const Op& op, const Context& context) { run_op(op, context); }                         \
  std::string supports(const Op& op, const Context& context) { return supports_op(op, context); } \
  std::string explain(const Op& op, const Context& context) { return explain_op(op, context); }   \
  std::size_t workspace_bytes(const Op& op, const Context& context) {                             \
    return bytes_for(op, checked(op, context).backend, max_workers());                            \
  }
INTARSIA_FOR_EACH_OPERATION(INTARSIA_DEFINE)
#undef INTARSIA_DEFINE

}  // namespace intarsia
