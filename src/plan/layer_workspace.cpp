#include "plan/layer_workspace.h"

#include <array>

namespace intarsia {
namespace {

struct Kept {
  LayerShape shape;
  PlanOptions options;
  std::shared_ptr<const Plan> plan;
};

}  // namespace

std::shared_ptr<const Plan> kept_plan(const LayerShape& shape, const PlanOptions& options) {
  thread_local std::array<Kept, 8> kept;
  thread_local std::size_t oldest = 0;
  for (const Kept& k : kept)
    if (k.plan && k.shape == shape && k.options == options) return k.plan;
  auto plan = std::make_shared<const Plan>(plan_layer(shape, options));
  kept[oldest] = {shape, options, plan};
  oldest = (oldest + 1) % kept.size();
  return plan;
}

}  // namespace intarsia
