// Cuts a workspace into aligned pieces. The same function that takes the pieces also counts them: a default-constructed
// Workspace hands out null pointers and bytes() says what a real one must hold.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/execution.h"

namespace intarsia {

class Workspace {
 public:
  Workspace() = default;
  explicit Workspace(std::byte* memory) : memory_(memory) {}

  template <class T>
  T* take(std::int64_t count) {
    auto* piece = memory_ ? reinterpret_cast<T*>(memory_ + bytes_) : nullptr;
    bytes_ += align_up(static_cast<std::size_t>(count) * sizeof(T));
    return piece;
  }

  std::size_t bytes() const { return bytes_; }

 private:
  std::byte* memory_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace intarsia
