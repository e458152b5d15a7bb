// Which backend takes a call: decided by where its tensors are, by their dtypes, and by what the caller asked for.
#pragma once

#include <string>

#include "api/fields.h"

namespace intarsia {

/// What the choice depends on: the one device of all tensors, and whether any is float64. Visits an operation's fields.
struct Survey {
  const char* operation = "";
  Device device = {};
  const char* first = nullptr;  ///< the tensor that has decided the device
  bool float64 = false;
  DType widest_float = DType::float32;

  /// Throws InvalidArgument when two tensors are on different devices.
  void look(const char* name, const TensorView& v) {
    if (!v.defined()) return;
    if (first == nullptr) {
      device = v.device;
      first = name;
    } else if (!(v.device == device)) {
      fail(name, v.device);
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

 private:
  [[noreturn]] void fail(const char* name, Device other) const;
};

template <class Op>
Survey survey(const Op& op) {
  Survey s{.operation = Op::kName};
  fields(s, const_cast<Op&>(op));  // it only looks
  return s;
}

struct Choice {
  Backend backend;
  const char* why;
  std::string refusal;  ///< not empty: nothing can run this
};

Choice choose(const Survey&, Backend wanted);

/// Throws InvalidArgument for a stream of another device than the tensors'.
void check_stream(const Survey&, const Choice&, void* stream);

}  // namespace intarsia
