#include "api/schema.h"

#include <type_traits>

#include "api/fields.h"
#include "intarsia/error.h"

namespace intarsia {
namespace {

class SchemaWriter {
 public:
  void in(const char* name, TensorView&) { add("Tensor", name); }
  void optional_in(const char* name, TensorView&) { add("Tensor?", name); }
  void out(const char* name, TensorView&) { add(alias(), name); }
  void optional_out(const char* name, TensorView&) { add(alias() + "?", name); }
  void inout(const char* name, TensorView&) { add(alias(), name); }
  void optional_inout(const char* name, TensorView&) { add(alias() + "?", name); }

  template <class T>
  void value(const char* name, T&) {
    if constexpr (std::is_enum_v<T>) add("str", name);
    else if constexpr (std::is_same_v<T, bool>) add("bool", name);
    else if constexpr (std::is_same_v<T, double>) add("float", name);
    else add("int", name);
  }

  std::string text(std::string_view operation) {
    return std::string(operation) + ".out(" + arguments_ + ", str backend) -> ()";
  }

 private:
  void add(const std::string& type, const char* name) { arguments_ += (arguments_.empty() ? "" : ", ") + type + " " + name; }
  std::string alias() { return std::string("Tensor(") + static_cast<char>('a' + outputs_++) + "!)"; }

  std::string arguments_;
  int outputs_ = 0;
};

}  // namespace

std::string schema(std::string_view operation) {
  std::string result;
  const auto attempt = [&]<class Op>(Op op) {
    if (operation != Op::kName) return;
    SchemaWriter writer;
    fields(writer, op);
    result = writer.text(operation);
  };
#define INTARSIA_ATTEMPT(Op) attempt(Op{});
  INTARSIA_FOR_EACH_OPERATION(INTARSIA_ATTEMPT)
  INTARSIA_FOR_EACH_COMPOSITION(INTARSIA_ATTEMPT)
#undef INTARSIA_ATTEMPT
  if (result.empty()) throw InvalidArgument("operation: there is none named \"" + std::string(operation) + "\"");
  return result;
}

}  // namespace intarsia
