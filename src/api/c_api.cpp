// The C interface. Operations are found by name, their fields filled from the caller's arguments; exceptions become status
// codes.
#include "intarsia/c_api.h"

#include <array>
#include <exception>
#include <new>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "api/doctor.h"
#include "api/fields.h"
#include "api/plan_fields.h"
#include "api/schema.h"
#include "base/memory_counter.h"
#include "intarsia/error.h"
#include "intarsia/version.h"

namespace intarsia {
namespace {

thread_local std::string last_error;
thread_local std::string last_text;

template <class Body>
intarsia_status guarded(Body&& body) noexcept {
  try {
    body();
    return INTARSIA_OK;
  } catch (const InvalidArgument& error) {
    last_error = error.what();
    return INTARSIA_INVALID_ARGUMENT;
  } catch (const Unsupported& error) {
    last_error = error.what();
    return INTARSIA_UNSUPPORTED;
  } catch (const std::bad_alloc&) {
    last_error = "out of memory";
    return INTARSIA_OUT_OF_MEMORY;
  } catch (const std::exception& error) {
    last_error = error.what();
    return INTARSIA_INTERNAL_ERROR;
  }
}

DType dtype_of(const char* name, DLDataType d) {
  if (d.lanes == 1) {
    if (d.code == kDLFloat && d.bits == 64) return DType::float64;
    if (d.code == kDLFloat && d.bits == 32) return DType::float32;
    if (d.code == kDLFloat && d.bits == 16) return DType::float16;
    if (d.code == kDLBfloat && d.bits == 16) return DType::bfloat16;
    if (d.code == kDLInt && d.bits == 64) return DType::int64;
    if (d.code == kDLInt && d.bits == 32) return DType::int32;
    if ((d.code == kDLBool || d.code == kDLUInt) && d.bits == 8) return DType::boolean;
  }
  throw InvalidArgument(
      std::string(name) + ": expected float64, float32, bfloat16, float16, int64, int32 or bool, got DLPack code " +
      std::to_string(d.code) + " with " + std::to_string(d.bits) + " bits, " + std::to_string(d.lanes) + " lanes");
}

TensorView view_of(const char* name, const DLTensor* tensor) {
  TensorView v;
  if (tensor == nullptr) return v;
  if (tensor->ndim < 1 || tensor->ndim > kMaxRank)
    throw InvalidArgument(std::string(name) + ": expected 1 to 3 axes, got " + std::to_string(tensor->ndim));
  if (tensor->device.device_type != kDLCPU && tensor->device.device_type != kDLCUDA)
    throw InvalidArgument(std::string(name) + ": expected a CPU or CUDA tensor, got DLPack device " +
                          std::to_string(tensor->device.device_type));
  v.data = static_cast<char*>(tensor->data) + tensor->byte_offset;
  v.dtype = dtype_of(name, tensor->dtype);
  v.device = {tensor->device.device_type == kDLCPU ? DeviceType::cpu : DeviceType::cuda, tensor->device.device_id};
  v.rank = tensor->ndim;
  std::int64_t step = 1;
  for (int i = v.rank - 1; i >= 0; --i) {
    const auto axis = static_cast<std::size_t>(i);
    v.shape[axis] = tensor->shape[i];
    v.stride[axis] = tensor->strides ? tensor->strides[i] : step;
    step *= tensor->shape[i];
  }
  return v;
}

/// Fills the fields of a struct from named arguments; leftover() names an argument that no field took.
class Binder {
 public:
  Binder(const intarsia_argument* arguments, std::size_t count) : arguments_(arguments), count_(count), taken_(count, false) {}

  void in(const char* name, TensorView& v) { tensor(name, v); }
  void optional_in(const char* name, TensorView& v) { tensor(name, v); }
  void out(const char* name, TensorView& v) { tensor(name, v); }
  void optional_out(const char* name, TensorView& v) { tensor(name, v); }
  void inout(const char* name, TensorView& v) { tensor(name, v); }
  void optional_inout(const char* name, TensorView& v) { tensor(name, v); }

  template <class T>
  void value(const char* name, T& target) {
    const intarsia_argument* a = find(name);
    if (a == nullptr) return;
    if constexpr (std::is_enum_v<T>) {
      expect(*a, a->kind == INTARSIA_KIND_TEXT && a->text != nullptr, "text");
      target = parse<T>(a->text);
    } else if constexpr (std::is_same_v<T, double>) {
      expect(*a, a->kind == INTARSIA_KIND_REAL || a->kind == INTARSIA_KIND_INTEGER, "a number");
      target = a->kind == INTARSIA_KIND_REAL ? a->real : static_cast<double>(a->integer);
    } else {
      expect(*a, a->kind == INTARSIA_KIND_INTEGER, "an integer");
      target = static_cast<T>(a->integer);
    }
  }

