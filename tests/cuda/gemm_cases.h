// The cases of gemm_check.
#pragma once

#include "layer_data.h"

namespace intarsia::check {

inline std::vector<Case> cases(bool quick) {
  using A = Activation;
  using P = ScorePlacement;
  const std::vector<int> borders = {1, 63, 64, 65, 127, 128, 129, 255, 257};
  const std::vector<Layout> layouts = {Layout::halves,
                                       Layout::interleaved,
                                       Layout::blocks,
                                       Layout::two,
                                       Layout::transposed,
                                       Layout::transposed_interleaved,
                                       Layout::transposed_blocks,
                                       Layout::transposed_two};
  std::vector<Case> list;
  // What every kernel must do, in the dtypes that matter, small enough for a sanitizer.
  list.push_back({.name = "bf16", .bias = true});
  list.push_back(
      {.name = "fp16", .dtype = DType::float16, .layout = Layout::transposed, .gradient_float = true, .in_place = true});
  list.push_back({.name = "bf16 two tensors",
                  .on = P::inside,
                  .layout = Layout::two,
                  .form = Form::sorted,
                  .bias = true,
                  .accumulate = true});
  list.push_back({.name = "bf16 plain",
                  .activation = A::gelu,
                  .on = P::input,
                  .form = Form::csr,
                  .bias = true,
                  .gradient_float = true,
                  .accumulate = true,
                  .in_place = true,
                  .grad_scale = 0.25});
  list.push_back({.name = "fp32 odd", .dtype = DType::float32, .hidden = 33, .width = 19, .bias = true});
  list.push_back({.name = "bf16 bad tokens", .bad_tokens = true});
  list.push_back({.name = "bf16 no rows", .counts = {0, 0, 0}, .bias = true});
  if (quick) return list;

  // Rows at the borders of tiles; several tiles of n and odd ends of every size.
  list.push_back({.name = "bf16 borders", .hidden = 136, .width = 72, .counts = borders, .experts_per_token = 8});
  list.push_back(
      {.name = "bf16 borders wide", .hidden = 296, .width = 200, .counts = borders, .experts_per_token = 5, .in_place = true});
  list.push_back({.name = "fp16 borders silu",
                  .dtype = DType::float16,
                  .hidden = 264,
                  .width = 136,
                  .counts = borders,
                  .activation = A::silu});
  list.push_back({.name = "bf16 one expert", .hidden = 8, .width = 8, .counts = {300}, .experts_per_token = 1});
  list.push_back({.name = "bf16 one row", .hidden = 72, .width = 24, .counts = {1}, .experts_per_token = 1});
  list.push_back(
      {.name = "bf16 many experts", .hidden = 32, .width = 16, .counts = std::vector<int>(70, 3), .experts_per_token = 4});
  // More blocks of k than a pipeline has stages, several tiles each way.
  list.push_back({.name = "bf16 deep", .hidden = 456, .width = 328, .counts = {257, 0, 129, 70}});
  std::vector<int> sparse(97, 0);
  sparse[0] = 130;
  sparse[33] = 1;
  sparse[96] = 65;
  list.push_back({.name = "bf16 empty experts", .hidden = 40, .width = 40, .counts = sparse, .accumulate = true});

  for (const A act :
       {A::swiglu, A::geglu, A::geglu_tanh, A::reglu, A::clamped_swiglu, A::silu, A::gelu, A::gelu_tanh, A::relu, A::relu2})
    for (const P on : {P::output, P::inside, P::input})
      for (const Layout layout : {Layout::halves, Layout::transposed})
        list.push_back({.name = "bf16 activations",
                        .counts = {70, 3},
                        .activation = act,
                        .on = on,
                        .layout = layout,
                        .bias = true,
                        .bias_float = true});
  list.push_back({.name = "fp16 score on input", .dtype = DType::float16, .counts = {70, 3}, .on = P::input});

  for (const Layout layout : layouts)
    for (const bool accumulate : {false, true})
      for (const bool gradient_float : {false, true})
        list.push_back({.name = "bf16 layouts",
                        .hidden = 72,
                        .width = 80,
                        .counts = {70, 0, 3},
                        .layout = layout,
                        .form = Form::csr,
                        .bias = true,
                        .gradient_float = gradient_float,
                        .accumulate = accumulate,
                        .grad_scale = 0.5});

  for (const Layout layout : layouts)
    for (const bool accumulate : {false, true})
      list.push_back({.name = "bf16 misaligned gradients",
                      .hidden = 72,
                      .width = 80,
                      .counts = {70, 0, 3},
                      .layout = layout,
                      .gradient_float = accumulate,
                      .accumulate = accumulate,
                      .misaligned_gradient = true});
  for (const Layout layout : {Layout::halves, Layout::two, Layout::transposed})
    list.push_back(
        {.name = "bf16 reversed", .hidden = 72, .width = 80, .counts = {70, 0, 3}, .layout = layout, .order = Order::reversed});
  list.push_back({.name = "bf16 expanded", .hidden = 72, .width = 80, .counts = {70, 0, 3}, .order = Order::expanded});
  for (const DType dtype : {DType::float32, DType::float64, DType::float16, DType::bfloat16})
    for (const Layout layout : {Layout::halves, Layout::transposed_interleaved, Layout::two})
      list.push_back({.name = "misaligned",
                      .dtype = dtype,
                      .hidden = 67,
                      .width = 141,
                      .counts = {65, 0, 3, 129},
                      .layout = layout,
                      .bias = true,
                      .in_place = layout == Layout::two,
                      .misaligned = true});
  list.push_back({.name = "fp64 plain",
                  .dtype = DType::float64,
                  .hidden = 31,
                  .width = 130,
                  .activation = A::gelu,
                  .on = P::inside,
                  .form = Form::csr,
                  .bias = true,
                  .accumulate = true});
  list.push_back({.name = "fp64 sorted",
                  .dtype = DType::float64,
                  .hidden = 31,
                  .width = 130,
                  .activation = A::clamped_swiglu,
                  .on = P::input,
                  .layout = Layout::blocks,
                  .form = Form::sorted,
                  .bias = true});
  list.back().width = 136;
  return list;
}

}  // namespace intarsia::check
