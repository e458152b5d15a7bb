// Making the arguments of a problem, and the table of problems.
#include "cases/problem.h"

#include <cmath>
#include <limits>
#include <numeric>

namespace intarsia::cases {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

std::int64_t sum(const std::vector<std::int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

}  // namespace

Experts::Experts(Tensors& tensors, const Problem& problem, DType dtype)
    : t_(tensors),
      p_(problem),
      dtype_(dtype),
      experts_(problem.counts.empty() ? problem.experts : static_cast<std::int64_t>(problem.counts.size())),
      choices_(problem.counts.empty() ? problem.choices : 1),
      lists_{.tokens = problem.counts.empty() ? problem.tokens : sum(problem.counts), .rows = 0, .capacity = 0} {
  if (p_.form == Form::csr) make_csr();
  else if (p_.form == Form::sorted) make_sorted(draw_ids());
  else make_slots(draw_ids());
  make_scores();
}

/// The choices of all tokens, (T, K).
std::vector<double> Experts::draw_ids() {
  std::vector<double> ids;
  const auto put = [&](std::int64_t id) { ids.push_back(static_cast<double>(id)); };
  for (std::size_t e = 0; e < p_.counts.size(); ++e)
    for (std::int64_t i = 0; i < p_.counts[e]; ++i) put(static_cast<std::int64_t>(e));
  for (std::size_t i = ids.size(); i > 1; --i)
    std::swap(ids[i - 1], ids[static_cast<std::size_t>(t_.random(static_cast<std::int64_t>(i)))]);
  if (!p_.counts.empty()) return ids;

  for (std::int64_t t = 0; t < lists_.tokens; ++t) {
    const std::int64_t first = t_.random(experts_);
    for (std::int64_t k = 0; k < choices_; ++k) {
      switch (p_.routing) {
        case Routing::uniform: put((first + k) % experts_); break;
        case Routing::all_to_one: put(k == 0 ? experts_ - 1 : -1); break;
        case Routing::half_empty: put((first + k) % experts_ / 2 * 2); break;
        case Routing::sentinels: {
          constexpr std::int64_t kFar = 1 << 30;
          const std::int64_t outside[] = {-1, experts_, kFar, -kFar};
          put(t == 0 || t_.random(3) == 0 ? outside[t_.random(4)] : (first + k) % experts_);
          break;
        }
        case Routing::duplicates: put(first); break;
        case Routing::nobody: put(-1); break;
      }
    }
  }
  return ids;
}

void Experts::make_slots(const std::vector<double>& ids) {
  lists_.capacity = lists_.tokens * choices_ + p_.slack;
  BuildIndex index{.ids = t_.values(DType::int32, {lists_.tokens, choices_}, ids),
                   .expert_offsets = t_.out(DType::int32, {experts_ + 1}),
                   .row_token = t_.out(DType::int32, {lists_.capacity}),
                   .row_slot = t_.out(DType::int32, {lists_.capacity}),
                   .slot_row = t_.out(DType::int32, {lists_.tokens, choices_})};
  run(index, Context{.backend = Backend::reference});
  lists_.expert_offsets = index.expert_offsets;
  lists_.row_token = index.row_token;
  lists_.row_slot = index.row_slot;
  lists_.slot_row = index.slot_row;
  lists_.rows = static_cast<std::int64_t>(element(lists_.expert_offsets, experts_));
}

/// Each token takes each expert with probability K / E, so tokens have 0 to E rows.
void Experts::make_csr() {
  std::vector<std::vector<double>> rows_of(static_cast<std::size_t>(lists_.tokens));
  std::vector<double> offsets{0}, row_token, row_slot, token_offsets{0}, token_rows;
  const double share = static_cast<double>(choices_) / static_cast<double>(experts_);
  for (std::int64_t e = 0; e < experts_; ++e) {
    for (std::int64_t t = 0; t < lists_.tokens; ++t) {
      if (t_.random() >= share) continue;
      rows_of[static_cast<std::size_t>(t)].push_back(static_cast<double>(row_token.size()));
      row_token.push_back(static_cast<double>(t));
    }
    offsets.push_back(static_cast<double>(row_token.size()));
  }
  lists_.rows = static_cast<std::int64_t>(row_token.size());
  lists_.capacity = lists_.rows + p_.slack;
  const auto capacity = static_cast<std::size_t>(lists_.capacity);
  row_slot.resize(capacity, -1);
  for (const auto& rows : rows_of) {
    for (const double r : rows) {
      row_slot[static_cast<std::size_t>(r)] = static_cast<double>(token_rows.size());
      token_rows.push_back(r);
    }
    token_offsets.push_back(static_cast<double>(token_rows.size()));
  }
  row_token.resize(capacity, -1);
  token_rows.resize(capacity, -1);
  lists_.expert_offsets = t_.values(DType::int32, {experts_ + 1}, offsets);
  lists_.row_token = t_.values(DType::int32, {lists_.capacity}, row_token);
  lists_.row_slot = t_.values(DType::int32, {lists_.capacity}, row_slot);
  lists_.token_offsets = t_.values(DType::int32, {lists_.tokens + 1}, token_offsets);
  lists_.token_rows = t_.values(DType::int32, {lists_.capacity}, token_rows);
}

void Experts::make_sorted(const std::vector<double>& ids) {
  std::vector<double> offsets(static_cast<std::size_t>(experts_ + 1), 0.0);
  for (const double id : ids)
    for (std::int64_t e = 0; e < experts_; ++e)
      if (id >= 0 && id <= static_cast<double>(e)) ++offsets[static_cast<std::size_t>(e + 1)];
  lists_.rows = static_cast<std::int64_t>(offsets.back());
  lists_.capacity = lists_.rows + p_.slack;
  lists_.expert_offsets = t_.values(DType::int32, {experts_ + 1}, offsets);
}

void Experts::make_scores() {
  if (p_.form == Form::sorted && !p_.scores) return;
  if (p_.form != Form::slots) {
    scores_ = t_.uniform(score_dtype(dtype_), {lists_.capacity}, 0.1, 1);
    for (std::int64_t r = lists_.rows; r < lists_.capacity; ++r) t_.set(scores_, kNaN, r);
    return;
  }
  scores_ = t_.uniform(score_dtype(dtype_), {lists_.tokens, choices_}, 0.1, 1);
  for (std::int64_t i = 0; i < scores_.numel(); ++i)
    if (element(lists_.slot_row, i) < 0) t_.set(scores_, kNaN, i / choices_, i % choices_);
}

TensorView Experts::token_rows() {
  const std::int64_t rows = p_.form == Form::sorted ? lists_.capacity : lists_.tokens;
  const TensorView x = t_.normal(dtype_, {rows, p_.hidden}, 1, p_.rows_layout);
  if (p_.rows_layout == Layout::expanded) return x;  // all rows are one: none may be NaN
  std::vector<bool> read(static_cast<std::size_t>(rows), false);
  for (std::int64_t r = 0; r < lists_.rows; ++r)
    read[static_cast<std::size_t>(p_.form == Form::sorted ? r : static_cast<std::int64_t>(element(lists_.row_token, r)))] =
        true;
  for (std::int64_t i = 0; i < rows; ++i)
    if (!read[static_cast<std::size_t>(i)]) t_.set_row(x, kNaN, i);
  return x;
}

TensorView Experts::expert_rows(std::int64_t width) {
  const TensorView v = t_.normal(dtype_, {lists_.capacity, width}, p_.activation == Activation::clamped_swiglu ? 4 : 1);
  for (std::int64_t r = lists_.rows; r < lists_.capacity; ++r) t_.set_row(v, kNaN, r);
  return v;
}

TensorView Experts::out_rows(std::int64_t width) {
  return t_.out(dtype_, {lists_.capacity, width}, p_.rows_layout == Layout::padded ? Layout::padded : Layout::dense);
}

TensorView Experts::like_scores() {
  if (!scores_.defined()) return {};
  return t_.out(score_dtype(dtype_), Shape(scores_.shape.begin(), scores_.shape.begin() + scores_.rank));
}

Weights Experts::weights(std::int64_t out, std::int64_t in, bool gated) {
  const WeightLayout& layout = p_.weights;
  const bool two = gated && layout.two_tensors;
  const std::int64_t rows = two ? out / 2 : out;
  const Shape shape = layout.transposed ? Shape{experts_, in, rows} : Shape{experts_, rows, in};
  const double deviation = (p_.activation == Activation::clamped_swiglu ? 4 : 1) / std::sqrt(static_cast<double>(in));
  Weights w{.weight = t_.normal(dtype_, shape, deviation, layout.memory), .transposed = layout.transposed};
  if (gated && !two) w.gate_block = layout.gate_block;
  if (two) w.second = t_.normal(dtype_, shape, deviation, layout.memory == Layout::dense ? Layout::padded : Layout::dense);
  return w;
}

Weights Experts::weight_gradient(std::int64_t out, std::int64_t in, bool gated) {
  const WeightLayout& layout = p_.weights;
  const bool two = gated && layout.two_tensors;
  const std::int64_t rows = two ? out / 2 : out;
  const Shape shape = layout.transposed ? Shape{experts_, in, rows} : Shape{experts_, rows, in};
  const Layout memory = layout.memory == Layout::expanded ? Layout::dense : layout.memory;
  Weights w{.weight = gradient(shape, memory), .transposed = layout.transposed};
  if (gated && !two) w.gate_block = layout.gate_block;
  if (two) w.second = gradient(shape);
  return w;
}

Weights Experts::w_up() { return weights(gates() * p_.width, p_.hidden, gates() == 2); }
Weights Experts::w_down() { return weights(p_.hidden, p_.width, false); }
Weights Experts::dw_up() { return weight_gradient(gates() * p_.width, p_.hidden, gates() == 2); }
Weights Experts::dw_down() { return weight_gradient(p_.hidden, p_.width, false); }

TensorView Experts::b_up() {
  if (!p_.biases || p_.score_on == ScorePlacement::input) return {};
  return t_.normal(p_.fp32_biases ? score_dtype(dtype_) : dtype_, {experts_, gates() * p_.width}, 1, p_.weights.memory);
}

TensorView Experts::b_down() {
  if (!p_.biases) return {};
  return t_.normal(p_.fp32_biases ? score_dtype(dtype_) : dtype_, {experts_, p_.hidden}, 1, p_.weights.memory);
}

TensorView Experts::db_up() {
  return p_.score_on == ScorePlacement::input ? TensorView{} : gradient({experts_, gates() * p_.width});
}
TensorView Experts::db_down() { return gradient({experts_, p_.hidden}); }

TensorView Experts::gradient(const Shape& shape, Layout layout) {
  const DType dtype = p_.fp32_gradients ? score_dtype(dtype_) : dtype_;
  return p_.accumulate ? t_.normal(dtype, shape, 1, layout) : t_.out(dtype, shape, layout);
}

std::vector<Problem> problems() {
  using A = Activation;
  using S = ScorePlacement;
  std::vector<Problem> table{
      {.name = "worked_shape", .tokens = 5, .hidden = 8, .width = 6, .experts = 4, .choices = 2},
      {.name = "no_tokens", .tokens = 0},
      {.name = "no_tokens_csr", .tokens = 0, .form = Form::csr},
      {.name = "no_rows", .routing = Routing::nobody},
      {.name = "no_rows_accumulate", .routing = Routing::nobody, .accumulate = true, .fp32_gradients = true},
      {.name = "one_token", .tokens = 1},
      {.name = "one_of_everything", .tokens = 1, .hidden = 1, .width = 1, .experts = 1, .choices = 1},
      {.name = "one_expert", .tokens = 33, .experts = 1, .choices = 1},
      {.name = "every_expert_chosen", .tokens = 13, .experts = 5, .choices = 5},
      {.name = "odd_sizes", .tokens = 37, .hidden = 67, .width = 29, .experts = 7, .choices = 3, .biases = true},
      {.name = "wide", .tokens = 70, .hidden = 130, .width = 129, .experts = 3, .choices = 2},
      {.name = "many_experts", .tokens = 19, .hidden = 16, .width = 8, .experts = 129, .choices = 8},
      {.name = "all_to_one", .tokens = 150, .routing = Routing::all_to_one, .biases = true},
      {.name = "half_empty", .tokens = 40, .experts = 6, .routing = Routing::half_empty, .biases = true},
      {.name = "half_empty_accumulate",
       .tokens = 40,
       .experts = 6,
       .routing = Routing::half_empty,
       .biases = true,
       .accumulate = true},
      {.name = "sentinels", .tokens = 40, .routing = Routing::sentinels, .slack = 5, .biases = true, .addend = true},
      {.name = "duplicates", .tokens = 20, .choices = 3, .routing = Routing::duplicates},
      {.name = "tile_borders", .counts = {1, 63, 64, 65, 127, 128, 129, 255, 257}, .biases = true},
      {.name = "tile_borders_sorted", .counts = {128, 130, 65, 0, 63, 0, 65, 1, 127, 129}, .form = Form::sorted, .slack = 100},
      {.name = "skewed", .hidden = 10, .width = 7, .counts = {1000, 1, 1, 1}},
      {.name = "first_and_last_empty", .counts = {0, 4, 4, 0}},
      {.name = "last_empty_sorted", .counts = {4, 4, 0}, .form = Form::sorted},
      {.name = "one_expert_slack", .counts = {100}, .form = Form::sorted, .slack = 28},
      {.name = "sorted_no_scores", .form = Form::sorted, .slack = 3, .scores = false, .biases = true},
      {.name = "sorted_inside", .form = Form::sorted, .slack = 3, .score_on = S::inside, .biases = true},
      {.name = "sorted_input", .form = Form::sorted, .slack = 3, .score_on = S::input, .biases = true},
      {.name = "sorted_nothing", .routing = Routing::nobody, .form = Form::sorted},
      {.name = "csr", .form = Form::csr, .biases = true, .addend = true},
      {.name = "csr_slack", .tokens = 50, .experts = 9, .choices = 3, .form = Form::csr, .slack = 17, .score_on = S::inside},
      {.name = "inside", .score_on = S::inside, .biases = true},
      {.name = "input", .score_on = S::input, .biases = true},
      {.name = "interleaved", .weights = {.gate_block = 1}, .biases = true},
      {.name = "interleaved_transposed", .weights = {.gate_block = 1, .transposed = true}, .biases = true, .fp32_biases = true},
      {.name = "blocks_of_4", .weights = {.gate_block = 4}, .biases = true},
      {.name = "blocks_transposed", .weights = {.gate_block = 6, .transposed = true, .memory = Layout::padded}},
      {.name = "one_block", .weights = {.gate_block = 12}},
      {.name = "two_tensors", .weights = {.two_tensors = true}, .biases = true},
      {.name = "two_tensors_transposed", .weights = {.two_tensors = true, .transposed = true}, .accumulate = true},
      {.name = "transposed", .weights = {.transposed = true}},
      {.name = "square_transposed", .hidden = 16, .width = 8, .weights = {.transposed = true}},
      {.name = "padded", .weights = {.memory = Layout::padded}, .rows_layout = Layout::padded, .biases = true, .addend = true},
      {.name = "strided", .weights = {.memory = Layout::strided}, .rows_layout = Layout::strided, .addend = true},
      {.name = "permuted", .weights = {.memory = Layout::permuted}, .rows_layout = Layout::permuted, .biases = true},
      {.name = "reversed", .weights = {.memory = Layout::reversed}, .rows_layout = Layout::reversed},
      {.name = "expanded",
       .weights = {.memory = Layout::expanded},
       .rows_layout = Layout::expanded,
       .biases = true,
       .addend = true},
      {.name = "in_place", .addend = true, .in_place = true},
      {.name = "in_place_inside", .tokens = 200, .score_on = S::inside, .in_place = true},
      {.name = "accumulate_fp32", .biases = true, .accumulate = true, .fp32_gradients = true, .grad_scale = 0.25},
      {.name = "fp32_gradients", .biases = true, .fp32_biases = true, .fp32_gradients = true},
      {.name = "grad_scale", .biases = true, .grad_scale = -3},
      {.name = "required_outputs_only", .biases = true, .optional_outputs = false},
      {.name = "recompute", .biases = true, .keep_z = false},
      {.name = "recompute_input", .tokens = 90, .score_on = S::input, .keep_z = false},
  };
  for (const A a : {A::geglu, A::geglu_tanh, A::reglu, A::clamped_swiglu, A::silu, A::gelu, A::gelu_tanh, A::relu, A::relu2}) {
    table.push_back({.name = "activation_" + std::string(to_string(a)), .activation = a, .biases = true});
    table.push_back({.name = "input_" + std::string(to_string(a)), .activation = a, .score_on = S::input});
  }
  return table;
}

std::vector<Problem> benchmark_problems() {
  return {
      {.name = "t1024_h512_i1024_e8_k2", .tokens = 1024, .hidden = 512, .width = 1024, .experts = 8, .choices = 2},
      {.name = "t1024_h512_i256_e32_k4", .tokens = 1024, .hidden = 512, .width = 256, .experts = 32, .choices = 4},
      {.name = "t2048_h256_i64_e128_k8", .tokens = 2048, .hidden = 256, .width = 64, .experts = 128, .choices = 8},
  };
}

}  // namespace intarsia::cases
