#include "torch/moe.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <type_traits>

#include "intarsia/moe.h"
#include "torch/arguments.h"

namespace intarsia::torch_shim {
namespace {

// ---- outputs

/// The strides of a tensor whose axes lie in memory in the order of v's, without gaps.
TensorView dense_like(const TensorView& v) {
  TensorView result = v;
  std::array<int, kMaxRank> axes{};
  for (int i = 0; i < v.rank; ++i) axes[static_cast<std::size_t>(i)] = v.rank - 1 - i;
  const bool ordered = std::all_of(axes.begin(), axes.begin() + v.rank, [&](int i) { return v.step(i) > 0; });
  if (ordered) std::stable_sort(axes.begin(), axes.begin() + v.rank, [&](int i, int j) { return v.step(i) < v.step(j); });
  std::int64_t step = 1;
  for (int i = 0; i < v.rank; ++i) {
    const auto axis = static_cast<std::size_t>(axes[static_cast<std::size_t>(i)]);
    result.stride[axis] = step;
    step *= std::max<std::int64_t>(1, v.shape[axis]);
  }
  return result;
}

/// Tensors in the order in which they are returned.
class Outputs {
 public:
  /// `empty`: dtype of an empty tensor for each output that nobody asked for. Without it Python gets None.
  explicit Outputs(Device device, std::optional<DType> empty = {}) : device_(device), empty_(empty) { tensors_.reserve(8); }

  /// A contiguous tensor.
  TensorView add(DType dtype, std::initializer_list<std::int64_t> shape) { return make({nullptr, dtype, shape, device_}); }
  /// An absent view where it is not wanted.
  TensorView add_if(bool wanted, DType dtype, std::initializer_list<std::int64_t> shape) {
    return wanted ? add(dtype, shape) : leave_out();
  }
  /// The gradient of v, with its strides; an absent view where it is not wanted.
  TensorView add_gradient(bool wanted, const TensorView& v) {
    return wanted && v.defined() ? make(dense_like(v)) : leave_out();
  }
  AtenTensorHandle last() const { return tensors_.back().get(); }

  /// Hands all of them to torch.
  void give(StableIValue* stack) {
    for (TensorReference& tensor : tensors_) *stack++ = torch::stable::detail::from(tensor.release());
  }

 private:
  TensorView make(TensorView v) {
    tensors_.push_back(empty_tensor(device_, code_of(v.dtype), v.rank, v.shape.data(), v.stride.data()));
    check(aoti_torch_get_data_ptr(last(), &v.data), "aoti_torch_get_data_ptr");
    v.device = device_;
    return v;
  }

  TensorView leave_out() {
    if (empty_) {
      add(*empty_, {0});
    } else {
      AtenTensorHandle handle = nullptr;
      check(aoti_torch_new_uninitialized_tensor(&handle), "aoti_torch_new_uninitialized_tensor");
      tensors_.emplace_back(handle);
    }
    return {};
  }

  Device device_;
  std::optional<DType> empty_;
  std::vector<TensorReference> tensors_;
};

// ---- the lists

/// int32 entries of the one tensor that ids and lists lie in, so that a call makes, keeps and frees one instead of five.
std::int64_t list_entries(std::int64_t slots, std::int64_t experts) { return 4 * slots + experts + 1; }

/// ids (T, K), row_token (R), row_slot (R), slot_row (T, K) and expert_offsets (E+1), in this order, with R = T*K.
template <class Op>
void set_lists(Op& op, const TensorView& lists, std::int64_t tokens, std::int64_t k, std::int64_t experts) {
  auto* next = static_cast<std::int32_t*>(lists.data);
  const auto take = [&](std::initializer_list<std::int64_t> shape) {
    const TensorView list(next, DType::int32, shape, lists.device);
    next += list.numel();
    return list;
  };
  op.ids = take({tokens, k});
  op.row_token = take({tokens * k});
  op.row_slot = take({tokens * k});
  op.slot_row = take({tokens, k});
  op.expert_offsets = take({experts + 1});
}

// ---- options

/// MoeOptions of python/intarsia/ops/moe.py.
struct Options {
  std::int64_t k = 1, groups = 1, top_groups = 1, returned = 1, gate_block = 0;
  RouterScores scores_kind{};
  Activation activation{};
  ScorePlacement score_on{};
  Backend backend{};
  double scale = 1;
  bool renormalise = false, input_dtype = false, count_nan_tokens = false, count_rows = false, transposed = false,
       save_z = false, overwrite_z = false;

