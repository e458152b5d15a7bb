// The CPU backend's layer where it is cut into pieces: more rows than a chunk of tokens, than a block of rows and than one step
// of a weight gradient holds. Against the reference backend, with the same bits for 1, 2 and 3 threads and wherever the cuts
// fall.
#include "base/rows.h"
#include "plan/blocking.h"
#include "poisoned.h"

namespace intarsia {
namespace {

using namespace poisoned;

struct Sizes {
  std::int64_t tokens, hidden, width, experts, choices;
};

/// ids of tokens, a seventh of them "not here"; `busy` sends most to the last expert.
Tensor choose(const Sizes& s, bool busy) {
  return Tensor(DType::int32, {s.tokens, s.choices}).fill([&](std::int64_t) {
    if (busy && below(10) != 0) return static_cast<double>(s.experts - 1);
    return static_cast<double>(below(7) == 0 ? -1 : below(s.experts));
  });
}

/// The index lists of ids, and the same as CSR lists.
struct Lists {
  Tensor expert_offsets, row_token, row_slot, slot_row, token_offsets, token_rows, csr_slot;
  std::int64_t rows;

  Lists(const Sizes& s, const Tensor& ids)
      : expert_offsets(DType::int32, {s.experts + 1}),
        row_token(DType::int32, {ids.numel()}),
        row_slot(DType::int32, {ids.numel()}),
        slot_row(DType::int32, {s.tokens, s.choices}),
        token_offsets(DType::int32, {s.tokens + 1}),
        token_rows(DType::int32, {ids.numel()}),
        csr_slot(DType::int32, {ids.numel()}) {
    run(BuildIndex{.ids = ids.view(),
                   .expert_offsets = expert_offsets.view(),
                   .row_token = row_token.view(),
                   .row_slot = row_slot.view(),
                   .slot_row = slot_row.view()});
    rows = list(expert_offsets.view())[s.experts];
    std::int64_t position = 0;
    for (std::int64_t t = 0; t < s.tokens; ++t) {
      token_offsets.set(t, static_cast<double>(position));
      for (std::int64_t k = 0; k < s.choices; ++k) {
        const auto row = static_cast<std::int64_t>(slot_row[t * s.choices + k]);
        if (row < 0) continue;
        csr_slot.set(row, static_cast<double>(position));
        token_rows.set(position++, static_cast<double>(row));
      }
    }
    token_offsets.set(s.tokens, static_cast<double>(position));
  }
};

/// Everything one layer needs.
struct Layer {
  Sizes s;
  DType dtype;
  Lists lists;
  Tensor x, dy, addend, w_up, w_down, b_up, b_down, slot_scores, row_scores, z, y, dx, dw_up, dw_down, db_up, db_down, ds_slot,
      ds_row;

  Layer(const Sizes& sizes, DType type, bool busy)
      : s(sizes),
        dtype(type),
        lists(s, choose(s, busy)),
        x(normal(dtype, {s.tokens, s.hidden})),
        dy(normal(dtype, {s.tokens, s.hidden})),
        addend(normal(dtype, {s.tokens, s.hidden})),
        w_up(normal(dtype, {s.experts, 2 * s.width, s.hidden}, std::pow(s.hidden, -0.5))),
        w_down(normal(dtype, {s.experts, s.hidden, s.width}, std::pow(s.width, -0.5))),
        b_up(normal(dtype, {s.experts, 2 * s.width})),
        b_down(normal(dtype, {s.experts, s.hidden})),
        slot_scores(normal(DType::float32, {s.tokens, s.choices})),
        row_scores(DType::float32, {s.tokens * s.choices}),
        z(normal(dtype, {s.tokens * s.choices, 2 * s.width})),
        y(dtype, {s.tokens, s.hidden}),
        dx(dtype, {s.tokens, s.hidden}),
        dw_up(dtype, {s.experts, 2 * s.width, s.hidden}),
        dw_down(dtype, {s.experts, s.hidden, s.width}),
        db_up(dtype, {s.experts, 2 * s.width}),
        db_down(dtype, {s.experts, s.hidden}),
        ds_slot(DType::float32, {s.tokens, s.choices}),
        ds_row(DType::float32, {s.tokens * s.choices}) {
    for (std::int64_t r = 0; r < lists.rows; ++r) row_scores.set(r, slot_scores[static_cast<std::int64_t>(lists.row_slot[r])]);
  }

