// All tensors of a layer for one case: lists with any counts, weights in any layout, inputs whose rows past the last one are
// NaN.
#pragma once

#include <numeric>
#include <utility>

#include "base/rows.h"
#include "intarsia/config.h"
#include "tensor.h"

namespace intarsia::check {

enum class Layout { halves, interleaved, blocks, two, transposed, transposed_interleaved, transposed_blocks, transposed_two };
enum class Form { tokens, csr, sorted };
/// How inputs lie in memory. reversed: the rows of x, dy, weights and gradients from the last one on; expanded: x and dy are
/// one row. Not with rows sorted by expert, nor with bad tokens.
enum class Order { plain, reversed, expanded };

struct Case {
  const char* name;
  DType dtype = DType::bfloat16;
  std::int64_t hidden = 64, width = 40;
  std::vector<int> counts = {5, 0, 130, 64, 1};
  std::int64_t experts_per_token = 3;
  Activation activation = Activation::swiglu;
  ScorePlacement on = ScorePlacement::output;
  Layout layout = Layout::halves;
  Form form = Form::tokens;
  bool bias = false, bias_float = false;
  bool gradient_float = false, accumulate = false;
  bool in_place = false;             // dz over z
  bool misaligned = false;           // x, dy and the weights begin at odd elements, with odd steps between rows
  bool misaligned_gradient = false;  // of the weights: they alone
  Order order = Order::plain;
  bool bad_tokens = false;  // some tokens of the list do not exist
  double grad_scale = 1.0;

  std::int64_t used() const { return std::accumulate(counts.begin(), counts.end(), std::int64_t{0}); }
  std::int64_t gates() const { return gate_factor(activation); }
  DType score_dtype() const { return dtype == DType::float64 ? DType::float64 : DType::float32; }
};

/// The same elements along an axis, from the last one on.
inline void reverse(TensorView& v, int axis) {
  v.data =
      static_cast<unsigned char*>(v.data) + (v.size(axis) - 1) * v.step(axis) * static_cast<std::int64_t>(size_of(v.dtype));
  v.stride[axis] = -v.stride[axis];
}

/// A weight or its gradient in a layout: gate and up in one tensor, or two.
struct WeightTensors {
  Tensor first, second;
  Weights host, device;
  bool reversed;

  WeightTensors(DType dtype, std::int64_t experts, std::int64_t width, std::int64_t gates, std::int64_t in, Layout layout,
                bool misaligned, Order order)
      : reversed(order == Order::reversed) {
    const bool two = gates == 2 && (layout == Layout::two || layout == Layout::transposed_two);
    const bool transposed = layout >= Layout::transposed;
    const std::int64_t out = two ? width : gates * width;
    const auto make = [&] {
      const std::int64_t rows = transposed ? in : out, columns = transposed ? out : in;
      if (!misaligned) return Tensor(dtype, {experts, rows, columns});
      return Tensor(dtype, {experts, rows, columns}, {rows * (columns + 3) + 1, columns + 3, 1}, 1);
    };
    first = make();
    if (two) second = make();
    for (Weights* w : {&host, &device}) {
      w->transposed = transposed;
      if (gates == 2 && (layout == Layout::interleaved || layout == Layout::transposed_interleaved)) w->gate_block = 1;
      if (gates == 2 && (layout == Layout::blocks || layout == Layout::transposed_blocks)) w->gate_block = 8;
    }
    bind();
  }
  void bind() {
    host.weight = first.host();
    device.weight = first.device();
    if (second.defined()) {
      host.second = second.host();
      device.second = second.device();
    }
    if (!reversed) return;
    for (Weights* w : {&host, &device}) {
      reverse(w->weight, 1);
      if (w->second.defined()) reverse(w->second, 1);
    }
  }
  WeightTensors& uniform(std::uint64_t seed, double scale) {
    first.uniform(seed, scale);
    if (second.defined()) second.uniform(seed + 1, scale);
    bind();
    return *this;
  }
};

struct Data {
  const Case& c;
  std::int64_t experts, tokens, rows;  // E, T, R
  Tensor expert_offsets, row_token, row_slot, slot_row, token_offsets, token_rows, scores;
  Tensor x, dy, z, a, dz, addend, b_up, b_down;
  std::int64_t source_rows;  // of x and dy on the device
  WeightTensors w_up, w_down;

