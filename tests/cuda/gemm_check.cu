// Checks the six products and the layer of src/cuda against the reference backend, and times the products.
//   gemm_check [--quick] [--path NAME] [name..]    every case whose name or operation contains one of the names; --quick: the
//                                                  small ones; --path: on one path alone (general, sm80, sm90; cuda: the layer)
//   gemm_check --bench [name..]                    TFLOP/s of each product at qwen3-30b and mixtral, random data, median of 11
// Prints a line per check, ends with 1 when one failed.
#include <chrono>
#include <functional>

#include "cuda/cuda.h"
#include "cuda/general/general.h"
#include "cuda/sm80/sm80.h"
#include "gemm_bench.h"
#include "gemm_cases.h"
#include "layer_data.h"
#include "reference/reference.h"

namespace intarsia::check {
namespace {

namespace general = cuda::general;
namespace sm80 = cuda::sm80;

int failures = 0, checks = 0;
std::vector<std::string> wanted;
std::string wanted_path;

bool want(const std::string& text) {
  return wanted.empty() ||
         std::any_of(wanted.begin(), wanted.end(), [&](const std::string& w) { return text.find(w) != std::string::npos; });
}

void report(const std::string& name, double error, const std::string& note = "") {
  ++checks;
  const bool right = error <= 1;
  failures += !right;
  std::printf("%s %-72s %8.3f %s\n", right ? "ok  " : "FAIL", name.c_str(), error, note.c_str());
  std::fflush(stdout);
}

/// A way to run an operation on the device.
template <class Op>
struct Path {
  const char* name;
  std::function<std::size_t(const Op&)> workspace_bytes;
  std::function<void(const Op&, const Execution&)> run;
};

template <class Op>
std::vector<Path<Op>> paths_of(const Op& op) {
  std::vector<Path<Op>> paths;
  const auto add = [&](const char* name, auto bytes, auto run) {
    if (wanted_path.empty() || wanted_path == name) paths.push_back({name, bytes, run});
  };
  constexpr bool kLayer = std::is_same_v<Op, LayerForward> || std::is_same_v<Op, LayerBackward>;
  if constexpr (!kLayer) {
    add(
        "general", [](const Op& o) { return general::workspace_bytes(o); },
        [](const Op& o, const Execution& e) { general::run(o, e); });
    if (sm80::supports(op, nullptr))
      add(
          "sm80", [](const Op& o) { return sm80::workspace_bytes(o); },
          [](const Op& o, const Execution& e) { sm80::run(o, e); });
    if (cuda::explain(op).find("wgmma,") != std::string::npos)
      add(
          "sm90", [](const Op& o) { return cuda::workspace_bytes(o); },
          [](const Op& o, const Execution& e) { cuda::run(o, e); });
  } else {
    add("cuda", [](const Op& o) { return cuda::workspace_bytes(o); }, [](const Op& o, const Execution& e) { cuda::run(o, e); });
  }
  return paths;
}

/// Runs the operation once by the reference and twice by each path, outputs and workspace poisoned each time.
template <class Op>
void check(const Case& c, const Op& on_host, const Op& on_device, std::vector<Output> outputs, double loose = 0) {
  if (!want(c.name) && !want(Op::kName)) return;
  const std::vector<Path<Op>> paths = paths_of(on_device);
  if (paths.empty()) return;
  for (const Output& o : outputs) o.tensor->start();
  reference::run(on_host, {});
  for (const auto& path : paths) {
    const std::string name = std::string(Op::kName) + " " + path.name + " " + c.name;
    const std::size_t bytes = path.workspace_bytes(on_device);
    std::byte* workspace = nullptr;
    if (bytes > 0) must(cudaMalloc(reinterpret_cast<void**>(&workspace), bytes), "cudaMalloc");
    std::vector<std::vector<unsigned char>> first;
    for (int repeat = 0; repeat < 2; ++repeat) {
      for (const Output& o : outputs) o.tensor->start_device();
      if (bytes > 0) must(cudaMemset(workspace, repeat == 0 ? 0xff : 0x7b, bytes), "cudaMemset");
      path.run(on_device, {nullptr, workspace, 1});
      must(cudaDeviceSynchronize(), name.c_str());
      for (std::size_t i = 0; i < outputs.size(); ++i) {
        auto got = outputs[i].tensor->download();
        if (repeat == 0) {
          report(name + " " + outputs[i].name, error_of(outputs[i], got, std::max(loose, outputs[i].loose)));
          first.push_back(std::move(got));
        } else if (got != first[i]) {
          report(name + " " + outputs[i].name, 1e30, "not the same bits when repeated");
        }
      }
    }
    cudaFree(workspace);
  }
}

/// The same struct of arguments, filled for the host and for the device.
template <class Fill>
auto filled(Fill&& fill) {
  return std::pair(fill(true), fill(false));
}

struct Views {
  bool host;
  TensorView operator()(const Tensor& t) const { return host ? t.host() : t.device(); }
  const Weights& operator()(const WeightTensors& w) const { return host ? w.host : w.device; }
  TensorView source(const Data& d, const Tensor& t) const { return host ? d.source_on_host(t) : d.source_on_device(t); }
};

/// Rounding of z, a and rows separates the layer from the reference, which rounds nothing in between.
double looseness(DType dtype) {
  switch (dtype) {
    case DType::bfloat16: return 2e-2;
    case DType::float16: return 3e-3;
    case DType::float32: return 5e-6;
    default: return 1e-13;
  }
}

void check_up_forward(const Data& d, bool keep_z) {
  const Case& c = d.c;
  Tensor z(c.dtype, {d.rows, c.gates() * c.width}), a(c.dtype, {d.rows, c.width});
  const auto fill = [&](bool host) {
    const Views v{host};
    return UpForward{.x = v.source(d, d.x),
                     .expert_offsets = v(d.expert_offsets),
                     .row_token = v(d.row_token),
                     .w_up = v(d.w_up),
                     .b_up = v(d.b_up),
                     .scores = v(d.scores),
                     .row_slot = v(d.row_slot),
                     .activation = c.activation,
                     .score_on = c.on,
                     .z = keep_z ? v(z) : TensorView{},
                     .a = v(a)};
  };
  // wgmma kernels make a from the rounded z.
  std::vector<Output> outputs{{"a", &a, c.used(), size_of(c.dtype) == 2 ? looseness(c.dtype) / 4 : 0}};
  if (keep_z) outputs.push_back({"z", &z, c.used()});
  const auto [host, device] = filled(fill);
  check(c, host, device, outputs);
}

void check_down_forward(const Data& d) {
  const Case& c = d.c;
  Tensor rows(c.dtype, {d.rows, c.hidden});
  const auto [host, device] = filled([&](bool on_host) {
    const Views v{on_host};
    return DownForward{.a = v(d.a),
                       .expert_offsets = v(d.expert_offsets),
                       .w_down = v(d.w_down),
                       .b_down = v(d.b_down),
                       .scores = v(d.scores),
                       .row_slot = v(d.row_slot),
                       .score_on = c.on,
                       .rows = v(rows)};
  });
  check(c, host, device, {{"rows", &rows, c.used()}});
}

void check_down_backward(const Data& d, bool all_outputs) {
  const Case& c = d.c;
  Tensor z = d.row_buffer(c.gates() * c.width, 99), dz(c.dtype, {d.rows, c.gates() * c.width}), a(c.dtype, {d.rows, c.width});
  Tensor ds(c.score_dtype(), d.scores.host().rank == 1 ? std::vector<std::int64_t>{d.rows}
                                                       : std::vector<std::int64_t>{d.tokens, c.experts_per_token});
  const auto [host, device] = filled([&](bool on_host) {
    const Views v{on_host};
    return DownBackward{.dy = v.source(d, d.dy),
                        .z = v(z),
                        .expert_offsets = v(d.expert_offsets),
                        .row_token = v(d.row_token),
                        .w_down = v(d.w_down),
                        .b_down = v(d.b_down),
                        .scores = v(d.scores),
                        .row_slot = v(d.row_slot),
                        .activation = c.activation,
                        .score_on = c.on,
                        .dz = c.in_place ? v(z) : v(dz),
                        .a_scaled = all_outputs ? v(a) : TensorView{},
                        .dscores = all_outputs ? v(ds) : TensorView{}};
  });
  std::vector<Output> outputs{{"dz", c.in_place ? &z : &dz, c.used()}};
  if (all_outputs) {
    outputs.push_back({"a_scaled", &a, c.used()});
    outputs.push_back({"dscores", &ds});
  }
  check(c, host, device, outputs);
}

void check_up_backward(const Data& d) {
  const Case& c = d.c;
  Tensor rows(c.dtype, {d.rows, c.hidden});
  const auto [host, device] = filled([&](bool on_host) {
    const Views v{on_host};
    return UpBackward{.dz = v(d.dz), .expert_offsets = v(d.expert_offsets), .w_up = v(d.w_up), .dx_rows = v(rows)};
  });
  check(c, host, device, {{"dx_rows", &rows, c.used()}});
}

/// wgmma kernels round a 16-bit gradient before they add it to what is there, and the sum again.
double gradient_looseness(const Case& c) {
  return c.accumulate && !c.gradient_float && size_of(c.dtype) == 2 ? looseness(c.dtype) / 4 : 0;
}

WeightTensors gradient_like(const Data& d, bool up) {
  const Case& c = d.c;
  const DType dtype = c.gradient_float ? DType::float32 : c.dtype;
  WeightTensors w(dtype, d.experts, up ? c.width : c.hidden, up ? c.gates() : 1, up ? c.hidden : c.width, c.layout,
                  c.misaligned || c.misaligned_gradient, c.order);
  if (c.accumulate) w.uniform(55, 1.0);
  return w;
}

std::vector<Output> outputs_of(WeightTensors& w, const char* first, const char* second) {
  std::vector<Output> outputs{{first, &w.first}};
  if (w.second.defined()) outputs.push_back({second, &w.second});
  return outputs;
}

void check_down_weight_backward(const Data& d) {
  const Case& c = d.c;
  WeightTensors dw = gradient_like(d, false);
  const auto [host, device] = filled([&](bool on_host) {
    const Views v{on_host};
    return DownWeightBackward{.dy = v.source(d, d.dy),
                              .a_scaled = v(d.a),
                              .expert_offsets = v(d.expert_offsets),
                              .row_token = v(d.row_token),
                              .accumulate = c.accumulate,
                              .grad_scale = c.grad_scale,
                              .dw_down = v(dw)};
  });
  check(c, host, device, outputs_of(dw, "dw_down", ""), gradient_looseness(c));
}

void check_up_weight_backward(const Data& d) {
  const Case& c = d.c;
  WeightTensors dw = gradient_like(d, true);
  const auto [host, device] = filled([&](bool on_host) {
    const Views v{on_host};
    return UpWeightBackward{.dz = v(d.dz),
                            .x = v.source(d, d.x),
                            .expert_offsets = v(d.expert_offsets),
                            .row_token = v(d.row_token),
                            .accumulate = c.accumulate,
                            .grad_scale = c.grad_scale,
                            .dw_up = v(dw)};
  });
  check(c, host, device, outputs_of(dw, "dw_up", "dw_up_second"), gradient_looseness(c));
}

void check_layer_forward(const Data& d, bool keep_z) {
  const Case& c = d.c;
  Tensor z(c.dtype, {d.rows, c.gates() * c.width}), y(c.dtype, {d.source_rows, c.hidden});
  const auto [host, device] = filled([&](bool on_host) {
    const Views v{on_host};
    return LayerForward{.x = v.source(d, d.x),
                        .expert_offsets = v(d.expert_offsets),
                        .row_token = v(d.row_token),
                        .row_slot = v(d.row_slot),
                        .slot_row = v(d.slot_row),
                        .token_offsets = v(d.token_offsets),
                        .token_rows = v(d.token_rows),
                        .scores = v(d.scores),
                        .w_up = v(d.w_up),
                        .w_down = v(d.w_down),
                        .b_up = v(d.b_up),
                        .b_down = v(d.b_down),
                        .addend = c.form == Form::sorted ? TensorView{} : v(d.addend),
                        .activation = c.activation,
                        .score_on = c.on,
                        .z = keep_z ? v(z) : TensorView{},
                        .y = v(y)};
  });
  std::vector<Output> outputs{{"y", &y}};
  if (keep_z) outputs.push_back({"z", &z, c.used()});
  check(c, host, device, outputs, looseness(c.dtype));
}

void check_layer_backward(const Data& d, bool saved_z) {
  const Case& c = d.c;
  Tensor z = d.row_buffer(c.gates() * c.width, 99), dx(c.dtype, {d.source_rows, c.hidden});
  Tensor ds(c.score_dtype(), d.scores.host().rank == 1 ? std::vector<std::int64_t>{d.rows}
                                                       : std::vector<std::int64_t>{d.tokens, c.experts_per_token});
  WeightTensors dw_up = gradient_like(d, true), dw_down = gradient_like(d, false);
  const DType dtype = c.gradient_float ? DType::float32 : c.dtype;
  Tensor db_up(dtype, {d.experts, c.gates() * c.width}), db_down(dtype, {d.experts, c.hidden});
  if (c.accumulate) {
    db_up.uniform(56, 1.0);
    db_down.uniform(57, 1.0);
  }
  const auto [host, device] = filled([&](bool on_host) {
    const Views v{on_host};
    return LayerBackward{.dy = v.source(d, d.dy),
                         .x = v.source(d, d.x),
                         .expert_offsets = v(d.expert_offsets),
                         .row_token = v(d.row_token),
                         .row_slot = v(d.row_slot),
                         .slot_row = v(d.slot_row),
                         .token_offsets = v(d.token_offsets),
                         .token_rows = v(d.token_rows),
                         .scores = v(d.scores),
                         .w_up = v(d.w_up),
                         .w_down = v(d.w_down),
                         .b_up = v(d.b_up),
                         .b_down = v(d.b_down),
                         .addend = c.form == Form::sorted ? TensorView{} : v(d.addend),
                         .activation = c.activation,
                         .score_on = c.on,
                         .overwrite_z = saved_z && c.in_place,
                         .accumulate = c.accumulate,
                         .grad_scale = c.grad_scale,
                         .z = saved_z ? v(z) : TensorView{},
                         .dx = v(dx),
                         .dscores = v(ds),
                         .dw_up = v(dw_up),
                         .dw_down = v(dw_down),
                         .db_up = c.bias && d.b_up.defined() ? v(db_up) : TensorView{},
                         .db_down = c.bias ? v(db_down) : TensorView{}};
  });
  std::vector<Output> outputs = outputs_of(dw_up, "dw_up", "dw_up_second");
  outputs.push_back({"dw_down", &dw_down.first});
  outputs.push_back({"dx", &dx});
  outputs.push_back({"dscores", &ds});
  if (saved_z) outputs.push_back({c.in_place ? "z = dz" : "z", &z, c.used()});
  if (c.bias && d.b_up.defined()) outputs.push_back({"db_up", &db_up});
  if (c.bias) outputs.push_back({"db_down", &db_down});
  check(c, host, device, outputs, looseness(c.dtype));
}

void check_case(const Case& c) {
  const Data data(c);
  check_up_forward(data, true);
  check_up_forward(data, false);
  check_down_forward(data);
  check_down_backward(data, true);
  check_down_backward(data, false);
  check_up_backward(data);
  check_down_weight_backward(data);
  check_up_weight_backward(data);
  if (c.bad_tokens) return;  // the layer's lists must agree with each other
  check_layer_forward(data, true);
  check_layer_forward(data, false);
  check_layer_backward(data, true);
  check_layer_backward(data, false);
}

}  // namespace
}  // namespace intarsia::check

int main(int count, char** arguments) {
  using namespace intarsia::check;
  bool quick = false, bench = false;
  for (int i = 1; i < count; ++i) {
    const std::string text = arguments[i];
    if (text == "--quick") quick = true;
    else if (text == "--bench") bench = true;
    else if (text == "--path" && i + 1 < count) wanted_path = arguments[++i];
    else wanted.push_back(text);
  }
  if (bench) return bench_products(want);
  const auto begin = std::chrono::steady_clock::now();
  for (const Case& c : cases(quick)) check_case(c);
  if (!quick) check_large([](const std::string& name, double error) { report(name, error); }, want);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  std::printf("%d checks, %d failed, %.1f s\n", checks, failures, seconds);
  return failures == 0 ? 0 : 1;
}