  bool returns_logits() const { return returned == 3; }
};

/// In the order of the schema: from arguments, or from words.
template <class Values>
void take(Values& v, Options& o) {
  v.value("k", o.k);
  v.value("scores_kind", o.scores_kind);
  v.value("groups", o.groups);
  v.value("top_groups", o.top_groups);
  v.value("renormalise", o.renormalise);
  v.value("scale", o.scale);
  v.value("input_dtype", o.input_dtype);
  v.value("count_nan_tokens", o.count_nan_tokens);
  v.value("count_rows", o.count_rows);
  v.value("returned", o.returned);
  v.value("gate_block", o.gate_block);
  v.value("transposed", o.transposed);
  v.value("activation", o.activation);
  v.value("score_on", o.score_on);
  v.value("save_z", o.save_z);
  v.value("overwrite_z", o.overwrite_z);
  v.value("backend", o.backend);
}

/// Values from one argument, a text with a line for each (words() of python/intarsia/ops/define.py): every argument takes torch
/// about 0.3 us.
class Words {
 public:
  explicit Words(std::string_view text) : text_(text) {}

  void value(const char* name, bool& v) {
    const std::string_view word = next();
    if (word != "True" && word != "False") fail(name, "True or False", word);
    v = word == "True";
  }
  template <class Value>
  void value(const char* name, Value& v) {
    const std::string_view word = next();
    if constexpr (std::is_enum_v<Value>) {
      v = parse<Value>(word);
    } else {
      const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), v);
      if (error != std::errc() || end != word.data() + word.size()) fail(name, "a number", word);
    }
  }
  void finish() const {
    if (!text_.empty()) throw InvalidArgument("options: expected texts without line breaks");
  }

 private:
  std::string_view next() {
    const std::string_view word = text_.substr(0, text_.find('\n'));
    text_.remove_prefix(std::min(text_.size(), word.size() + 1));
    return word;
  }
  [[noreturn]] static void fail(const char* name, const char* expected, std::string_view got) {
    throw InvalidArgument(std::string(name) + ": expected " + expected + ", got " + std::string(got));
  }

  std::string_view text_;
};

/// body(words) on the argument that holds them, all of which it must take.
template <class Body>
void take_words(Arguments& a, Body&& body) {
  a.text([&](std::string_view text) {
    Words words(text);
    body(words);
    words.finish();
  });
}

template <class Op>
void set_shared_options(Op& op, const Options& o) {
  op.scores_kind = o.scores_kind;
  op.renormalise = o.renormalise;
  op.scale = o.scale;
  op.w_up.gate_block = o.gate_block;
  op.w_up.transposed = op.w_down.transposed = o.transposed;
  op.activation = o.activation;
  op.score_on = o.score_on;
}

// ---- forward

/// In the order of the schema.
void take(Arguments& a, MoeForward& op) {
  a.in("x", op.x);
  a.in("w_router", op.w_router);
  a.optional_in("b_router", op.b_router);
  a.optional_in("expert_bias", op.expert_bias);
  a.optional_in("token_mask", op.token_mask);
  a.in("w_up", op.w_up.weight);
  a.optional_in("w_up_second", op.w_up.second);
  a.in("w_down", op.w_down.weight);
  a.optional_in("b_up", op.b_up);
  a.optional_in("b_down", op.b_down);
  a.optional_in("addend", op.addend);
}

void set_options(MoeForward& op, const Options& o) {
  if (o.k < 1) throw InvalidArgument("moe_forward: k: expected at least 1, got " + std::to_string(o.k));
  set_shared_options(op, o);
  op.groups = o.groups;
  op.top_groups = o.top_groups;
}

/// Whether logits are kept for backward: by softmax alone, where they have 16 bits.
bool keeps_logits(const MoeForward& op, const Options& o) {
  return o.save_z && op.scores_kind == RouterScores::softmax && op.w_router.dtype == op.x.dtype && size_of(op.x.dtype) == 2;
}

/// In the order of the schema.
void make_outputs(Outputs& out, MoeForward& op, const Options& o) {
  const DType x = op.x.dtype, score = x == DType::float64 ? DType::float64 : DType::float32;
  const std::int64_t tokens = op.x.size(0), experts = op.w_router.size(0), rows = tokens * o.k;
  const std::int64_t z_width = gate_factor(op.activation) * op.w_down.weight.size(op.w_down.transposed ? 1 : 2);
  op.logits_dtype = o.input_dtype ? x : score;
  op.y = out.add(x, {tokens, op.x.size(1)});
  op.scores = out.add(score, {tokens, o.k});
  op.logits = out.add_if(o.returns_logits(), op.logits_dtype, {tokens, experts});
  set_lists(op, out.add(DType::int32, {list_entries(rows, experts)}), tokens, o.k, experts);
  op.nan_tokens = out.add_if(o.count_nan_tokens, DType::int32, {1});
  if (o.count_nan_tokens) check(aoti_torch_zero_(out.last()), "aoti_torch_zero_");
  op.expert_counts = out.add_if(o.count_rows, DType::int32, {experts});
  op.z = out.add_if(o.save_z, x, {rows, z_width});
  op.raw_scores = out.add_if(op.scores_kind == RouterScores::sigmoid_group, score, {tokens, o.k});
  const TensorView kept = out.add_if(keeps_logits(op, o) && !(o.returns_logits() && o.input_dtype), x, {tokens, experts});
  if (kept.defined()) (o.input_dtype ? op.logits : op.rounded_logits) = kept;
}