  void finish(std::string_view what) const {
    for (std::size_t i = 0; i < count_; ++i)
      if (!taken_[i])
        throw InvalidArgument(std::string(what) + ": has no argument \"" + arguments_[i].name +
                              "\"; see intarsia/ops.h and moe.h for its fields");
  }

 private:
  static void expect(const intarsia_argument& a, bool ok, const char* what) {
    if (!ok) throw InvalidArgument(std::string(a.name) + ": expected " + what);
  }

  void tensor(const char* name, TensorView& v) {
    const intarsia_argument* a = find(name);
    if (a == nullptr) return;
    expect(*a, a->kind == INTARSIA_KIND_TENSOR, "a tensor");
    v = view_of(name, a->tensor);
  }

  const intarsia_argument* find(std::string_view name) {
    for (std::size_t i = 0; i < count_; ++i) {
      if (name != arguments_[i].name) continue;
      taken_[i] = true;
      return &arguments_[i];
    }
    return nullptr;
  }

  const intarsia_argument* arguments_;
  std::size_t count_;
  std::vector<bool> taken_;
};

/// body(op) for the operation of that name, its fields filled.
template <class Body>
void with_operation(const char* operation, const intarsia_argument* arguments, std::size_t count, Body&& body) {
  const std::string_view name = operation ? operation : "";
  bool found = false;
  const auto attempt = [&]<class Op>(Op op) {
    if (found || name != Op::kName) return;
    found = true;
    Binder binder(arguments, count);
    fields(binder, op);
    binder.finish(name);
    body(op);
  };
#define INTARSIA_ATTEMPT(Op) attempt(Op{});
  INTARSIA_FOR_EACH_OPERATION(INTARSIA_ATTEMPT)
  INTARSIA_FOR_EACH_COMPOSITION(INTARSIA_ATTEMPT)
#undef INTARSIA_ATTEMPT
  if (!found)
    throw InvalidArgument("operation: there is none named \"" + std::string(name) + "\"; intarsia_operation lists them");
}

Backend backend_of(const char* text) { return text ? parse<Backend>(text) : Backend::automatic; }

}  // namespace
}  // namespace intarsia

using namespace intarsia;  // the functions below are the C interface's own, outside any namespace

int intarsia_abi_version(void) { return INTARSIA_ABI_VERSION; }
const char* intarsia_version(void) { return INTARSIA_VERSION; }
const char* intarsia_last_error(void) { return last_error.c_str(); }

intarsia_status intarsia_run(const char* operation, const intarsia_argument* arguments, size_t count, const char* backend,
                             void* stream) {
  return guarded([&] {
    const Context context{backend_of(backend), stream, nullptr};
    with_operation(operation, arguments, count, [&](const auto& op) { run(op, context); });
  });
}

intarsia_status intarsia_explain(const char* operation, const intarsia_argument* arguments, size_t count, const char* backend,
                                 const char** text) {
  return guarded([&] {
    const Context context{backend_of(backend), nullptr, nullptr};
    with_operation(operation, arguments, count, [&](const auto& op) { last_text = explain(op, context); });
    *text = last_text.c_str();
  });
}

const char* intarsia_operation(size_t index) {
#define INTARSIA_NAME(Op) Op::kName,
  static constexpr auto kNames =
      std::to_array<const char*>({INTARSIA_FOR_EACH_OPERATION(INTARSIA_NAME) INTARSIA_FOR_EACH_COMPOSITION(INTARSIA_NAME)});
#undef INTARSIA_NAME
  return index < kNames.size() ? kNames[index] : nullptr;
}

const char* intarsia_schema(const char* operation) {
  const intarsia_status status = guarded([&] { last_text = schema(operation ? operation : ""); });
  return status == INTARSIA_OK ? last_text.c_str() : nullptr;
}

intarsia_status intarsia_plan(const intarsia_argument* arguments, size_t count, const char** json) {
  return guarded([&] {
    LayerShape shape;
    PlanOptions options;
    Binder binder(arguments, count);
    fields(binder, shape);
    fields(binder, options);
    binder.finish("plan");
    last_text = to_json(plan_layer(shape, options));
    *json = last_text.c_str();
  });
}

intarsia_status intarsia_doctor(const char** json) {
  return guarded([&] {
    last_text = doctor_json();
    *json = last_text.c_str();
  });
}

int intarsia_num_threads(void) { return num_threads(); }

intarsia_status intarsia_set_num_threads(int threads) {
  return guarded([&] { set_num_threads(threads); });
}

void intarsia_memory(size_t* live, size_t* peak) {
  const AllocatorStats host = host_allocator_stats(), device = device_workspaces().stats();
  *live = host.live + device.live;
  *peak = host.peak + device.peak;
}

void intarsia_memory_reset(void) {
  reset_host_allocator_stats();
  device_workspaces().reset();
}
