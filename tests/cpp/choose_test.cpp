// Which kernel a product gets: every shape has one that exists, and INTARSIA_CONFIG says exactly what it may.
#include "cuda/sm90/choose.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <ranges>
#include <string>
#include <vector>

#include "intarsia/error.h"

namespace intarsia::cuda::sm90 {
namespace {

struct ProductKernels {
  Product product;
  std::string name;
  std::vector<Kernel> kernels;  ///< that src/cuda/sm90/*.cu launch for its common case
};

const std::vector<ProductKernels>& products() {
  using enum Kernel;
  static const std::vector<ProductKernels> list = {
      {Product::up_forward, "up_forward", {tile_256, tile_256_pair}},
      {Product::down_forward, "down_forward", {tile_256, tile_256_pair, tile_192_ping_pong}},
      {Product::down_backward, "down_backward", {tile_128_ping_pong, tile_128_ping_pong_deep, tile_256}},
      {Product::down_weight_backward, "down_weight_backward", {tile_256, tile_256_pair}},
      {Product::up_backward, "up_backward", {tile_256, tile_256_pair, tile_192_ping_pong}},
      {Product::up_weight_backward, "up_weight_backward", {tile_256, tile_256_pair}},
  };
  return list;
}

bool equal(const Choice& a, const Choice& b) {
  return a.kernel == b.kernel && a.raster.group == b.raster.group && a.raster.bands == b.raster.bands;
}

class Choose : public testing::Test {
 protected:
  void SetUp() override { unsetenv("INTARSIA_CONFIG"); }
  void TearDown() override { unsetenv("INTARSIA_CONFIG"); }
  static void configure(const std::string& text) { setenv("INTARSIA_CONFIG", text.c_str(), 1); }
};

constexpr Shape kShape{.rows = 32768, .experts = 64, .hidden = 2048, .width = 1024};

void check(const Shape& s) {
  for (const ProductKernels& p : products()) {
    const Choice choice = choose(p.product, s);
    ASSERT_TRUE(std::ranges::find(p.kernels, choice.kernel) != p.kernels.end())
        << p.name << " has no " << describe(choice) << ": H " << s.hidden << ", I " << s.width;
    ASSERT_TRUE(choice.raster.group >= 1 && choice.raster.bands >= 1) << p.name << ' ' << describe(choice);
    ASSERT_TRUE(equal(choice, choose(p.product, s))) << "not a function of the shape alone";
  }
}

/// Every multiple of 8 for H and for I, beside some of the other sizes.
TEST_F(Choose, GivesEveryShapeAKernelThatExists) {
  const std::vector<std::int64_t> some{8, 24, 96, 248, 504, 768, 1408, 2048, 2880, 7168, 16384}, experts{1, 7, 128, 2048},
      rows{1, 4095, 1 << 17, 1 << 24};
  for (std::int64_t size = 8; size <= 16384; size += 8)
    for (const std::int64_t other : some)
      for (const std::int64_t r : rows) {
        const std::int64_t e = experts[static_cast<std::size_t>(size / 8 + r) % experts.size()];
        check({r, e, size, other});
        check({r, e, other, size});
        if (HasFatalFailure()) return;
      }
}

/// Every number of experts, every power of two of rows and its neighbours.
TEST_F(Choose, GivesEveryRoutingAKernelThatExists) {
  for (std::int64_t experts = 1; experts <= 2048; ++experts)
    for (int bits = 0; bits <= 24; ++bits)
      for (const std::int64_t rows : {(std::int64_t{1} << bits) - 1, std::int64_t{1} << bits}) {
        check({std::max<std::int64_t>(rows, 1), experts, 8 * (1 + experts * 37 % 2048), 8 * (1 + experts * 101 % 2048)});
        if (HasFatalFailure()) return;
      }
}

TEST_F(Choose, PrintsWhatItChose) {
  EXPECT_EQ(describe({Kernel::tile_256, {}}), "tile_256:g8:b1");
  EXPECT_EQ(describe({Kernel::tile_256_pair, {.group = 16, .bands = 3}}), "tile_256_pair:g16:b3");
  EXPECT_EQ(describe({Kernel::tile_192_ping_pong, {.group = 1, .bands = 64}}), "tile_192_ping_pong:g1:b64");
  EXPECT_EQ(describe({Kernel::tile_128_ping_pong, {.group = 4096, .bands = 2}}), "tile_128_ping_pong:g4096:b2");
}

TEST_F(Choose, ReadsWhatItPrints) {
  for (const ProductKernels& p : products())
    for (const Kernel kernel : p.kernels)
      for (const int group : {1, 2, 7, 8, 63, 64, 4096})
        for (const int bands : {1, 2, 4, 64}) {
          const Choice wanted{kernel, {.group = group, .bands = bands}};
          configure(p.name + "=" + describe(wanted));
          ASSERT_TRUE(equal(choose(p.product, kShape), wanted)) << describe(wanted);
        }
}

TEST_F(Choose, OverridesNothingElse) {
  std::vector<Choice> before;
  for (const ProductKernels& p : products()) before.push_back(choose(p.product, kShape));
  configure("down_forward=tile_256_pair:g3:b2,up_weight_backward=tile_256:b5");
  for (std::size_t i = 0; i < before.size(); ++i) {
    const std::string& name = products()[i].name;
    const Choice now = choose(products()[i].product, kShape);
    if (name == "down_forward") EXPECT_EQ(describe(now), "tile_256_pair:g3:b2");
    else if (name == "up_weight_backward")
      EXPECT_EQ(describe(now), "tile_256:g" + std::to_string(before[i].raster.group) + ":b5");
    else EXPECT_TRUE(equal(now, before[i])) << name;
  }
  configure("");
  for (std::size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(equal(choose(products()[i].product, kShape), before[i]));
}

/// Whichever product is asked, so that a misspelt name cannot pass unseen; the message has the words at fault.
TEST_F(Choose, RefusesWrongTextByName) {
  const std::vector<std::pair<std::string, std::string>> wrong = {
      {"up_forward=tile_257", "\"tile_257\""},
      {"up_forward=tile_256 ", "\"tile_256 \""},
      {"up_forward=TILE_256", "\"TILE_256\""},
      {"up_forwards=tile_256", "\"up_forwards\""},
      {"=tile_256", "\"\""},
      {"up_forward", "\"up_forward\""},
      {"up_forward=", "\"up_forward=\""},
      {"up_forward=:g8", "\"\""},
      {"up_forward=tile_256:", "\"\""},
      {"up_forward=tile_256,", "\"\""},
      {"up_forward=tile_256,,down_forward=tile_256", "\"\""},
      {"up_forward=tile_256:8", "\"8\""},
      {"up_forward=tile_256:g", "\"g\""},
      {"up_forward=tile_256:g0", "\"g0\""},
      {"up_forward=tile_256:g-4", "\"g-4\""},
      {"up_forward=tile_256:g8x", "\"g8x\""},
      {"up_forward=tile_256:g4097", "\"g4097\""},
      {"up_forward=tile_256:g99999999999", "\"g99999999999\""},
      {"up_forward=tile_256:b0", "\"b0\""},
      {"up_forward=tile_256:b65", "\"b65\""},
      {"up_forward=tile_256:x4", "\"x4\""},
      {"down_forward=tile_256,up_forward=tile_256:g8:b", "\"b\""},
  };
  for (const auto& [text, named] : wrong)
    for (const Product product : {Product::up_forward, Product::up_weight_backward}) {
      configure(text);
      try {
        const Choice choice = choose(product, kShape);
        ADD_FAILURE() << '"' << text << "\" gave " << describe(choice);
      } catch (const InvalidArgument& error) {
        const std::string what = error.what();
        EXPECT_TRUE(what.starts_with("INTARSIA_CONFIG: ") && what.find(named) != what.npos) << text << ": " << what;
      }
    }
}

}  // namespace
}  // namespace intarsia::cuda::sm90
