// The torch operators, on the stable ABI of LibTorch: src/torch is the only folder of the project that includes torch.
//
// Every operation of ops.h and moe.h is registered once, as intarsia::<name>.out, under the CPU and CUDA keys; the schemas come
// from Python (intarsia_schema of the C API). A kernel takes its arguments off the stack in the order of fields.h, looks at
// them as TensorViews and calls intarsia::run. Nothing of ATen's C++ interface is used, so a build with one torch loads in
// later ones.
#include "api/fields.h"
#include "torch/arguments.h"
#include "torch/moe.h"

namespace intarsia::torch_shim {
namespace {

int torch_threads() {
  std::uint32_t threads = 1;
  return torch_get_num_threads(&threads) == TORCH_SUCCESS ? static_cast<int>(threads) : 1;
}

/// Runs the library's parallel loops on torch's threads.
void run_on_torch_threads(int workers, void (*body)(void* context, int worker), void* context) {
  struct Loop {
    void (*body)(void*, int);
    void* context;
  } loop{body, context};
  const auto range = [](std::int64_t begin, std::int64_t end, void* pointer) {
    const auto& l = *static_cast<Loop*>(pointer);
    for (std::int64_t worker = begin; worker < end; ++worker) l.body(l.context, static_cast<int>(worker));
  };
  check(torch_parallel_for(0, workers, 1, range, &loop), "torch_parallel_for");
}

// ---- the operators

/// Schema: the fields of Op in order, then `str backend`; returns nothing.
template <class Op>
void kernel(StableIValue* stack, std::uint64_t, std::uint64_t) {
  with_typed_errors([&] {
    Op op;
    Context context;
    Arguments arguments(stack);
    fields(arguments, op);
    arguments.value("backend", context.backend);
    arguments.finish(Op::kName);
    run_with_torch(op, context, arguments.device());
  });
}

void register_all(torch::stable::detail::StableLibrary& library) {
#define INTARSIA_REGISTER(Op) library.impl((std::string(Op::kName) + ".out").c_str(), &kernel<Op>);
  INTARSIA_FOR_EACH_OPERATION(INTARSIA_REGISTER)
  INTARSIA_FOR_EACH_COMPOSITION(INTARSIA_REGISTER)
#undef INTARSIA_REGISTER
  register_moe(library);
}

[[maybe_unused]] const bool pool_lent = [] {
  set_thread_pool({torch_threads, run_on_torch_threads});
  return true;
}();

}  // namespace
}  // namespace intarsia::torch_shim

STABLE_TORCH_LIBRARY_IMPL(intarsia, CPU, library) { intarsia::torch_shim::register_all(library); }
STABLE_TORCH_LIBRARY_IMPL(intarsia, CUDA, library) { intarsia::torch_shim::register_all(library); }