  LayerForward forward(bool csr) const {
    LayerForward op{.x = x.view(),
                    .expert_offsets = lists.expert_offsets.view(),
                    .row_token = lists.row_token.view(),
                    .row_slot = csr ? lists.csr_slot.view() : lists.row_slot.view(),
                    .scores = csr ? row_scores.view() : slot_scores.view(),
                    .w_up = {.weight = w_up.view()},
                    .w_down = {.weight = w_down.view()},
                    .b_up = b_up.view(),
                    .b_down = b_down.view(),
                    .addend = addend.view(),
                    .z = z.view(),
                    .y = y.view()};
    set_lists(op, csr);
    return op;
  }

  /// With z given and dz over it, or with z recomputed.
  LayerBackward backward(bool csr, bool recompute) const {
    LayerBackward op{.dy = dy.view(),
                     .x = x.view(),
                     .expert_offsets = lists.expert_offsets.view(),
                     .row_token = lists.row_token.view(),
                     .row_slot = csr ? lists.csr_slot.view() : lists.row_slot.view(),
                     .scores = csr ? row_scores.view() : slot_scores.view(),
                     .w_up = {.weight = w_up.view()},
                     .w_down = {.weight = w_down.view()},
                     .b_up = b_up.view(),
                     .b_down = b_down.view(),
                     .addend = addend.view(),
                     .overwrite_z = !recompute,
                     .grad_scale = 0.5,
                     .z = recompute ? TensorView{} : z.view(),
                     .dx = dx.view(),
                     .dscores = csr ? ds_row.view() : ds_slot.view(),
                     .dw_up = {.weight = dw_up.view()},
                     .dw_down = {.weight = dw_down.view()},
                     .db_up = db_up.view(),
                     .db_down = db_down.view()};
    set_lists(op, csr);
    return op;
  }

