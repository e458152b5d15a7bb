#include "cuda/sm90/choose.h"

#include <array>
#include <cstdlib>
#include <optional>
#include <string_view>

#include "intarsia/error.h"

namespace intarsia::cuda::sm90 {
namespace {

constexpr std::array<std::string_view, 6> kProducts = {"up_forward",           "down_forward", "down_backward",
                                                       "down_weight_backward", "up_backward",  "up_weight_backward"};
constexpr std::array<std::string_view, 4> kKernels = {"tile_256", "tile_256_pair", "tile_192_ping_pong", "tile_128_ping_pong"};

/// "tile_256_pair:g8:b2"
Choice parse_choice(std::string_view text, Choice choice) {
  bool kernel = true;
  while (!text.empty()) {
    const std::size_t end = text.find(':');
    const std::string word(text.substr(0, end));
    text = end == std::string_view::npos ? std::string_view() : text.substr(end + 1);
    if (kernel) {
      std::size_t i = 0;
      while (i < kKernels.size() && kKernels[i] != word) ++i;
      if (i == kKernels.size()) throw InvalidArgument("INTARSIA_CONFIG: there is no kernel \"" + word + "\"");
      choice.kernel = static_cast<Kernel>(i);
    } else {
      const int value = std::atoi(word.c_str() + 1);
      if (value < 1 || (word[0] != 'g' && word[0] != 'b'))
        throw InvalidArgument("INTARSIA_CONFIG: expected gN or bN, got \"" + word + "\"");
      (word[0] == 'g' ? choice.raster.group : choice.raster.bands) = value;
    }
    kernel = false;
  }
  return choice;
}

std::optional<std::string_view> override_of(Product product) {
  const char* all = std::getenv("INTARSIA_CONFIG");
  if (all == nullptr) return std::nullopt;
  std::string_view text = all;
  while (!text.empty()) {
    const std::size_t end = text.find(','), equals = text.find('=');
    if (equals != std::string_view::npos && text.substr(0, equals) == kProducts[static_cast<std::size_t>(product)])
      return text.substr(equals + 1, end == std::string_view::npos ? end : end - equals - 1);
    text = end == std::string_view::npos ? std::string_view() : text.substr(end + 1);
  }
  return std::nullopt;
}

/// From measurements on an H200 (docs/log.md): wide experts want the fewest bytes a FLOP, narrow ones a hidden epilogue.
Choice rule(Product product, const Shape& s) {
  switch (product) {
    case Product::up_forward: return {Kernel::tile_256, {.group = 4}};
    case Product::down_forward:
      if (s.width < 2048) return {Kernel::tile_192_ping_pong, {.group = 8}};
      return {Kernel::tile_256_pair, {.group = 4}};
    case Product::down_backward:
      if (s.width < 512) return {Kernel::tile_128_ping_pong, {.group = 8}};
      return {Kernel::tile_256_pair, {.group = 8}};
    case Product::up_backward:
      if (s.width < 512) return {Kernel::tile_192_ping_pong, {.group = 8}};
      return {Kernel::tile_256, {.group = 16}};
    case Product::down_weight_backward: return {Kernel::tile_256, {.group = 8}};
    case Product::up_weight_backward: return {Kernel::tile_256, {.group = 8}};
  }
  return {Kernel::tile_256, {}};
}

}  // namespace

Choice choose(Product product, const Shape& shape) {
  const Choice choice = rule(product, shape);
  const auto text = override_of(product);
  return text ? parse_choice(*text, choice) : choice;
}

std::string describe(const Choice& c) {
  return std::string(kKernels[static_cast<std::size_t>(c.kernel)]) + ":g" + std::to_string(c.raster.group) + ":b" +
         std::to_string(c.raster.bands);
}

}  // namespace intarsia::cuda::sm90
