// run, supports, explain, workspace_bytes of every operation: check, choose a backend, give it memory, compute.
#include <cstdlib>
#include <new>
#include <string>
#include <string_view>

#include "api/fields.h"
#include "api/host_lists.h"
#include "api/validate.h"
#include "base/memory_counter.h"
#include "base/parallel.h"
#include "cpu/cpu.h"
#if defined(INTARSIA_CUDA)
#include "cuda/cuda.h"
#endif
#include "reference/reference.h"

namespace intarsia {
namespace {

std::string device_text(Device device) {
  return device.type == DeviceType::cpu ? "cpu" : "cuda:" + std::to_string(device.index);
}

/// What the choice of a backend depends on: the one device of all tensors, and whether any is float64.
struct Survey {
  const char* operation = "";
  bool any = false;
  Device device = {};
  const char* first = nullptr;
  bool float64 = false;
  DType widest_float = DType::float32;

  void look(const char* name, const TensorView& v) {
    if (!v.defined()) return;
    if (!any) {
      any = true;
      device = v.device;
      first = name;
    } else if (!(v.device == device)) {
      throw InvalidArgument(std::string(operation) + ": " + name + ": expected a tensor on " + device_text(device) + " like " +
                            first + ", got one on " + device_text(v.device) + "; move it there");
    }
    if (v.dtype == DType::float64) float64 = true;
    if (v.dtype == DType::bfloat16 || v.dtype == DType::float16) widest_float = v.dtype;
  }
  void in(const char* name, TensorView& v) { look(name, v); }
  void optional_in(const char* name, TensorView& v) { look(name, v); }
  void out(const char* name, TensorView& v) { look(name, v); }
  void optional_out(const char* name, TensorView& v) { look(name, v); }
  void inout(const char* name, TensorView& v) { look(name, v); }
  void optional_inout(const char* name, TensorView& v) { look(name, v); }
  template <class T>
  void value(const char*, T&) {}
};

template <class Op>
Survey survey(const Op& op) {
  Survey s;
  s.operation = Op::kName;
  Op copy = op;
  fields(s, copy);
  return s;
}

struct Choice {
  Backend backend;
  std::string why;
  std::string refusal;  // not empty: nothing can run this
};

/// Empty when this process can compute on that CUDA device.
std::string cuda_problem([[maybe_unused]] int index) {
#if defined(INTARSIA_CUDA)
  return cuda::device_problem(index);
#else
  return "this build has no CUDA kernels; move the tensors to the CPU, or build where nvcc is";
#endif
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

/// One block from the caller's allocator, counted where a counter is given, and given back on every path.
class WorkspaceBlock {
 public:
  WorkspaceBlock(Allocator& allocator, std::size_t bytes, MemoryCounter* counter = nullptr)
      : allocator_(allocator), bytes_(bytes), counter_(counter) {
    if (bytes_ == 0) return;
    pointer_ = allocator_.allocate(bytes_);
    if (counter_) counter_->add(bytes_);
  }
  ~WorkspaceBlock() {
    if (!pointer_) return;
    allocator_.deallocate(pointer_, bytes_);
    if (counter_) counter_->remove(bytes_);
  }
  WorkspaceBlock(const WorkspaceBlock&) = delete;
  WorkspaceBlock& operator=(const WorkspaceBlock&) = delete;
  std::byte* get() const { return static_cast<std::byte*>(pointer_); }

 private:
  Allocator& allocator_;
  std::size_t bytes_;
  MemoryCounter* counter_;
  void* pointer_ = nullptr;
};

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
  int device;
};

template <class Op>
Checked checked(const Op& op, const Context& context) {
  const Survey s = survey(op);
  const Choice choice = choose(s, context.backend);
  validate_call(op, choice, s.device.index, context.stream);
  if (!choice.refusal.empty()) throw Unsupported(std::string(Op::kName) + ": " + choice.refusal);
  return {choice.backend, s.device.index};
}

template <class Op>
void run_on_host(const Op& op, Backend backend, const Context& context) {
  const int workers = max_workers();
  const WorkspaceBlock workspace(context.allocator ? *context.allocator : host_allocator(), bytes_for(op, backend, workers));
  const Execution execution{nullptr, workspace.get(), workers};
  if (backend == Backend::cpu) cpu::run(op, execution);
  else reference::run(op, execution);
}

#if defined(INTARSIA_CUDA)
template <class Op>
void run_on_cuda(const Op& op, int device, const Context& context) {
  cuda::StreamAllocator on_stream(device, context.stream);
  const WorkspaceBlock workspace(context.allocator ? *context.allocator : on_stream, cuda::workspace_bytes(op),
                                 &device_workspaces());
  cuda::run(op, {context.stream, workspace.get(), 1});
}
#endif

template <class Op>
void run_op(const Op& op, const Context& context) {
  const Checked choice = checked(op, context);
#if defined(INTARSIA_CUDA)
  if (choice.backend == Backend::cuda) return run_on_cuda(op, choice.device, context);
#endif
  run_on_host(op, choice.backend, context);
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
