// Runs a case: on a backend against the reference, and the reference against itself in float64; or against the clock.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <string_view>

#include "api/fields.h"
#include "cases/case.h"
#include "cases/compare.h"

namespace intarsia::cases {

struct Outcome {
  std::string name;     ///< of the case
  double ratio = 0;     ///< worst error over tolerance
  std::string failure;  ///< empty: passed
};

struct Timing {
  std::string name;
  double seconds = 0;  ///< median
  double flops = 0, bytes = 0;
  std::string failure;
};

/// A tensor argument and its direction.
struct Argument {
  std::string name;
  TensorView view;
  bool output;
};

struct CollectArguments {
  std::vector<Argument> found;

  void in(const char* name, const TensorView& v) { add(name, v, false); }
  void optional_in(const char* name, const TensorView& v) { add(name, v, false); }
  void out(const char* name, const TensorView& v) { add(name, v, true); }
  void optional_out(const char* name, const TensorView& v) { add(name, v, true); }
  void inout(const char* name, const TensorView& v) { add(name, v, true); }
  void optional_inout(const char* name, const TensorView& v) { add(name, v, true); }
  template <class T>
  void value(const char*, const T&) {}

 private:
  void add(const char* name, const TensorView& v, bool output) {
    if (v.defined()) found.push_back({name, v, output});
  }
};

template <class Op>
std::vector<Argument> arguments_of(Op op) {
  CollectArguments collect;
  fields(collect, op);
  return collect.found;
}

inline const Argument* find(const std::vector<Argument>& arguments, std::string_view name) {
  const auto found = std::find_if(arguments.begin(), arguments.end(), [=](const Argument& a) { return a.name == name; });
  return found == arguments.end() ? nullptr : &*found;
}

/// FNV-1a: a case draws the same numbers on every machine, and others than its neighbours.
inline std::uint64_t seed_of(const std::string& name) {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

/// Runs on `backend` with guarded memory; throws what `run` throws. Returns what was damaged.
template <class Op>
std::string run_guarded(const Case<Op>& c, Tensors& tensors, Op& op, Backend backend) {
  op = c.build(tensors);
  tensors.remember();
  run(op, Context{.backend = backend});
  std::vector<TensorView> outputs;
  for (const Argument& a : arguments_of(op))
    if (a.output) outputs.push_back(a.view);
  return tensors.damage(outputs);
}

template <class Op>
Outcome verify(const Case<Op>& c, Backend backend) try {
  Outcome outcome{c.name, 0, {}};
  const std::uint64_t seed = seed_of(c.name);
  Op op, expected_op, bound_op;
  Tensors tensors(seed, Precision::stored);
  outcome.failure = run_guarded(c, tensors, op, backend);
  if (outcome.failure.empty() && c.expect) outcome.failure = c.expect(op);

  const bool against_itself = backend == Backend::reference && !c.ranks_in_float;
  Tensors expected_tensors(seed, against_itself ? Precision::exact : Precision::stored);
  run_guarded(c, expected_tensors, expected_op, Backend::reference);
  Tensors bound_tensors(seed, Precision::absolute);
  if (!c.scale) run_guarded(c, bound_tensors, bound_op, Backend::reference);

  const std::vector<Argument> actual = arguments_of(op), expected = arguments_of(expected_op), bound = arguments_of(bound_op);
  for (const Argument& a : actual) {
    const Argument *want = find(expected, a.name), *largest = find(bound, a.name);
    if (!a.output || want == nullptr) continue;  // a 16-bit copy (rounded_logits) has no exact form: backends compare it
    const auto scale = [&](std::int64_t i) {
      return std::max(std::abs(element(want->view, i)), c.scale ? *c.scale : std::abs(element(largest->view, i)));
    };
    const Comparison comparison = compare(a.name, a.view, want->view, scale, unit(c.rounding.value_or(a.view.dtype)));
    outcome.ratio = std::max(outcome.ratio, comparison.ratio);
    if (outcome.failure.empty()) outcome.failure = comparison.failure;
  }
  return outcome;
} catch (const std::exception& error) {
  return {c.name, INFINITY, error.what()};
}

/// Median over calls until `seconds` have passed, after one to warm up.
template <class Op>
Timing time(const Case<Op>& c, Backend backend, double seconds) try {
  using Clock = std::chrono::steady_clock;
  const auto since = [](Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); };
  Tensors tensors(seed_of(c.name), Precision::stored);
  const Op op = c.build(tensors);
  run(op, Context{.backend = backend});
  std::vector<double> times;
  for (const auto begin = Clock::now(); times.size() < 3 || since(begin) < seconds;) {
    const auto start = Clock::now();
    run(op, Context{.backend = backend});
    times.push_back(since(start));
  }
  std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2), times.end());
  Timing timing{c.name, times[times.size() / 2], c.flops, 0, {}};
  for (const Argument& a : arguments_of(op))
    timing.bytes += static_cast<double>(a.view.numel()) * static_cast<double>(size_of(a.view.dtype));
  return timing;
} catch (const std::exception& error) {
  return {c.name, 0, 0, 0, error.what()};
}

}  // namespace intarsia::cases
