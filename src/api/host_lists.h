// INTARSIA_CHECK=1: the values of lists on a GPU are checked like those on the CPU. The host cannot read them where they are,
// so a call is validated in a copy of its own whose lists are on the host; what runs afterwards is the call as it was given.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "api/fields.h"

namespace intarsia {

/// The host's copies of a call's lists, alive as long as this is. A list is a contiguous int32 input: what is neither of them
/// stays where it is, since validate refuses it before it reads it.
class HostLists {
 public:
  /// Copies bytes from a device to the host, and returns when they are there.
  using Copy = std::function<void(void* to, const void* from, std::size_t bytes)>;

  explicit HostLists(Copy copy) : copy_(std::move(copy)) {}

  template <class Op>
  Op of(Op op) {
    fields(*this, op);
    return op;
  }

  void in(const char*, TensorView& v) {
    const std::int64_t count = v.numel();
    if (v.dtype != DType::int32 || !v.contiguous() || v.data == nullptr || count < 0) return;
    auto& list = lists_.emplace_back(static_cast<std::size_t>(count));
    if (count > 0) copy_(list.data(), v.data, list.size() * sizeof(std::int32_t));
    v.data = list.data();
    v.device = {};
  }
  void optional_in(const char* name, TensorView& v) { in(name, v); }
  void out(const char*, TensorView&) {}
  void optional_out(const char*, TensorView&) {}
  void inout(const char*, TensorView&) {}
  void optional_inout(const char*, TensorView&) {}
  template <class T>
  void value(const char*, T&) {}

 private:
  Copy copy_;
  std::vector<std::vector<std::int32_t>> lists_;
};

}  // namespace intarsia
