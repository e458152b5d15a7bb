// Every kernel and raster of each product at the shapes of the benchmarks, in turn and hot, to choose the table of
// sm90/choose.cpp by:   gemm_tune [--rounds N] [--op NAME] SHAPE...
// A line a product: the choice of the table, then all that were tried, milliseconds (medians over the rounds), the fastest
// first.
#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <string>

#include "cuda/cuda.h"
#include "large_layer.h"

namespace intarsia::check {
namespace {

const Shape kShapes[] = {{"sonic-7b", 24576, 1536, 256, 128, 8},    {"sonic-1.4b", 40960, 768, 256, 128, 8},
                         {"sonic-30b", 32768, 4096, 256, 256, 16},  {"sonic-120b", 32768, 4096, 1024, 128, 8},
                         {"olmoe", 32768, 2048, 1024, 64, 8},       {"qwen3-30b", 32768, 2048, 768, 128, 8},
                         {"qwen3-next", 32768, 2048, 512, 512, 10}, {"mixtral", 16384, 4096, 14336, 8, 2},
                         {"dsv3", 16384, 7168, 2048, 64, 8},        {"gpt-oss", 32768, 2880, 2880, 32, 4},
                         {"blaze-conf1", 65536, 512, 2048, 4, 1},   {"blaze-conf2", 65536, 1024, 4096, 8, 2},
                         {"blaze-conf3", 65536, 1024, 4096, 16, 4}, {"blaze-conf4", 32768, 2048, 8192, 16, 4},
                         {"blaze-conf5", 32768, 512, 2048, 16, 4},  {"blaze-conf6", 16384, 1024, 4096, 16, 4},
                         {"blaze-conf7", 8192, 2048, 8192, 8, 4}};

const std::map<std::string, std::vector<std::string>> kChoices = {
    {"up_forward", {"tile_256:g4", "tile_256:g8", "tile_256:g16", "tile_256_pair:g8", "tile_256_pair:g16"}},
    {"down_forward", {"tile_256:g4", "tile_256:g16", "tile_256_pair:g8", "tile_192_ping_pong:g8", "tile_192_ping_pong:g16"}},
    {"down_backward",
     {"tile_256:g8", "tile_256:g16", "tile_128_ping_pong:g8", "tile_128_ping_pong_deep:g8", "tile_128_ping_pong_deep:g16"}},
    {"up_backward",
     {"tile_256:g4", "tile_256:g16", "tile_256_pair:g8", "tile_256_pair:g32", "tile_192_ping_pong:g8",
      "tile_192_ping_pong:g16"}},
    {"down_weight_backward", {"tile_256:g4", "tile_256:g8", "tile_256:g16", "tile_256_pair:g8", "tile_256_pair:g16"}},
    {"up_weight_backward", {"tile_256:g4", "tile_256:g8", "tile_256:g16", "tile_256_pair:g8", "tile_256_pair:g16"}}};

constexpr int kCalls = 4;  // one warm, the others timed together

/// Milliseconds of a call under a choice.
template <class Run>
float time_choice(const char* op, const std::string& choice, const Run& run) {
  const std::string config = std::string(op) + "=" + choice;
  setenv("INTARSIA_CONFIG", config.c_str(), 1);
  cudaEvent_t begin, end;
  must(cudaEventCreate(&begin), op);
  must(cudaEventCreate(&end), op);
  run();
  must(cudaEventRecord(begin), op);
  for (int i = 1; i < kCalls; ++i) run();
  must(cudaEventRecord(end), op);
  must(cudaEventSynchronize(end), config.c_str());
  float ms = 0;
  must(cudaEventElapsedTime(&ms, begin, end), op);
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  unsetenv("INTARSIA_CONFIG");
  return ms / (kCalls - 1);
}

/// `products`: multiples of 2 R H I.
template <class Op>
void tune(const Shape& shape, const Op& op, double products, int rounds, const std::string& only) {
  if (!only.empty() && only != Op::kName) return;
  const Block block(cuda::workspace_bytes(op));
  const auto run = [&] { cuda::run(op, block.execution()); };
  const std::string table = cuda::explain(op);
  std::map<std::string, std::vector<float>> times;
  std::vector<std::string> choices = kChoices.at(Op::kName);
  std::mt19937 random(1);
  for (int round = 0; round < rounds; ++round) {
    std::shuffle(choices.begin(), choices.end(), random);  // the clock depends on what ran before
    for (const std::string& choice : choices) times[choice].push_back(time_choice(Op::kName, choice, run));
  }
  std::vector<std::pair<float, std::string>> order;
  for (auto& [choice, t] : times) {
    std::sort(t.begin(), t.end());
    order.push_back({t[t.size() / 2], choice});
  }
  std::sort(order.begin(), order.end());
  const double flops = products * 2 * static_cast<double>(shape.tokens * shape.experts_per_token * shape.hidden * shape.width);
  std::printf("%-11s %-20s %s |", shape.name, Op::kName, table.substr(table.rfind(' ') + 1).c_str());
  for (const auto& [ms, choice] : order)
    std::printf(" %s %.3f (%.0f)", choice.c_str(), static_cast<double>(ms), flops / static_cast<double>(ms) / 1e9);
  std::printf("\n");
  std::fflush(stdout);
}

void tune_layer(const Shape& shape, int rounds, const std::string& only) {
  Layer layer(shape);
  TensorView a, b, c;
  tune(shape, layer.up_forward(a, b), 2, rounds, only);
  tune(shape, layer.down_forward(a), 1, rounds, only);
  tune(shape, layer.down_backward(a, b, c), 1, rounds, only);
  tune(shape, layer.down_weight_backward(a), 1, rounds, only);
  tune(shape, layer.up_backward(a), 2, rounds, only);
  tune(shape, layer.up_weight_backward(a), 2, rounds, only);
}

}  // namespace
}  // namespace intarsia::check

int main(int count, char** arguments) {
  using namespace intarsia::check;
  int rounds = 3, tuned = 0;
  std::string only;
  for (int i = 1; i < count; ++i) {
    const std::string word = arguments[i];
    if (word == "--rounds" && i + 1 < count) rounds = std::atoi(arguments[++i]);
    else if (word == "--op" && i + 1 < count) only = arguments[++i];
    else
      for (const Shape& shape : kShapes)
        if (word == shape.name || word == "all") tune_layer(shape, rounds, only), ++tuned;
  }
  if (tuned > 0 && (only.empty() || kChoices.contains(only))) return 0;
  std::printf("gemm_tune [--rounds N] [--op NAME] SHAPE...: a shape of bench/gpu.py, or all, and a product's name\n");
  return 2;
}
