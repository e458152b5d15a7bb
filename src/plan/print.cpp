// A plan as JSON for programs and as a table for people.
#include <algorithm>
#include <cstdio>
#include <string>

#include "intarsia/plan.h"

namespace intarsia {
namespace {

constexpr const char* kKindNames[] = {"saved", "workspace", "transient"};

std::string quoted(std::string_view text) { return "\"" + std::string(text) + "\""; }

std::string shape_text(const Buffer& b, const char* open, const char* close) {
  std::string text = open;
  for (std::size_t i = 0; i < b.shape.size(); ++i) text += (i ? ", " : "") + std::to_string(b.shape[i]);
  return text + close;
}

std::string buffer_json(const Plan& plan, const Buffer& b) {
  const auto step = [&](int i) { return quoted(plan.steps[static_cast<std::size_t>(i)]); };
  return "{\"name\": " + quoted(b.name) + ", \"shape\": " + shape_text(b, "[", "]") +
         ", \"dtype\": " + quoted(to_string(b.dtype)) + ", \"bytes\": " + std::to_string(b.bytes) +
         ", \"kind\": " + quoted(kKindNames[static_cast<int>(b.kind)]) + ", \"lifetime\": [" + step(b.first) + ", " +
         step(b.last) + "]}";
}

template <class... Values>
std::string format(const char* pattern, Values... values) {
  char line[256];
  std::snprintf(line, sizeof line, pattern, values...);
  return line;
}

}  // namespace

std::string to_json(const Plan& plan) {
  std::string json = "{\"steps\": [";
  for (std::size_t i = 0; i < plan.steps.size(); ++i) json += (i ? ", " : "") + quoted(plan.steps[i]);
  json += "], \"border\": " + std::to_string(plan.border) + ", \"saved_bytes\": " + std::to_string(plan.saved_bytes) +
          ", \"forward_workspace_bytes\": " + std::to_string(plan.forward_workspace_bytes) +
          ", \"backward_workspace_bytes\": " + std::to_string(plan.backward_workspace_bytes) +
          ", \"peak_bytes\": " + std::to_string(plan.peak_bytes) + ", \"buffers\": [";
  for (std::size_t i = 0; i < plan.buffers.size(); ++i) json += (i ? ", " : "") + buffer_json(plan, plan.buffers[i]);
  return json + "]}";
}

std::string to_table(const Plan& plan) {
  constexpr double kMiB = 1024.0 * 1024.0;
  std::string table = format("%-20s %-22s %-9s %10s  %-10s %s\n", "buffer", "shape", "dtype", "MiB", "kind", "lifetime");
  for (const Buffer& b : plan.buffers) {
    const std::string life =
        plan.steps[static_cast<std::size_t>(b.first)] + " .. " + plan.steps[static_cast<std::size_t>(b.last)];
    table += format("%-20s %-22s %-9s %10.2f  %-10s %s\n", b.name.c_str(), shape_text(b, "(", ")").c_str(),
                    std::string(to_string(b.dtype)).c_str(), static_cast<double>(b.bytes) / kMiB,
                    kKindNames[static_cast<int>(b.kind)], life.c_str());
  }
  table += format("saved %.2f MiB, workspace forward %.2f MiB, backward %.2f MiB, peak %.2f MiB\n",
                  static_cast<double>(plan.saved_bytes) / kMiB, static_cast<double>(plan.forward_workspace_bytes) / kMiB,
                  static_cast<double>(plan.backward_workspace_bytes) / kMiB, static_cast<double>(plan.peak_bytes) / kMiB);
  return table;
}

}  // namespace intarsia