 private:
  template <class Op>
  void set_lists(Op& op, bool csr) const {
    if (csr) {
      op.token_offsets = lists.token_offsets.view();
      op.token_rows = lists.token_rows.view();
    } else {
      op.slot_row = lists.slot_row.view();
    }
  }
};

/// docs/numerics.md with the result itself for its absolute products: |error| <= u |truth| in the norm, and for an element four
/// times its share of that, because z, a' and the result are rounded one after another and a single large row can carry all of
/// those roundings at once. A sum that cancels is measured by a quarter of the tensor's largest value. u is that of the layer's
/// dtype, to which intermediate results are rounded whatever the output's own dtype is. Rows that no list names keep their
/// poison.
void expect_near(const Tensor& got, const Tensor& truth, double u, const std::string& name) {
  double largest = 0, norm = 0, error_norm = 0;
  for (std::int64_t i = 0; i < truth.numel(); ++i) {
    ASSERT_EQ(std::isnan(truth[i]), std::isnan(got[i])) << name << "[" << i << "]: " << got[i] << ", expected " << truth[i];
    if (std::isnan(truth[i])) continue;
    largest = std::max(largest, std::abs(truth[i]));
    norm += truth[i] * truth[i];
    error_norm += (got[i] - truth[i]) * (got[i] - truth[i]);
  }
  for (std::int64_t i = 0; i < truth.numel(); ++i) {
    if (std::isnan(truth[i])) continue;
    const double limit = 4 * u * std::max(std::abs(truth[i]), largest / 4);
    ASSERT_LE(std::abs(got[i] - truth[i]), limit) << name << "[" << i << "]: " << got[i] << ", expected " << truth[i];
  }
  EXPECT_LE(std::sqrt(error_norm), u * std::sqrt(norm)) << name << ": norm of the error";
}

/// The CPU backend against the reference backend.
void verify_layer(const auto& op) {
  const Outputs one = run_on(op, Backend::cpu, 1), expected = run_on(op, Backend::reference, 1);
  for (const int threads : {2, 3})
    for (const auto& [name, tensor] : run_on(op, Backend::cpu, threads))
      EXPECT_TRUE(tensor.same_bits(one.at(name))) << name << " depends on the number of threads";
  for (const auto& [name, tensor] : one) expect_near(tensor, expected.at(name), unit(op.x.dtype), name);
}

TEST(CpuLayer, ManyChunksOfTokens) {
  const Sizes s{.tokens = 1800 + below(100), .hidden = 19, .width = 11, .experts = 5, .choices = 5};
  ASSERT_GT(
      s.tokens * s.choices,
      2 * cpu_blocking(
              {.tokens = s.tokens, .hidden = s.hidden, .width = s.width, .experts = s.experts, .experts_per_token = s.choices})
              .chunk_rows);
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    const Layer layer(s, dtype, false);
    for (const bool csr : {false, true}) {
      SCOPED_TRACE(std::string(to_string(dtype)) + (csr ? " csr" : " slots"));
      verify_layer(layer.forward(csr));
      verify_layer(layer.backward(csr, csr));
    }
  }
}

TEST(CpuLayer, OneBusyExpert) {
  const Sizes s{.tokens = 900 + below(100), .hidden = 70, .width = 130, .experts = 40, .choices = 1};
  const Layer layer(s, DType::float32, true);
  verify_layer(layer.forward(false));
  verify_layer(layer.backward(false, false));
}

TEST(CpuLayer, TilesOfWideRows) {
  const Sizes s{.tokens = 21, .hidden = 1100, .width = 1300, .experts = 2, .choices = 1};
  const Layer layer(s, DType::bfloat16, false);
  verify_layer(layer.forward(false));
  verify_layer(layer.backward(false, true));
}

// A token's row must not depend on who shares its block or chunk.
TEST(CpuLayer, ATokenAloneGetsTheSameBits) {
  const Sizes s{.tokens = 2200, .hidden = 64, .width = 48, .experts = 3, .choices = 4};
  for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16}) {
    const Layer layer(s, dtype, false);
    const Tensor all = run_on(layer.forward(false), Backend::cpu, 2).at("y");
    for (const std::int64_t t : {std::int64_t{0}, below(s.tokens), s.tokens - 1}) {
      const Tensor ids(DType::int32, {1, s.choices});
      for (std::int64_t k = 0; k < s.choices; ++k) {
        const auto row = static_cast<std::int32_t>(layer.lists.slot_row[t * s.choices + k]);
        const std::int32_t* offsets = list(layer.lists.expert_offsets.view());
        ids.set(k, row < 0 ? -1 : static_cast<double>(std::upper_bound(offsets, offsets + s.experts + 1, row) - offsets - 1));
      }
      const Lists lists({1, s.hidden, s.width, s.experts, s.choices}, ids);
      const auto token = [&](const TensorView& v) {
        TensorView one = v;
        one.data = static_cast<std::byte*>(v.data) + t * v.step(0) * static_cast<std::int64_t>(size_of(v.dtype));
        one.shape[0] = 1;
        return one;
      };
      LayerForward op = layer.forward(false);
      op.x = token(op.x), op.scores = token(op.scores), op.addend = token(op.addend), op.z = {};
      op.y = token(op.y);
      op.expert_offsets = lists.expert_offsets.view(), op.row_token = lists.row_token.view();
      op.row_slot = lists.row_slot.view(), op.slot_row = lists.slot_row.view();
      const Tensor alone = run_on(op, Backend::cpu, 1).at("y");
      EXPECT_EQ(std::memcmp(alone.view().data, token(all.view()).data, alone.bytes()), 0)
          << to_string(dtype) << ", token " << t;
    }
  }
}

}  // namespace
}  // namespace intarsia
