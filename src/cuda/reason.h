// Why a set of tensor-core kernels cannot take an operation: the first thing that is missing, in words.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "base/words.h"
#include "intarsia/config.h"
#include "intarsia/types.h"

namespace intarsia::cuda {

inline constexpr std::int64_t kChunk = 8;  // 16-bit elements of 16 bytes

inline constexpr std::int64_t kMostChunks = std::numeric_limits<std::uint32_t>::max();  // that a 32-bit count addresses

inline bool on_chunk(const void* data) { return reinterpret_cast<std::uintptr_t>(data) % 16 == 0; }

/// What all of them need: 16-bit elements, sizes and rows of whole 16-byte chunks.
class Reason {
 public:
  explicit Reason(const char* kernels) : kernels_(kernels) {}

  /// The words are put together from `parts`, text and whole numbers, when the condition fails: every launch asks twice.
  template <class... Parts>
  void need(bool condition, const Parts&... parts) {
    if (!condition && text_.empty()) append_words(text_, parts...);
  }
  void dtype(const TensorView& v) {
    need(v.dtype == DType::bfloat16 || v.dtype == DType::float16, kernels_, " kernels take bfloat16 and float16, not ",
         to_string(v.dtype));
  }
  void chunks(const char* letter, std::int64_t size) {
    need(size > 0 && size % kChunk == 0, letter, " = ", size, " is not a multiple of 8 above 0");
  }
  void rows(const char* name, const TensorView& v) {
    if (!v.defined() || v.numel() == 0) return;
    need(v.step(1) == 1 && v.step(0) % kChunk == 0 && on_chunk(v.data), name,
         ": rows must be contiguous and begin at multiples of 16 bytes");
  }
  /// For kernels that address what they read in 32-bit counts of 16 bytes.
  void countable(const char* name, const TensorView& v) {
    if (!v.defined() || v.numel() == 0) return;
    const std::int64_t last = (v.size(0) - 1) * (v.step(0) / kChunk) + v.size(1) / kChunk;
    need(v.step(0) >= 0 && last <= kMostChunks, name, ": rows in descending order, or 64 GiB and more");
  }
  /// True when nothing is missing; `why_not` may be null.
  bool verdict(std::string* why_not) const {
    if (why_not) *why_not = text_;
    return text_.empty();
  }

 private:
  const char* kernels_;
  std::string text_;
};

}  // namespace intarsia::cuda