// ---- backward

void take_lists(MoeBackward& op, const TensorView& lists) {
  const std::int64_t experts = op.w_router.size(0), entries = list_entries(op.scores.numel(), experts);
  if (op.scores.rank != 2 || lists.rank != 1 || lists.dtype != DType::int32 || !lists.contiguous() || lists.size(0) != entries)
    throw InvalidArgument("moe_backward: lists: expected those that moe_forward returned beside these scores and experts");
  set_lists(op, lists, op.scores.size(0), op.scores.size(1), experts);
}

/// In the order of the schema. `asked` has a bit for each gradient, in the order in which they are returned.
void take(Arguments& a, MoeBackward& op, Options& o, std::int64_t& asked) {
  a.in("dy", op.dy);
  a.in("x", op.x);
  a.in("w_router", op.w_router);
  a.optional_in("b_router", op.b_router);
  a.in("w_up", op.w_up.weight);
  a.optional_in("w_up_second", op.w_up.second);
  a.in("w_down", op.w_down.weight);
  a.optional_in("b_up", op.b_up);
  a.optional_in("b_down", op.b_down);
  a.optional_inout("z", op.z);
  a.optional_in("logits", op.logits);
  a.in("scores", op.scores);
  a.optional_in("raw_scores", op.raw_scores);
  TensorView lists;
  a.in("lists", lists);
  take_words(a, [&](Words& words) {
    take(words, o);
    words.value("logits_dtype", op.logits_dtype);
    words.value("dlogits_dtype", op.dlogits_dtype);
    words.value("overwrite_z", op.overwrite_z);
    words.value("asked", asked);
  });
  a.finish(MoeBackward::kName);
  take_lists(op, lists);
  set_shared_options(op, o);
}

/// In the order of the schema.
void make_outputs(Outputs& out, MoeBackward& op, std::int64_t asked) {
  auto gradient = [&, bit = 0](const TensorView& v) mutable { return out.add_gradient(asked >> bit++ & 1, v); };
  const auto contiguous = [](const TensorView& v) { return TensorView(nullptr, v.dtype, {v.size(0), v.size(1)}); };
  op.dx = gradient(contiguous(op.x));
  op.dw_router = gradient(op.w_router.step(1) == 1 ? op.w_router : contiguous(op.w_router));  // its rows are dense
  op.db_router = gradient(op.b_router);
  op.dw_up = {gradient(op.w_up.weight), gradient(op.w_up.second), op.w_up.gate_block, op.w_up.transposed};
  op.dw_down = {.weight = gradient(op.w_down.weight), .transposed = op.w_down.transposed};
  op.db_up = gradient(op.b_up);
  op.db_down = gradient(op.b_down);
}

void forward(StableIValue* stack, MoeForward& op, Arguments& arguments, const Options& o, std::optional<DType> empty) {
  arguments.finish(MoeForward::kName);
  set_options(op, o);
  Outputs outputs(arguments.device(), empty);
  make_outputs(outputs, op, o);
  run_with_torch(op, {.backend = o.backend}, arguments.device());
  outputs.give(stack);
}

void moe_forward(StableIValue* stack, std::uint64_t, std::uint64_t) {
  with_typed_errors([&] {
    MoeForward op;
    Options options;
    Arguments arguments(stack);
    take(arguments, op);
    take(arguments, options);
    forward(stack, op, arguments, options, op.x.dtype);
  });
}

void moe_forward_native(StableIValue* stack, std::uint64_t, std::uint64_t) {
  with_typed_errors([&] {
    MoeForward op;
    Options options;
    Arguments arguments(stack);
    take(arguments, op);
    take_words(arguments, [&](Words& words) { take(words, options); });
    forward(stack, op, arguments, options, {});
  });
}

void moe_backward_native(StableIValue* stack, std::uint64_t, std::uint64_t) {
  with_typed_errors([&] {
    MoeBackward op;
    Options options;
    std::int64_t asked = 0;
    Arguments arguments(stack);
    take(arguments, op, options, asked);
    Outputs outputs(arguments.device());
    make_outputs(outputs, op, asked);
    run_with_torch(op, {.backend = options.backend}, arguments.device());
    outputs.give(stack);
  });
}

}  // namespace

void register_moe(torch::stable::detail::StableLibrary& library) {
  library.impl("moe_forward", &moe_forward);
  library.impl("moe_forward.native", &moe_forward_native);
  library.impl("moe_backward.native", &moe_backward_native);
}

}  // namespace intarsia::torch_shim
