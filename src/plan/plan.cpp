// plan_layer: the buffers of design.md section 3, their lifetimes, and their places in the workspaces.
#include "intarsia/plan.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "base/execution.h"
#include "intarsia/error.h"
#include "plan/blocking.h"

namespace intarsia {
namespace {

enum Step {  // the order of design.md section 3
  kRouterLogits,
  kRoute,
  kBuildIndex,
  kUpForward,
  kDownForward,
  kCombine,
  kDownBackward,
  kDownWeightBackward,
  kUpWeightBackward,
  kBiasBackward,
  kUpBackward,
  kCombineBackward,
  kRouteBackward,
  kRouterLogitsBackward,
  kSteps
};
constexpr int kBorder = kDownBackward;
constexpr const char* kStepNames[kSteps] = {"router_logits",      "route",
                                            "build_index",        "up_forward",
                                            "down_forward",       "combine",
                                            "down_backward",      "down_weight_backward",
                                            "up_weight_backward", "bias_backward",
                                            "up_backward",        "combine (dx)",
                                            "route_backward",     "router_logits_backward"};

bool router_needs_logits(RouterScores scores) { return scores == RouterScores::softmax; }

class Planner {
 public:
  Planner(const LayerShape& shape, const PlanOptions& options) : s_(shape), o_(options) {
    rows_ = s_.rows > 0 ? s_.rows : s_.tokens * s_.experts_per_token;
    plan_.steps.assign(std::begin(kStepNames), std::end(kStepNames));
    plan_.border = kBorder;
  }

  Plan build() {
    if (o_.training) saved();
    workspaces();
    transients();
    plan_.forward_workspace_bytes = place(0, kBorder - 1);
    plan_.backward_workspace_bytes = place(kBorder, kSteps - 1);
    total();
    return std::move(plan_);
  }

 private:
  void add(const char* name, std::vector<std::int64_t> shape, DType dtype, BufferKind kind, int first, int last) {
    const std::int64_t count = std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
    plan_.buffers.push_back(
        {name, std::move(shape), dtype, static_cast<std::size_t>(count) * size_of(dtype), kind, first, last, 0});
  }
  void save(const char* name, std::vector<std::int64_t> shape, DType dtype, int first, int last) {
    add(name, std::move(shape), dtype, BufferKind::saved, first, last);
  }

  DType score_dtype() const { return s_.dtype == DType::float64 ? DType::float64 : DType::float32; }
  std::int64_t z_width() const { return gate_factor(s_.activation) * s_.width; }

  void saved() {
    const std::int64_t t = s_.tokens, k = s_.experts_per_token;
    save("x", {s_.sorted_rows ? rows_ : t, s_.hidden}, s_.dtype, 0, o_.has_router ? kRouterLogitsBackward : kUpWeightBackward);
    save("expert_offsets", {s_.experts + 1}, DType::int32, kBuildIndex, kCombineBackward);
    if (!s_.sorted_rows) {
      save("row_token", {rows_}, DType::int32, kBuildIndex, kCombineBackward);
      save("row_slot", {rows_}, DType::int32, kBuildIndex, kCombineBackward);
      const int last = o_.has_router ? kRouteBackward : kBiasBackward;
      if (s_.token_rows) {
        save("token_offsets", {t + 1}, DType::int32, kBuildIndex, kCombineBackward);
        save("token_rows", {rows_}, DType::int32, kBuildIndex, kCombineBackward);
        save("scores", {rows_}, score_dtype(), kRoute, last);
      } else {
        save("slot_row", {t, k}, DType::int32, kBuildIndex, kCombineBackward);
        save("scores", {t, k}, score_dtype(), kRoute, last);
        if (o_.has_router) save("ids", {t, k}, DType::int32, kRoute, kRouteBackward);
      }
      if (o_.has_router && o_.router == RouterScores::sigmoid_group)
        save("raw_scores", {t, k}, score_dtype(), kRoute, kRouteBackward);
      if (o_.has_router && o_.router_keeps_logits) save("logits", {t, s_.experts}, s_.dtype, kRouterLogits, kRouteBackward);
    }
    if (o_.save == SaveMode::preactivation)
      save("z", {rows_, z_width()}, s_.dtype, kUpForward, o_.overwrite_z ? kUpBackward : kDownBackward);
  }

