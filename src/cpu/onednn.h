// libintarsia_cpu.so, opened on first use from the directory of this library.
#pragma once

#include <string>

#include "cpu/onednn/interface.h"

namespace intarsia::cpu {

class Onednn {
 public:
  /// Opens the library on the first call. It stays open: threads keep what they prepared in it.
  static const Onednn& instance();

  bool available() const { return multiply_ != nullptr; }
  bool multiplies_bfloat16() const { return bfloat16_; }

  /// False when oneDNN has no fast product of this kind; nothing was written then.
  bool multiply(const intarsia_product& product, const void* a, const void* b, float* c) const {
    return multiply_(&product, a, b, c) == 0;
  }

  /// Version and instruction set of a dtype, or why there is none.
  std::string describe(bool bfloat16) const;

 private:
  Onednn();

  intarsia_onednn_multiply_function multiply_ = nullptr;
  intarsia_onednn_describe_function describe_ = nullptr;
  bool bfloat16_ = false;
  std::string reason_;
};

}  // namespace intarsia::cpu
