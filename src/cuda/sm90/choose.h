// Which kernel and raster a product gets: a pure function of its shape, tested on the CPU, overridable for benchmarks.
#pragma once

#include <cstdint>
#include <string>

#include "cuda/sm90/config.h"

namespace intarsia::cuda::sm90 {

enum class Product { up_forward, down_forward, down_backward, down_weight_backward, up_backward, up_weight_backward };

/// Kernels that exist for the common case of some product; bias, scores inside, other activations than swiglu, transposed
/// weights and float16 have each product's first kernel only.
enum class Kernel {
  tile_256,                 ///< 128 x 256, four stages (down_backward: three)
  tile_256_pair,            ///< 128 x 256, a pair of CTAs shares the right operand
  tile_192_ping_pong,       ///< 128 x 192, two tiles in turn, pair
  tile_128_ping_pong,       ///< 128 x 128, two tiles in turn, z a tile ahead
  tile_128_ping_pong_deep,  ///< the same with five stages and less of z ahead
  tile_128                  ///< 128 x 128, half a tile each
};

struct Shape {
  std::int64_t rows, experts, hidden, width;  // R, E, H, I
};

struct Choice {
  Kernel kernel;
  Raster raster;
};

/// INTARSIA_CONFIG="up_forward=tile_256_pair:g8:b2,..." replaces the choice for the products it names; a text of another form
/// raises InvalidArgument.
Choice choose(Product product, const Shape& shape);
std::string describe(const Choice& choice);

}  // namespace intarsia::cuda::sm90