  void workspaces() {
    if (o_.backend == Backend::reference) return;  // plain loops with their own small vectors: not a backend to plan memory for
    if (o_.backend == Backend::cuda) return cuda_workspaces();
    LayerShape shape = s_;
    shape.rows = rows_;
    const CpuBlocking blocking = cpu_blocking(shape);
    const auto work = [&](const char* name, std::vector<std::int64_t> dims, DType dtype, int first, int last) {
      add(name, std::move(dims), dtype, BufferKind::workspace, first, last);
    };
    const auto scratch = [&](int first, int last) {
      work("segments", {blocking.segment_entries}, DType::int32, first, last);
      work("scratch", {std::max(1, o_.threads), static_cast<std::int64_t>(blocking.scratch_bytes)}, DType::boolean, first,
           last);
    };
    scratch(kUpForward, kCombine);
    if (!s_.sorted_rows) work("rows", {blocking.chunk_rows, s_.hidden}, s_.dtype, kDownForward, kCombine);
    if (!o_.training) return;
    scratch(kDownBackward, kCombineBackward);
    if (o_.save == SaveMode::input) work("z", {rows_, z_width()}, s_.dtype, kDownBackward, kUpBackward);
    if (o_.save == SaveMode::preactivation && !o_.overwrite_z)
      work("dz", {rows_, z_width()}, s_.dtype, kDownBackward, kUpBackward);
    if (o_.weight_gradient) work("a_scaled", {rows_, s_.width}, s_.dtype, kDownBackward, kDownWeightBackward);
    if (!s_.sorted_rows) work("dx_rows", {blocking.chunk_rows, s_.hidden}, s_.dtype, kUpBackward, kCombineBackward);
  }

  /// On the GPU every operation takes all rows at once; a, a' and what replaces z live as long as the next operation needs
  /// them.
  void cuda_workspaces() {
    const auto work = [&](const char* name, std::int64_t columns, int first, int last) {
      add(name, {rows_, columns}, s_.dtype, BufferKind::workspace, first, last);
    };
    work("a", s_.width, kUpForward, kDownForward);
    if (!s_.sorted_rows) work("rows", s_.hidden, kDownForward, kCombine);
    if (!o_.training) return;
    if (o_.save == SaveMode::input) work("z", z_width(), kDownBackward, kUpBackward);
    else if (!o_.overwrite_z) work("dz", z_width(), kDownBackward, kUpBackward);
    if (o_.weight_gradient || o_.save == SaveMode::input) work("a_scaled", s_.width, kDownBackward, kDownWeightBackward);
    add("row_dots", {(s_.width + kRowDotColumns - 1) / kRowDotColumns, rows_}, score_dtype(), BufferKind::workspace,
        kDownBackward, kDownBackward);
    if (o_.bias_gradient)  // one gradient after the other, in the same place
      add("bias_sums", {BiasSlices(rows_).sums(s_.experts), std::max(z_width(), s_.hidden)}, score_dtype(),
          BufferKind::workspace, kBiasBackward, kBiasBackward);
    if (!s_.sorted_rows) work("dx_rows", s_.hidden, kUpBackward, kCombineBackward);
  }

