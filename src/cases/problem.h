// The expert layers that every operation on experts is checked with: one table, from which each operation's file takes what is
// its own. A problem says how tokens are routed, how tensors lie in memory and what is left out.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "cases/case.h"
#include "cases/tensors.h"
#include "intarsia/ops.h"

namespace intarsia::cases {

/// Who goes where.
///   uniform; all_to_one (the last expert, K = 1 of K choices); half_empty: every second expert has no rows; sentinels: ids -1,
///   E and far outside among the others, token 0 has none; duplicates: every choice of a token is the same expert; nobody: no
///   rows
enum class Routing { uniform, all_to_one, half_empty, sentinels, duplicates, nobody };

/// Which lists the layer gets (see LayerForward).
enum class Form { slots, csr, sorted };

struct WeightLayout {
  std::int64_t gate_block = 0;
  bool two_tensors = false;
  bool transposed = false;
  Layout memory = Layout::dense;
};

struct Problem {
  std::string name;
  std::int64_t tokens = 24, hidden = 20, width = 12, experts = 4, choices = 2;
  std::vector<std::int64_t> counts = {};  ///< rows of each expert, for K = 1, in place of tokens, experts, choices and routing
  Routing routing = Routing::uniform;
  Form form = Form::slots;
  std::int64_t slack = 0;  ///< rows of capacity past the last row, full of NaN
  Activation activation = Activation::swiglu;
  ScorePlacement score_on = ScorePlacement::output;
  bool scores = true;  ///< false: sorted rows without scores
  WeightLayout weights = {};
  Layout rows_layout = Layout::dense;  ///< of x, dy and addend
  bool biases = false, fp32_biases = false;
  bool addend = false;
  bool in_place = false;  ///< dz is z, the addend is y
  bool accumulate = false, fp32_gradients = false;
  double grad_scale = 1;
  bool optional_outputs = true;  ///< false: frozen weights, inference
  bool keep_z = true;            ///< false: save = input, z is recomputed in backward
};

std::vector<Problem> problems();
std::vector<Problem> benchmark_problems();

/// Number of rows, and the lists of them.
struct Lists {
  std::int64_t tokens, rows, capacity;  ///< rows of x; rows in use; R
  TensorView expert_offsets, row_token, row_slot, slot_row, token_offsets, token_rows;
};

/// Everything but the outputs of an operation, made from a problem. Rows that must not be read hold NaN.
class Experts {
 public:
  Experts(Tensors& tensors, const Problem& problem, DType dtype);

  const Lists& lists() const { return lists_; }
  const TensorView& scores() const { return scores_; }
  std::int64_t experts() const { return experts_; }
  std::int64_t gates() const { return gate_factor(p_.activation); }

  TensorView token_rows();                     ///< (T, H) or (R, H): x or dy
  TensorView expert_rows(std::int64_t width);  ///< (R, width): a, z, rows; NaN past the last row
  TensorView out_rows(std::int64_t width);     ///< the same as an output
  TensorView like_scores();
  Weights w_up();
  Weights w_down();
  TensorView b_up();
  TensorView b_down();
  Weights dw_up();
  Weights dw_down();
  TensorView db_up();
  TensorView db_down();
  TensorView gradient(const Shape& shape, Layout layout = Layout::dense);  ///< an output, or something to accumulate into

 private:
  void make_slots(const std::vector<double>& ids);
  void make_csr();
  void make_sorted(const std::vector<double>& ids);
  void make_scores();
  std::vector<double> draw_ids();
  Weights weights(std::int64_t out, std::int64_t in, bool gated);
  Weights weight_gradient(std::int64_t out, std::int64_t in, bool gated);

  Tensors& t_;
  const Problem& p_;
  DType dtype_;
  std::int64_t experts_, choices_;
  Lists lists_;
  TensorView scores_;
};

/// Products of a row with w_up and with w_down that an operation computes.
struct Products {
  double up = 0, down = 0;
};

/// The cases of one operation: every problem of a table in every dtype. make(experts, tensors, problem, dtype) gives the
/// operation. `rounds_inside`: it rounds intermediate results to dtype, so outputs of a wider dtype are no more exact than
/// that.
template <class Op, class Make>
std::vector<Case<Op>> expert_cases(const std::vector<Problem>& table, Products products, Make make, bool rounds_inside = false,
                                   std::span<const DType> dtypes = kDTypes) {
  std::vector<Case<Op>> result;
  for (const Problem& p : table) {
    for (const DType dtype : dtypes) {
      Case<Op> c{.name = named(p.name, dtype)};
      c.build = [=](Tensors& t) {
        Experts experts(t, p, dtype);
        return make(experts, t, p, dtype);
      };
      const double multiply_adds = static_cast<double>(p.tokens * p.choices) * static_cast<double>(p.hidden * p.width);
      c.flops = 2 * multiply_adds * (products.up * static_cast<double>(gate_factor(p.activation)) + products.down);
      if (rounds_inside) c.rounding = dtype;
      result.push_back(std::move(c));
    }
  }
  return result;
}

/// The same from the table of benchmarks.
template <class Op, class Make>
std::vector<Case<Op>> expert_benchmarks(Products products, Make make, bool rounds_inside = false) {
  return expert_cases<Op>(benchmark_problems(), products, make, rounds_inside, kBenchmarkDTypes);
}

}  // namespace intarsia::cases
