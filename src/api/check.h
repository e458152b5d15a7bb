// Checks of one call's arguments. Letters are bound by the first tensor that has them; every later one must agree, and the
// message says where the letter came from:  "up_forward: w_up: expected (E, 2I, H) with E = 8 (expert_offsets), H = 64 (x),
// got (8, 32, 60)".
#pragma once

#include <array>
#include <initializer_list>
#include <string>
#include <string_view>

#include "base/words.h"
#include "intarsia/config.h"
#include "intarsia/error.h"
#include "intarsia/types.h"

namespace intarsia {

/// An axis: a letter times a factor, plus an addend ("2I" is {'I', 2}, "E+1" is {'E', 1, 1}), or a plain number ({0, 1, n}).
struct Axis {
  char letter;
  std::int64_t factor = 1;
  std::int64_t addend = 0;
};

class Checker {
 public:
  explicit Checker(const char* operation) : operation_(operation) {}

  /// Throws InvalidArgument "operation: argument: message".
  [[noreturn]] void fail(std::string_view argument, const std::string& message) const;
  /// The message is put together from `parts` (text, whole numbers, views for their shapes) when the condition fails.
  template <class... Parts>
  void require(bool condition, std::string_view argument, const Parts&... parts) const {
    if (condition) [[likely]]
      return;
    std::string message;
    append_words(message, parts...);
    fail(argument, message);
  }

  /// Rank, axes, data pointer. Absent views pass: required ones are told apart by `present`.
  void shape(const char* argument, const TensorView& v, std::initializer_list<Axis> axes);
  /// An axis of at least `least` entries: row lists and row buffers, whose capacity may exceed what a letter says.
  void capacity(const char* argument, std::int64_t size, std::int64_t least, const char* what) const;
  void present(const char* argument, const TensorView& v, const char* why) const;
  void absent(const char* argument, const TensorView& v, const char* why) const;

  void dtype(const char* argument, const TensorView& v, std::initializer_list<DType> allowed) const;
  /// Contiguous, and with memory: what is read by a plain index.
  void contiguous(const char* argument, const TensorView& v) const;
  /// Unit stride along the last axis.
  void dense_rows(const char* argument, const TensorView& v) const;
  /// No two elements of an output share memory.
  void writable(const char* argument, const TensorView& v) const;
  void distinct(const char* output, const TensorView& out, const char* input, const TensorView& in) const;

  std::int64_t bound(char letter) const { return letters_[index(letter)].value; }
  void bind(char letter, std::int64_t value, const char* origin);

 private:
  void memory(const char* argument, const TensorView& v) const;
  struct Letter {
    std::int64_t value = -1;
    std::string origin;
  };
  static std::size_t index(char letter) { return static_cast<std::size_t>(letter - 'A'); }
  std::string expected(std::initializer_list<Axis> axes) const;

  const char* operation_;
  std::array<Letter, 26> letters_{};
};

std::string shape_text(const TensorView& v);
/// A view in a message is its shape.
void append_word(std::string& text, const TensorView& v);

}  // namespace intarsia
