// The torch operators, on the stable ABI of LibTorch: the only file of the project that includes torch.
//
// Every operation of ops.h and moe.h is registered once, as intarsia::<name>.out, under the CPU and CUDA keys; the schemas come
// from Python (intarsia_schema of the C API). A kernel takes its arguments off the stack in the order of fields.h, looks at
// them as TensorViews and calls intarsia::run. Nothing of ATen's C++ interface is used, so a build with one torch loads in
// later ones.
#include <dlfcn.h>

#include <cstring>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>

#include "api/fields.h"
#include "intarsia/error.h"
#include "intarsia/moe.h"

namespace {

using intarsia::Device;
using intarsia::DeviceType;
using intarsia::DType;
using intarsia::InvalidArgument;
using intarsia::TensorView;

void check(AOTITorchError status, const char* call) {
  if (status != TORCH_SUCCESS) throw intarsia::Error(std::string(call) + " failed inside torch");
}

// ---- tensors

/// Owns one reference to a torch tensor.
class TensorReference {
 public:
  explicit TensorReference(AtenTensorHandle handle) : handle_(handle) {}
  TensorReference(TensorReference&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  TensorReference& operator=(TensorReference&&) = delete;
  ~TensorReference() {
    if (handle_) aoti_torch_delete_tensor_object(handle_);
  }
  AtenTensorHandle get() const { return handle_; }

 private:
  AtenTensorHandle handle_;
};

DType dtype_of(AtenTensorHandle handle, const char* name) {
  std::int32_t code = 0;
  check(aoti_torch_get_dtype(handle, &code), "aoti_torch_get_dtype");
  if (code == aoti_torch_dtype_float32()) return DType::float32;
  if (code == aoti_torch_dtype_bfloat16()) return DType::bfloat16;
  if (code == aoti_torch_dtype_float16()) return DType::float16;
  if (code == aoti_torch_dtype_float64()) return DType::float64;
  if (code == aoti_torch_dtype_int32()) return DType::int32;
  if (code == aoti_torch_dtype_int64()) return DType::int64;
  if (code == aoti_torch_dtype_bool()) return DType::boolean;
  throw InvalidArgument(std::string(name) +
                        ": expected float32, bfloat16, float16, float64, int32, int64 or bool, got a tensor of " +
                        "another dtype; convert it with .to(dtype)");
}

Device device_of(AtenTensorHandle handle, const char* name) {
  std::int32_t type = 0, index = 0;
  check(aoti_torch_get_device_type(handle, &type), "aoti_torch_get_device_type");
  check(aoti_torch_get_device_index(handle, &index), "aoti_torch_get_device_index");
  if (type == aoti_torch_device_type_cpu()) return {DeviceType::cpu, 0};
  if (type == aoti_torch_device_type_cuda()) return {DeviceType::cuda, index};
  throw InvalidArgument(std::string(name) + ": expected a CPU or CUDA tensor; move it with .to(device)");
}

TensorView view_of(AtenTensorHandle handle, const char* name) {
  std::int64_t rank = 0;
  check(aoti_torch_get_dim(handle, &rank), "aoti_torch_get_dim");
  if (rank < 1 || rank > intarsia::kMaxRank)
    throw InvalidArgument(std::string(name) + ": expected 1 to 3 dimensions, got " + std::to_string(rank) + "; reshape it");
  TensorView view;
  view.dtype = dtype_of(handle, name);
  view.device = device_of(handle, name);
  view.rank = static_cast<int>(rank);
  std::int64_t *sizes = nullptr, *strides = nullptr;
  check(aoti_torch_get_sizes(handle, &sizes), "aoti_torch_get_sizes");
  check(aoti_torch_get_strides(handle, &strides), "aoti_torch_get_strides");
  for (std::size_t i = 0; i < static_cast<std::size_t>(rank); ++i) {
    view.shape[i] = sizes[i];
    view.stride[i] = strides[i];
  }
  check(aoti_torch_get_data_ptr(handle, &view.data), "aoti_torch_get_data_ptr");
  return view;
}

// ---- arguments

/// Takes the arguments of one call off the stack, which owns a reference to each: all of them are taken even when one is wrong,
/// and the first complaint is kept for `finish`. Visits the fields of an operation.
class Arguments {
 public:
  explicit Arguments(StableIValue* stack) : next_(stack) {}

  void in(const char* name, TensorView& view) { take_tensor(name, *next_++, view); }
  void out(const char* name, TensorView& view) { in(name, view); }
  void inout(const char* name, TensorView& view) { in(name, view); }
  void optional_in(const char* name, TensorView& view) {
    auto* boxed = torch::stable::detail::to<StableIValue*>(*next_++);
    if (boxed == nullptr) return;
    const StableIValue value = *boxed;
    delete boxed;  // as torch's own conversion to std::optional does
    take_tensor(name, value, view);
  }
  void optional_out(const char* name, TensorView& view) { optional_in(name, view); }
  void optional_inout(const char* name, TensorView& view) { optional_in(name, view); }