  explicit Data(const Case& the_case, std::uint64_t seed = 1)
      : c(the_case),
        experts(static_cast<std::int64_t>(c.counts.size())),
        tokens((c.used() + 70) / c.experts_per_token + 1),
        rows(tokens * c.experts_per_token),
        w_up(c.dtype, experts, c.width, c.gates(), c.hidden, c.layout, c.misaligned, c.order),
        w_down(c.dtype, experts, c.hidden, 1, c.width, c.layout, c.misaligned, c.order) {
    lists(seed);
    const double up = 1.7 / std::sqrt(static_cast<double>(c.hidden)), down = 1.7 / std::sqrt(static_cast<double>(c.width));
    w_up.uniform(seed + 10, up);
    w_down.uniform(seed + 12, down);
    source_rows = c.form == Form::sorted ? rows : tokens;
    const std::int64_t step = c.misaligned ? c.hidden + 5 : 0;
    const auto source = [&](std::uint64_t s) {
      // One row more than the device is told of: bad tokens name it, the reference reads zeros there.
      Tensor t(c.dtype, {source_rows + 1, c.hidden}, {step, step ? 1 : 0}, c.misaligned ? 1 : 0);
      t.uniform(s, 1.7);
      for (std::int64_t j = 0; j < c.hidden; ++j) reference::store(t.host(), 0.0, source_rows, j);
      t.keep();
      if (c.form == Form::sorted) poison_rows(t, c.used());
      t.poison_device(source_rows);
      return t;
    };
    x = source(seed + 20);
    dy = source(seed + 21);
    addend = Tensor(c.dtype, {tokens, c.hidden}).uniform(seed + 22, 1.0).take();
    z = row_buffer(c.gates() * c.width, seed + 23);
    a = row_buffer(c.width, seed + 24);
    dz = row_buffer(c.gates() * c.width, seed + 25);
    if (!c.bias) return;
    const DType dtype = c.bias_float ? DType::float32 : c.dtype;
    if (c.on != ScorePlacement::input) b_up = Tensor(dtype, {experts, c.gates() * c.width}).uniform(seed + 26, 1.0).take();
    b_down = Tensor(dtype, {experts, c.hidden}).uniform(seed + 27, 1.0).take();
  }

  /// Random up to the last row, NaN past it.
  Tensor row_buffer(std::int64_t columns, std::uint64_t seed) const {
    return Tensor(c.dtype, {rows, columns}).uniform(seed, 1.5, c.used()).take();
  }
  TensorView source_on_device(const Tensor& t) const { return ordered(t.device()); }
  TensorView source_on_host(const Tensor& t) const { return c.bad_tokens ? t.host() : ordered(t.host()); }

 private:
  TensorView ordered(TensorView v) const {
    v.shape[0] = source_rows;
    if (c.order == Order::reversed) reverse(v, 0);
    if (c.order == Order::expanded) v.stride[0] = 0;
    return v;
  }
  static void poison_rows(Tensor& t, std::int64_t from) {
    for (std::int64_t i = from; i < t.size(0); ++i)
      for (std::int64_t j = 0; j < t.size(1); ++j) reference::store(t.host(), std::nan(""), i, j);
    t.keep();
  }

  /// Slots in a random order are dealt out to the experts; the slots left over have no row.
  void lists(std::uint64_t seed) {
    constexpr std::int32_t kGarbage = 0x7fffff00;  // what lists may hold past the last row
    const auto slots = static_cast<std::size_t>(rows);
    std::vector<std::int32_t> order(slots), offsets{0}, token, slot, inverse(slots, -1), start{0}, of_token;
    std::iota(order.begin(), order.end(), 0);
    for (std::size_t i = slots; i-- > 1;)
      std::swap(order[i], order[static_cast<std::size_t>(uniform01(seed, i) * static_cast<double>(i + 1))]);
    for (const int count : c.counts) {
      const auto begin = order.begin() + offsets.back();
      std::sort(begin, begin + count);
      offsets.push_back(offsets.back() + count);
    }
    for (std::size_t r = 0; r < static_cast<std::size_t>(c.used()); ++r) {
      slot.push_back(order[r]);
      token.push_back(order[r] / static_cast<std::int32_t>(c.experts_per_token));
      inverse[static_cast<std::size_t>(order[r])] = static_cast<std::int32_t>(r);
    }
    if (c.form == Form::csr) {
      for (std::int64_t t = 0; t < tokens; ++t) {
        for (std::size_t r = 0; r < token.size(); ++r) {
          if (token[r] != t) continue;
          slot[r] = static_cast<std::int32_t>(of_token.size());
          of_token.push_back(static_cast<std::int32_t>(r));
        }
        start.push_back(static_cast<std::int32_t>(of_token.size()));
      }
      of_token.resize(slots, kGarbage);
      token_offsets = Tensor(DType::int32, {tokens + 1}).values(start).take();
      token_rows = Tensor(DType::int32, {rows}).values(of_token).take();
    }
    if (c.bad_tokens)
      for (std::size_t r = 0; r < token.size(); r += 7) token[r] = static_cast<std::int32_t>(tokens);
    token.resize(slots, kGarbage);
    slot.resize(slots, kGarbage);
    expert_offsets = Tensor(DType::int32, {experts + 1}).values(offsets).take();
    const bool per_row = c.form != Form::tokens;
    scores = Tensor(c.score_dtype(),
                    per_row ? std::vector<std::int64_t>{rows} : std::vector<std::int64_t>{tokens, c.experts_per_token})
                 .uniform(seed + 30, 1.0)
                 .take();
    if (c.form == Form::sorted) return;
    row_token = Tensor(DType::int32, {rows}).values(token).take();
    row_slot = Tensor(DType::int32, {rows}).values(slot).take();
    if (c.form == Form::tokens) slot_row = Tensor(DType::int32, {tokens, c.experts_per_token}).values(inverse).take();
  }
};

}  // namespace intarsia::check
