// From a runtime dtype to a C++ type: dispatch_float(x.dtype, [&](auto tag) { using T = typename decltype(tag)::type; ... }).
#pragma once

#include <string>
#include <type_traits>

#include "base/half.h"
#include "intarsia/config.h"
#include "intarsia/error.h"

namespace intarsia {

template <class T>
struct Tag {
  using type = T;
};

template <class Body>
decltype(auto) dispatch_float(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::float64: return body(Tag<double>{});
    case DType::float32: return body(Tag<float>{});
    case DType::bfloat16: return body(Tag<bfloat16>{});
    case DType::float16: return body(Tag<float16>{});
    default: throw Unsupported("expected a floating-point dtype, got " + std::string(to_string(dtype)));
  }
}

template <class Body>
decltype(auto) dispatch_index(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::int32: return body(Tag<std::int32_t>{});
    case DType::int64: return body(Tag<std::int64_t>{});
    default: throw Unsupported("expected int32 or int64, got " + std::string(to_string(dtype)));
  }
}

}  // namespace intarsia