  void value(const char*, bool& v) { v = torch::stable::detail::to<bool>(*next_++); }
  void value(const char*, std::int64_t& v) { v = torch::stable::detail::to<std::int64_t>(*next_++); }
  void value(const char*, double& v) { v = torch::stable::detail::to<double>(*next_++); }
  template <class Enum>
  void value(const char*, Enum& v) {
    const std::string text = take_text(*next_++);
    attempt([&] { v = intarsia::parse<Enum>(text); });
  }

  /// Throws the first complaint.
  void finish(const char* operation) const {
    if (!complaint_.empty()) throw InvalidArgument(std::string(operation) + ": " + complaint_);
  }

  /// Of the first tensor on CUDA, or else the CPU.
  Device device() const { return device_; }

 private:
  template <class Body>
  void attempt(Body&& body) {
    try {
      body();
    } catch (const intarsia::Error& error) {
      if (complaint_.empty()) complaint_ = error.what();
    }
  }

  void take_tensor(const char* name, StableIValue value, TensorView& view) {
    tensors_.emplace_back(torch::stable::detail::to<AtenTensorHandle>(value));
    attempt([&] { view = view_of(tensors_.back().get(), name); });
    if (device_.type == DeviceType::cpu) device_ = view.device;
  }

  static std::string take_text(StableIValue value) {  // torch's own conversion to std::string leaks the copy
    const auto handle = torch::stable::detail::to<StringHandle>(value);
    const char* data = nullptr;
    std::size_t length = 0;
    std::string text;
    if (torch_string_c_str(handle, &data) == TORCH_SUCCESS && torch_string_length(handle, &length) == TORCH_SUCCESS)
      text.assign(data, length);
    torch_delete_string(handle);
    return text;
  }

  StableIValue* next_;
  std::vector<TensorReference> tensors_;
  std::string complaint_;
  Device device_;
};

// ---- what torch lends to a call

/// Workspace on the GPU from torch's caching allocator: tensors of bytes.
class TorchAllocator final : public intarsia::Allocator {
 public:
  explicit TorchAllocator(int index) : index_(index) {}

  void* allocate(std::size_t bytes) override {
    if (bytes == 0) return nullptr;
    const auto size = static_cast<std::int64_t>(bytes);
    const std::int64_t stride = 1;
    AtenTensorHandle handle = nullptr;
    if (aoti_torch_empty_strided(1, &size, &stride, aoti_torch_dtype_uint8(), aoti_torch_device_type_cuda(), index_, &handle) !=
        TORCH_SUCCESS)
      throw std::bad_alloc();
    TensorReference tensor(handle);
    void* data = nullptr;
    check(aoti_torch_get_data_ptr(handle, &data), "aoti_torch_get_data_ptr");
    tensors_.emplace(data, std::move(tensor));
    return data;
  }

  void deallocate(void* pointer, std::size_t) noexcept override { tensors_.erase(pointer); }

 private:
  int index_;
  std::unordered_map<void*, TensorReference> tensors_;
};

/// torch's current stream; the function exists only in a torch with CUDA, so it is looked up and not linked.
void* current_stream(int device_index) {
  using Function = AOTITorchError (*)(std::int32_t, void**);
  static const auto function = reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, "aoti_torch_get_current_cuda_stream"));
  if (function == nullptr) throw intarsia::Unsupported("CUDA tensors need a torch with CUDA; this one has none");
  void* stream = nullptr;
  check(function(device_index, &stream), "aoti_torch_get_current_cuda_stream");
  return stream;
}

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
void call(StableIValue* stack) {
  Op op;
  Arguments arguments(stack);
  intarsia::fields(arguments, op);
  intarsia::Context context;
  arguments.value("backend", context.backend);
  arguments.finish(Op::kName);
  if (arguments.device().type == DeviceType::cpu) return intarsia::run(op, context);
  TorchAllocator allocator(arguments.device().index);
  context.allocator = &allocator;
  context.stream = current_stream(arguments.device().index);
  intarsia::run(op, context);
}

/// torch knows no exception types of ours: the class travels as the first word of the message, and Python takes it off again.
template <class Op>
void kernel(StableIValue* stack, std::uint64_t, std::uint64_t) {
  try {
    call<Op>(stack);
  } catch (const InvalidArgument& error) {
    throw std::runtime_error(std::string("intarsia.InvalidArgument: ") + error.what());
  } catch (const intarsia::Unsupported& error) {
    throw std::runtime_error(std::string("intarsia.Unsupported: ") + error.what());
  }
}

void register_all(torch::stable::detail::StableLibrary& library) {
#define INTARSIA_REGISTER(Op) library.impl((std::string(intarsia::Op::kName) + ".out").c_str(), &kernel<intarsia::Op>);
  INTARSIA_FOR_EACH_OPERATION(INTARSIA_REGISTER)
  INTARSIA_FOR_EACH_COMPOSITION(INTARSIA_REGISTER)
#undef INTARSIA_REGISTER
}

[[maybe_unused]] const bool pool_lent = [] {
  intarsia::set_thread_pool({torch_threads, run_on_torch_threads});
  return true;
}();

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(intarsia, CPU, library) { register_all(library); }
STABLE_TORCH_LIBRARY_IMPL(intarsia, CUDA, library) { register_all(library); }
