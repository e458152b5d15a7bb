#include "api/check.h"

#include <algorithm>

namespace intarsia {
namespace {

std::string axis_text(const Axis& axis) {
  if (axis.letter == 0) return std::to_string(axis.addend);
  std::string text = axis.factor == 1 ? "" : std::to_string(axis.factor);
  text += axis.letter;
  if (axis.addend != 0) text += "+" + std::to_string(axis.addend);
  return text;
}

}  // namespace

std::string shape_text(const TensorView& v) {
  std::string text = "(";
  for (int i = 0; i < v.rank; ++i) text += (i ? ", " : "") + std::to_string(v.size(i));
  return text + ")";
}

void append_word(std::string& text, const TensorView& v) { text += shape_text(v); }

void Checker::fail(std::string_view argument, const std::string& message) const {
  throw InvalidArgument(std::string(operation_) + ": " + std::string(argument) + ": " + message);
}

std::string Checker::expected(std::initializer_list<Axis> axes) const {
  std::string text = "(", known;
  bool first = true;
  for (const Axis& axis : axes) {
    text += (first ? "" : ", ") + axis_text(axis);
    first = false;
    if (axis.letter == 0) continue;
    const Letter& letter = letters_[index(axis.letter)];
    if (letter.value >= 0)
      known += std::string(known.empty() ? " with " : ", ") + axis.letter + " = " + std::to_string(letter.value) + " (" +
               letter.origin + ")";
  }
  return text + ")" + known;
}

void Checker::bind(char letter, std::int64_t value, const char* origin) {
  Letter& slot = letters_[index(letter)];
  if (slot.value < 0) slot = {value, std::string(origin)};
}

void Checker::shape(const char* argument, const TensorView& v, std::initializer_list<Axis> axes) {
  if (!v.defined()) return;
  bool ok = v.rank == static_cast<int>(axes.size());
  int i = 0;
  for (const Axis& axis : axes) {
    if (!ok) break;
    const std::int64_t n = v.size(i++);
    if (n < 0) {
      ok = false;
    } else if (axis.letter == 0) {
      ok = n == axis.addend;
    } else if (const Letter& letter = letters_[index(axis.letter)]; letter.value >= 0) {
      ok = n == letter.value * axis.factor + axis.addend;
    } else {
      ok = n >= axis.addend && (n - axis.addend) % axis.factor == 0;
    }
  }
  if (!ok) fail(argument, "expected " + expected(axes) + ", got " + shape_text(v));
  i = 0;
  for (const Axis& axis : axes) {
    const std::int64_t n = v.size(i++);
    if (axis.letter != 0) bind(axis.letter, (n - axis.addend) / axis.factor, argument);
  }
  memory(argument, v);
}

void Checker::memory(const char* argument, const TensorView& v) const {
  require(v.data != nullptr || v.numel() == 0, argument, "expected memory for ", v, ", got a null pointer");
}

void Checker::capacity(const char* argument, std::int64_t size, std::int64_t least, const char* what) const {
  require(size >= least, argument, "expected at least ", least, " entries (", what, "), got ", size);
}

void Checker::present(const char* argument, const TensorView& v, const char* why) const {
  require(v.defined(), argument, "is missing: ", why);
}

void Checker::absent(const char* argument, const TensorView& v, const char* why) const {
  require(!v.defined(), argument, "must be left out: ", why);
}

void Checker::dtype(const char* argument, const TensorView& v, std::initializer_list<DType> allowed) const {
  if (!v.defined() || std::find(allowed.begin(), allowed.end(), v.dtype) != allowed.end()) return;
  std::string text;
  for (DType d : allowed) text += (text.empty() ? "" : " or ") + std::string(to_string(d));
  fail(argument, "expected dtype " + text + ", got " + std::string(to_string(v.dtype)) + "; convert it first");
}

void Checker::contiguous(const char* argument, const TensorView& v) const {
  if (!v.defined()) return;
  require(v.numel() == 0 || v.contiguous(), argument, "expected a contiguous tensor; pass a contiguous copy");
  memory(argument, v);
}

void Checker::dense_rows(const char* argument, const TensorView& v) const {
  if (v.defined())
    require(v.numel() == 0 || v.size(v.rank - 1) == 1 || v.step(v.rank - 1) == 1, argument,
            "expected unit stride along the last axis, got ", v.step(v.rank - 1));
}

void Checker::writable(const char* argument, const TensorView& v) const {
  for (int i = 0; i < v.rank; ++i)
    require(v.size(i) <= 1 || v.step(i) != 0, argument,
            "is an output and must not be an expanded view (stride 0); pass a real tensor");
}

void Checker::distinct(const char* output, const TensorView& out, const char* input, const TensorView& in) const {
  if (out.defined() && in.defined() && out.numel() > 0 && in.numel() > 0)
    require(out.data != in.data, output, "must not share memory with ", input, "; pass another tensor");
}

}  // namespace intarsia
