#include "cuda/sm90/choose.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <ranges>
#include <string_view>

#include "intarsia/error.h"

namespace intarsia::cuda::sm90 {
namespace {

constexpr std::array<std::string_view, 6> kProducts = {"up_forward",           "down_forward", "down_backward",
                                                       "down_weight_backward", "up_backward",  "up_weight_backward"};
constexpr std::array<std::string_view, 6> kKernels = {"tile_256",           "tile_256_pair",           "tile_192_ping_pong",
                                                      "tile_128_ping_pong", "tile_128_ping_pong_deep", "tile_128"};

// Raster numbers are multiplied by numbers of tiles, in int: groups by those of n, bands by up to 2^24 of m.
constexpr int kMostGroup = 4096, kMostBands = 64;

[[noreturn]] void refuse(std::string_view what, std::string_view expected) {
  throw InvalidArgument("INTARSIA_CONFIG: \"" + std::string(what) + "\" is not " + std::string(expected));
}

template <std::size_t kCount>
std::size_t index_of(const std::array<std::string_view, kCount>& names, std::string_view name, std::string_view what) {
  const auto found = std::ranges::find(names, name);
  if (found != names.end()) return static_cast<std::size_t>(found - names.begin());
  std::string expected = std::string(what) + ":";
  for (const std::string_view known : names) expected += " " + std::string(known);
  refuse(name, expected);
}

/// "g8" or "b2"
void parse_raster(std::string_view word, Raster& raster) {
  const bool group = word.starts_with('g');
  const int most = group ? kMostGroup : kMostBands;
  const char *begin = word.data() + 1, *end = word.data() + word.size();
  int value = 0;
  if ((!group && !word.starts_with('b')) || std::from_chars(begin, end, value).ptr != end || value < 1 || value > most)
    refuse(word, "gN with N from 1 to " + std::to_string(kMostGroup) + " or bN with N from 1 to " + std::to_string(kMostBands));
  (group ? raster.group : raster.bands) = value;
}

/// "tile_256_pair:g8:b2"
Choice parse_choice(std::string_view text, Choice choice) {
  bool kernel = true;
  for (const auto part : text | std::views::split(':')) {
    const std::string_view word(part.begin(), part.end());
    if (kernel) choice.kernel = static_cast<Kernel>(index_of(kKernels, word, "one of the kernels"));
    else parse_raster(word, choice.raster);
    kernel = false;
  }
  return choice;
}

/// All of the text must be right, whatever it says of this product.
Choice overridden(Product product, Choice choice, std::string_view text) {
  for (const auto part : text | std::views::split(',')) {
    const std::string_view entry(part.begin(), part.end());
    const std::size_t equals = entry.find('=');
    if (equals == entry.npos || equals + 1 == entry.size()) refuse(entry, "PRODUCT=KERNEL");
    const auto named = static_cast<Product>(index_of(kProducts, entry.substr(0, equals), "one of the products"));
    const Choice parsed = parse_choice(entry.substr(equals + 1), choice);
    if (named == product) choice = parsed;
  }
  return choice;
}

/// Columns that tiles of so many compute for `columns`.
std::int64_t computed(std::int64_t columns, std::int64_t tile) { return (columns + tile - 1) / tile * tile; }

/// 192 columns a tile waste less of the last one, by more than the larger tile gains.
bool fits_192(std::int64_t columns) { return 100 * computed(columns, 256) > 104 * computed(columns, 192); }

/// From measurements on an H200 of all 17 shapes of bench/gpu.py (tests/cuda/gemm_tune.cu;
/// bench/results/h200-tune-2026-11-29.txt).
Choice rule(Product product, const Shape& s) {
  const bool many_experts = s.experts >= 512;
  switch (product) {
    case Product::up_forward: return {Kernel::tile_256, {.group = s.hidden <= 512 ? 16 : 4}};
    case Product::down_forward:
      if (s.width <= 512 || fits_192(s.hidden)) return {Kernel::tile_192_ping_pong, {.group = 8}};
      return {Kernel::tile_256, {.group = s.width <= 1024 ? 16 : 4}};
    case Product::down_backward:
      if (s.hidden >= 4096) return {Kernel::tile_256, {.group = 16}};
      // With a deep ring CTAs drift apart, which costs where k is short and where little of w_down stays in the L2.
      if (s.hidden <= 512 || s.experts * s.hidden * s.width > 250'000'000) return {Kernel::tile_128_ping_pong, {.group = 8}};
      return {Kernel::tile_128_ping_pong_deep, {.group = 8}};
    case Product::up_backward:
      if (fits_192(s.hidden)) return {Kernel::tile_192_ping_pong, {.group = 8}};
      if (many_experts) return {Kernel::tile_256_pair, {.group = 8}};
      if (s.hidden >= 4096 && s.width <= 1024) return {Kernel::tile_192_ping_pong, {.group = 16}};
      return {Kernel::tile_256, {.group = 4}};
    case Product::down_weight_backward:
      if (s.hidden >= 4096 && s.width >= 2048) return {Kernel::tile_256_pair, {.group = 16}};
      return {Kernel::tile_256, {.group = many_experts ? 16 : 8}};
    case Product::up_weight_backward:
      if (s.width >= 4096) return {Kernel::tile_256_pair, {.group = 16}};
      return {Kernel::tile_256, {.group = many_experts ? 16 : 8}};
  }
  return {Kernel::tile_256, {}};
}

}  // namespace

Choice choose(Product product, const Shape& shape) {
  const char* text = std::getenv("INTARSIA_CONFIG");
  const Choice choice = rule(product, shape);
  return text != nullptr ? overridden(product, choice, text) : choice;
}

std::string describe(const Choice& c) {
  return std::string(kKernels[static_cast<std::size_t>(c.kernel)]) + ":g" + std::to_string(c.raster.group) + ":b" +
         std::to_string(c.raster.bands);
}

}  // namespace intarsia::cuda::sm90