  void transients() {
    const auto pass = [&](const char* name, std::vector<std::int64_t> shape, DType dtype, int first, int last) {
      add(name, std::move(shape), dtype, BufferKind::transient, first, last);
    };
    const std::int64_t t = s_.tokens, e = s_.experts;
    if (o_.has_router && !(o_.training && o_.router_keeps_logits))
      pass("logits", {t, e}, DType::float32, kRouterLogits, kRoute);
    pass("y", {s_.sorted_rows ? rows_ : t, s_.hidden}, s_.dtype, kUpForward, kCombine);  // allocated before layer_forward
    if (!o_.training || !o_.has_router) return;
    const auto scores = s_.token_rows ? std::vector<std::int64_t>{rows_} : std::vector<std::int64_t>{t, s_.experts_per_token};
    pass("dscores", scores, score_dtype(), kDownBackward, kRouteBackward);
    if (router_needs_logits(o_.router) && !o_.router_keeps_logits)
      pass("logits (recomputed)", {t, e}, DType::float32, kRouteBackward, kRouteBackward);
    pass("dlogits", {t, e}, DType::float32, kRouteBackward, kRouterLogitsBackward);
  }

  /// Offsets for the workspace buffers that start in [first, last]: largest first, each at the lowest place that is free for as
  /// long as it lives. Returns the bytes of the block.
  std::size_t place(int first, int last) {
    std::vector<Buffer*> todo, placed;
    for (Buffer& b : plan_.buffers)
      if (b.kind == BufferKind::workspace && b.first >= first && b.first <= last) todo.push_back(&b);
    std::stable_sort(todo.begin(), todo.end(), [](const Buffer* a, const Buffer* b) { return a->bytes > b->bytes; });
    std::size_t block = 0;
    for (Buffer* b : todo) {
      std::size_t offset = 0;
      for (const Buffer* p : placed) {  // ascending offset
        const bool together = p->first <= b->last && b->first <= p->last;
        if (together && offset + align_up(b->bytes) > p->offset && p->offset + align_up(p->bytes) > offset)
          offset = p->offset + align_up(p->bytes);
      }
      b->offset = offset;
      block = std::max(block, offset + align_up(b->bytes));
      placed.insert(std::upper_bound(placed.begin(), placed.end(), b,
                                     [](const Buffer* a, const Buffer* c) { return a->offset < c->offset; }),
                    b);
    }
    return block;
  }

  void total() {
    for (const Buffer& b : plan_.buffers)
      if (b.kind == BufferKind::saved) plan_.saved_bytes += b.bytes;
    for (int step = 0; step < kSteps; ++step) {
      std::size_t live = 0;
      for (const Buffer& b : plan_.buffers)
        if (b.kind != BufferKind::workspace && b.name != "x" && b.first <= step && step <= b.last) live += b.bytes;
      if (step >= kUpForward && step <= kCombine) live += plan_.forward_workspace_bytes;
      if (step >= kDownBackward && step <= kCombineBackward) live += plan_.backward_workspace_bytes;
      plan_.peak_bytes = std::max(plan_.peak_bytes, live);
    }
  }

  const LayerShape& s_;
  const PlanOptions& o_;
  std::int64_t rows_;
  Plan plan_;
};

}  // namespace

Plan plan_layer(const LayerShape& shape, const PlanOptions& options) {
  const auto positive = [](const char* name, std::int64_t value, std::int64_t least) {
    if (value < least)
      throw InvalidArgument("plan_layer: " + std::string(name) + " must be at least " + std::to_string(least) + ", got " +
                            std::to_string(value));
  };
  positive("tokens", shape.tokens, 0);
  positive("hidden", shape.hidden, 1);
  positive("width", shape.width, 1);
  positive("experts", shape.experts, 1);
  positive("experts_per_token", shape.experts_per_token, 1);
  positive("rows", shape.rows, 0);
  positive("threads", options.threads, 1);
  return Planner(shape, options).build();
}

const Buffer* Plan::forward_workspace(std::string_view name) const {
  for (const Buffer& b : buffers)
    if (b.kind == BufferKind::workspace && b.first < border && b.name == name) return &b;
  return nullptr;
}

const Buffer* Plan::backward_workspace(std::string_view name) const {
  for (const Buffer& b : buffers)
    if (b.kind == BufferKind::workspace && b.first >= border && b.name == name) return &b;
  return nullptr;
}

}  // namespace intarsia
