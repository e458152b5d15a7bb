// run, supports, explain, workspace_bytes of every operation: check, choose a backend, give it memory, compute.
#include <new>
#include <string>

#include "api/fields.h"
#include "api/validate.h"
#include "base/parallel.h"
#include "cpu/cpu.h"
#include "reference/reference.h"

namespace intarsia {
namespace {

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
      throw InvalidArgument(std::string(operation) + ": " + name + ": expected a tensor on the device of " + first +
                            "; move it there");
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

Choice choose(const Survey& s, Backend wanted) {
  if (s.device.type == DeviceType::cuda || wanted == Backend::cuda)
    return {Backend::cuda, "", "this build has no CUDA kernels; move the tensors to the CPU"};
  if (wanted == Backend::reference) return {wanted, "asked for", ""};
  if (s.float64 && wanted == Backend::cpu)
    return {wanted, "", "backend \"cpu\" has no float64; use backend \"reference\" or float32"};
  if (s.float64) return {Backend::reference, "float64 has plain loops only", ""};
  return {Backend::cpu, wanted == Backend::cpu ? "asked for" : "the tensors are on the CPU", ""};
}

/// One block from the caller's allocator, given back on every path.
class Workspace {
 public:
  Workspace(Allocator* allocator, std::size_t bytes) : allocator_(allocator ? *allocator : host_allocator()), bytes_(bytes) {
    if (bytes_ > 0) pointer_ = allocator_.allocate(bytes_);
  }
  ~Workspace() {
    if (pointer_) allocator_.deallocate(pointer_, bytes_);
  }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  std::byte* get() const { return static_cast<std::byte*>(pointer_); }

 private:
  Allocator& allocator_;
  std::size_t bytes_;
  void* pointer_ = nullptr;
};

template <class Op>
std::size_t bytes_for(const Op& op, Backend backend, int workers) {
  return backend == Backend::cpu ? cpu::workspace_bytes(op, workers) : 0;
}

template <class Op>
Backend checked(const Op& op, const Context& context) {
  const Choice choice = choose(survey(op), context.backend);
  validate(op);
  if (!choice.refusal.empty()) throw Unsupported(std::string(Op::kName) + ": " + choice.refusal);
  return choice.backend;
}

template <class Op>
void run_op(const Op& op, const Context& context) {
  const Backend backend = checked(op, context);
  const int workers = max_workers();
  const Workspace workspace(context.allocator, bytes_for(op, backend, workers));
  const Execution execution{context.stream, workspace.get(), workers};
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
  const std::string head = std::string(Op::kName) + ": ";
  if (!choice.refusal.empty()) return head + "cannot run: " + choice.refusal;
  if (choice.backend == Backend::reference)
    return head + "backend reference (" + choice.why + "): plain loops in double, one thread";
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
    return bytes_for(op, checked(op, context), max_workers());                                    \
  }
INTARSIA_FOR_EACH_OPERATION(INTARSIA_DEFINE)
#undef INTARSIA_DEFINE

}  // namespace intarsia
