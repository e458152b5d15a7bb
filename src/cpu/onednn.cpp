#include "cpu/onednn.h"

#include <dlfcn.h>

#include <cstdlib>

#include "cpu/cpu.h"

namespace intarsia::cpu {
namespace {

constexpr const char* kLibrary = "libintarsia_cpu.so";

/// Path of kLibrary beside the file that holds this function.
std::string library_path() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&library_path), &info) == 0 || info.dli_fname == nullptr) return kLibrary;
  const std::string file = info.dli_fname;
  const std::size_t slash = file.rfind('/');
  return slash == std::string::npos ? kLibrary : file.substr(0, slash + 1) + kLibrary;
}

}  // namespace

const Onednn& Onednn::instance() {
  static const Onednn library;
  return library;
}

Onednn::Onednn() {
  if (const char* choice = std::getenv("INTARSIA_ONEDNN"); choice && std::string(choice) == "OFF") {
    reason_ = "INTARSIA_ONEDNN=OFF";
    return;
  }
  void* library = dlopen(library_path().c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* error = dlerror();
    reason_ = error ? error : "libintarsia_cpu.so did not open";
    return;
  }
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
  };
  intarsia_onednn_interface_function version = nullptr;
  find(version, "intarsia_onednn_interface");
  if (version == nullptr || version() != INTARSIA_ONEDNN_INTERFACE) {
    reason_ = "libintarsia_cpu.so is of another version; install both libraries from one build";
    return;
  }
  find(describe_, "intarsia_onednn_describe");
  find(multiply_, "intarsia_onednn_multiply");
  bfloat16_ = describe_(1) != nullptr;
}

std::string Onednn::describe(bool bfloat16) const {
  if (!available()) return "plain blocked loops: " + reason_;
  return describe_(bfloat16 ? 1 : 0);
}

std::string describe_gemm(DType dtype) {
  const Onednn& onednn = Onednn::instance();
  const bool native = dtype == DType::bfloat16 && onednn.multiplies_bfloat16();
  const std::string text = onednn.describe(native);
  if (dtype == DType::float32 || native) return text;
  return text + ", " + std::string(to_string(dtype)) + " blocks widened to float32";
}

}  // namespace intarsia::cpu
