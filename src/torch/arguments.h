// What every torch operator needs: its arguments off the stack, tensors as views, torch's memory and stream, errors that keep
// their class. Everything is LibTorch's stable ABI.
#pragma once

#include <dlfcn.h>

#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>

#include "intarsia/error.h"
#include "intarsia/ops.h"

namespace intarsia::torch_shim {

inline void check(AOTITorchError status, const char* call) {
  if (status != TORCH_SUCCESS) throw Error(std::string(call) + " failed inside torch");
}

// ---- tensors

/// Owns one reference to a torch tensor.
class TensorReference {
 public:
  explicit TensorReference(AtenTensorHandle handle) : handle_(handle) {}
  TensorReference(TensorReference&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  TensorReference& operator=(TensorReference&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~TensorReference() {
    if (handle_) aoti_torch_delete_tensor_object(handle_);
  }
  AtenTensorHandle get() const { return handle_; }
  AtenTensorHandle release() { return std::exchange(handle_, nullptr); }

 private:
  AtenTensorHandle handle_;
};

/// torch's number of a dtype.
inline std::int32_t code_of(DType dtype) {
  switch (dtype) {
    case DType::float32: return aoti_torch_dtype_float32();
    case DType::bfloat16: return aoti_torch_dtype_bfloat16();
    case DType::float16: return aoti_torch_dtype_float16();
    case DType::float64: return aoti_torch_dtype_float64();
    case DType::int32: return aoti_torch_dtype_int32();
    case DType::int64: return aoti_torch_dtype_int64();
    case DType::boolean: return aoti_torch_dtype_bool();
  }
  return -1;
}

inline DType dtype_of(AtenTensorHandle handle, const char* name) {
  std::int32_t code = 0;
  check(aoti_torch_get_dtype(handle, &code), "aoti_torch_get_dtype");
  for (const DType dtype :
       {DType::bfloat16, DType::float32, DType::int32, DType::float16, DType::float64, DType::int64, DType::boolean})
    if (code == code_of(dtype)) return dtype;
  throw InvalidArgument(std::string(name) +
                        ": expected float32, bfloat16, float16, float64, int32, int64 or bool, got a tensor of " +
                        "another dtype; convert it with .to(dtype)");
}

inline Device device_of(AtenTensorHandle handle, const char* name) {
  std::int32_t type = 0, index = 0;
  check(aoti_torch_get_device_type(handle, &type), "aoti_torch_get_device_type");
  check(aoti_torch_get_device_index(handle, &index), "aoti_torch_get_device_index");
  if (type == aoti_torch_device_type_cpu()) return {DeviceType::cpu, 0};
  if (type == aoti_torch_device_type_cuda()) return {DeviceType::cuda, index};
  throw InvalidArgument(std::string(name) + ": expected a CPU or CUDA tensor; move it with .to(device)");
}

inline TensorView view_of(AtenTensorHandle handle, const char* name) {
  std::int64_t rank = 0;
  check(aoti_torch_get_dim(handle, &rank), "aoti_torch_get_dim");
  if (rank < 1 || rank > kMaxRank)
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

/// Fresh memory from torch. Throws std::bad_alloc: why there is none is not in the stable ABI.
inline TensorReference empty_tensor(Device device, std::int32_t dtype, std::int64_t rank, const std::int64_t* sizes,
                                    const std::int64_t* strides) {
  const std::int32_t type = device.type == DeviceType::cuda ? aoti_torch_device_type_cuda() : aoti_torch_device_type_cpu();
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(rank, sizes, strides, dtype, type, device.index, &handle) != TORCH_SUCCESS)
    throw std::bad_alloc();
  return TensorReference(handle);
}

// ---- arguments

/// Takes the arguments of one call off the stack, which owns a reference to each: all of them are taken even when one is wrong,
/// and the first complaint is kept for `finish`. Visits the fields of an operation.
class Arguments {
 public:
  explicit Arguments(StableIValue* stack) : next_(stack) { tensors_.reserve(32); }

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
    attempt([&] { v = parse<Enum>(text); });
  }

  /// Hands a text to `body`, which may complain.
  template <class Body>
  void text(Body&& body) {
    const std::string text = take_text(*next_++);
    attempt([&] { body(text); });
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
    } catch (const Error& error) {
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
class TorchAllocator final : public Allocator {
 public:
  explicit TorchAllocator(int index) : index_(index) {}

  void* allocate(std::size_t bytes) override {
    if (bytes == 0) return nullptr;
    const auto size = static_cast<std::int64_t>(bytes);
    const std::int64_t stride = 1;
    TensorReference tensor = empty_tensor({DeviceType::cuda, index_}, aoti_torch_dtype_uint8(), 1, &size, &stride);
    void* data = nullptr;
    check(aoti_torch_get_data_ptr(tensor.get(), &data), "aoti_torch_get_data_ptr");
    blocks_.emplace_back(data, std::move(tensor));
    return data;
  }

  void deallocate(void* pointer, std::size_t) noexcept override {
    std::erase_if(blocks_, [=](const auto& block) { return block.first == pointer; });
  }

 private:
  int index_;
  std::vector<std::pair<void*, TensorReference>> blocks_;  // hardly ever more than three
};

/// torch's current stream; the function exists only in a torch with CUDA, so it is looked up and not linked.
inline void* current_stream(int device_index) {
  using Function = AOTITorchError (*)(std::int32_t, void**);
  static const auto function = reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, "aoti_torch_get_current_cuda_stream"));
  if (function == nullptr) throw Unsupported("CUDA tensors need a torch with CUDA; this one has none");
  void* stream = nullptr;
  check(function(device_index, &stream), "aoti_torch_get_current_cuda_stream");
  return stream;
}

/// Runs an operation on tensors of one device, with torch's stream and memory.
template <class Op>
void run_with_torch(const Op& op, Context context, Device device) {
  if (device.type == DeviceType::cpu) return run(op, context);
  TorchAllocator allocator(device.index);
  context.allocator = &allocator;
  context.stream = current_stream(device.index);
  run(op, context);
}

/// torch knows no exception types of ours: the class travels as the first word of the message, and Python takes it off again.
template <class Body>
void with_typed_errors(Body&& body) {
  try {
    body();
  } catch (const InvalidArgument& error) {
    throw std::runtime_error(std::string("intarsia.InvalidArgument: ") + error.what());
  } catch (const Unsupported& error) {
    throw std::runtime_error(std::string("intarsia.Unsupported: ") + error.what());
  } catch (const std::bad_alloc&) {
    throw std::runtime_error("intarsia.OutOfMemory: out of memory: no room for the outputs or the workspace of this call");
  }
}

}  // namespace intarsia::torch_shim
