// The operations by name.
#include "cases/operations.h"

#include "cases/gradients.h"

namespace intarsia::cases {
namespace {

bool matches(const std::string& name, std::string_view filter) { return name.find(filter) != std::string::npos; }

template <class Op>
Operation operation() {
  Operation result{.name = Op::kName};
  result.verify = [](Backend backend, std::string_view filter, bool with_benchmarks) {
    std::vector<Outcome> outcomes;
    for (const Case<Op>& c : with_benchmarks ? benchmarks<Op>() : cases<Op>())
      if (matches(c.name, filter)) outcomes.push_back(verify(c, backend));
    if (backend == Backend::reference && !with_benchmarks)
      for (Outcome& outcome : verify_gradients(Op::kName, filter)) outcomes.push_back(std::move(outcome));
    return outcomes;
  };
  result.bench = [](Backend backend, std::string_view filter, double seconds) {
    std::vector<Timing> timings;
    for (const Case<Op>& c : benchmarks<Op>())
      if (matches(c.name, filter)) timings.push_back(time(c, backend, seconds));
    return timings;
  };
  return result;
}

}  // namespace

const std::vector<Operation>& operations() {
#define INTARSIA_OPERATION(Op) operation<Op>(),
  static const std::vector<Operation> all{INTARSIA_FOR_EACH_OPERATION(INTARSIA_OPERATION)
                                              INTARSIA_FOR_EACH_COMPOSITION(INTARSIA_OPERATION)};
#undef INTARSIA_OPERATION
  return all;
}

}  // namespace intarsia::cases
