// The tensor maps of the Hopper kernels, read as the hardware reads them: an address is base + sum of coordinate * stride
// modulo 2^64, and nothing outside a dimension exists.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <optional>
#include <random>
#include <vector>

#include "cuda/sm90/map_layout.h"
#include "cuda/sm90/weight_half.h"

namespace intarsia::cuda::sm90 {
namespace {

constexpr std::uint64_t kBase = 0x7f12'3456'7000;

void* pointer(std::uint64_t address) { return std::bit_cast<void*>(address); }

struct Coordinates {
  int c[4];
};

/// Where TMA finds an element, or nothing: zero when loaded, dropped when stored.
std::optional<std::uint64_t> address_of(const MapLayout& m, const Coordinates& at) {
  for (int i = 0; i < 4; ++i)
    if (at.c[i] < 0 || static_cast<std::uint64_t>(at.c[i]) >= m.dims[i]) return std::nullopt;
  std::uint64_t address = std::bit_cast<std::uint64_t>(m.data) + static_cast<std::uint64_t>(at.c[0]) * size_of(m.dtype);
  for (int i = 1; i < 4; ++i) address += static_cast<std::uint64_t>(at.c[i]) * m.strides[i - 1];
  return address;
}

/// The limits of cuTensorMapEncodeTiled with a 128-byte swizzle.
void check_encodable(const MapLayout& m) {
  EXPECT_EQ(std::bit_cast<std::uint64_t>(m.data) % 16, 0u);
  for (const std::uint64_t n : m.dims) EXPECT_TRUE(n > 0 && n <= std::uint64_t{1} << 32) << n;
  for (const std::uint64_t stride : m.strides)
    EXPECT_TRUE(stride > 0 && stride % 16 == 0 && stride < std::uint64_t{1} << 40) << stride;
  for (const std::uint32_t n : m.box) EXPECT_TRUE(n > 0 && n <= 256) << n;
  EXPECT_EQ(m.box[0] * size_of(m.dtype), 128u);
}

class Draw {
 public:
  explicit Draw(unsigned seed) : engine_(seed) {}
  std::int64_t operator()(std::int64_t from, std::int64_t to) {
    return std::uniform_int_distribution<std::int64_t>(from, to)(engine_);
  }
  template <class T>
  T of(const std::vector<T>& values) {
    return values[static_cast<std::size_t>((*this)(0, std::ssize(values) - 1))];
  }

 private:
  std::mt19937_64 engine_;
};

TEST(RaggedRows, EndWithTheirExpert) {
  constexpr std::int64_t kMostRows = 0x7ffeffff;
  Draw draw(1);
  for (int i = 0; i < 200000 && !HasFailure(); ++i) {
    const DType dtype = draw.of(std::vector{DType::bfloat16, DType::float16, DType::float32});
    const auto size = static_cast<std::int64_t>(size_of(dtype)), chunk = 16 / size;
    const std::int64_t columns = chunk * draw(1, 4096), step = columns + chunk * draw(0, 100);
    // R rows in all, up to where the last coordinate still lies inside its dimension.
    const std::int64_t total = draw.of(std::vector<std::int64_t>{draw(1, 1000), draw(1, kMostRows), kMostRows});
    const std::int64_t rows = draw(1, std::min<std::int64_t>(total, draw(0, 1) ? 300 : 1 << 24));
    const std::int64_t first = draw(0, 1) ? total - rows : draw(0, total - rows);
    const RowsMap map{pointer(kBase), dtype, columns, step, static_cast<int>(128 / size), 64};
    const MapLayout layout = layout_of(map);
    check_encodable(layout);

    const std::int64_t r = draw(0, 1) ? draw(std::max<std::int64_t>(rows - 2, 0), rows + 1) : draw(0, rows + 255);
    const std::int64_t column = draw(0, 1) ? draw(columns - 1, columns + 70) : draw(0, columns - 1);
    const RaggedRow place(static_cast<int>(first), static_cast<int>(rows), static_cast<int>(r));
    const auto address = address_of(layout, {{static_cast<int>(column), place.row, place.fold, place.last}});
    EXPECT_EQ(address.has_value(), r < rows && column < columns) << "row " << r << " of " << rows << ", column " << column;
    if (address) {
      EXPECT_EQ(*address, kBase + static_cast<std::uint64_t>(((first + r) * step + column) * size));
    }
  }
}

/// z and dz hold gates, then ups: a map of one half ends where the half ends.
TEST(RaggedRows, OfHalfTheColumns) {
  const TensorView z(pointer(kBase), DType::bfloat16, {1000, 192});
  for (const int half : {0, 1}) {
    const MapLayout layout = layout_of(rows_of(z, half * 96, 96, 64));
    check_encodable(layout);
    const RaggedRow place(300, 70, 69);
    EXPECT_EQ(address_of(layout, {{95, place.row, place.fold, place.last}}), kBase + (369u * 192 + half * 96 + 95) * 2);
    EXPECT_FALSE(address_of(layout, {{96, place.row, place.fold, place.last}}));
  }
}

// ---- expert weights

struct Layout {
  Weights weights;
  std::int64_t experts, width, in;
  int halves;
};

/// The byte of (half, row, column, expert) by the words of Weights in config.h.
std::uint64_t byte_of(const Layout& l, int half, std::int64_t row, std::int64_t column, std::int64_t expert) {
  const Weights& w = l.weights;
  const bool second = half == 1 && w.second.defined();
  const TensorView& v = second ? w.second : w.weight;
  std::int64_t out = row;
  if (l.halves == 2 && !w.second.defined()) {
    const std::int64_t block = w.gate_block > 0 ? w.gate_block : l.width;
    out = row / block * 2 * block + half * block + row % block;
  }
  const std::int64_t element =
      expert * v.step(0) + (w.transposed ? column * v.step(1) + out * v.step(2) : out * v.step(1) + column * v.step(2));
  return std::bit_cast<std::uint64_t>(v.data) + static_cast<std::uint64_t>(element) * size_of(v.dtype);
}

/// A tensor (E, rows, columns) whose matrices have a contiguous axis and padding everywhere.
TensorView padded(Draw& draw, std::uint64_t address, DType dtype, std::int64_t experts, std::int64_t rows, std::int64_t columns,
                  bool columns_contiguous) {
  const std::int64_t chunk = 16 / static_cast<std::int64_t>(size_of(dtype));
  const auto pad = [&](std::int64_t n) { return (n + chunk - 1) / chunk * chunk + chunk * draw(0, 3); };
  TensorView v(pointer(address), dtype, {experts, rows, columns});
  const std::int64_t step = pad(columns_contiguous ? columns : rows);
  v.stride = {pad((columns_contiguous ? rows : columns) * step), columns_contiguous ? step : 1, columns_contiguous ? 1 : step};
  return v;
}

Layout draw_layout(Draw& draw) {
  const DType dtype = draw.of(std::vector{DType::bfloat16, DType::float32});
  const bool two = draw(0, 3) == 0, in_contiguous = draw(0, 2) > 0;
  Layout l{{.transposed = draw(0, 1) == 1}, draw(1, 5), 8 * draw(1, 60), 8 * draw(1, 40), static_cast<int>(draw(1, 2))};
  if (l.halves == 2 && !two && in_contiguous && draw(0, 2) > 0) {  // gates and ups in blocks, as supports() allows
    l.weights.gate_block = draw.of(std::vector<std::int64_t>{1, 2, 4, 8, 16, 32, 64, 128, 256});
    l.width = l.weights.gate_block * draw(1, std::max<std::int64_t>(2, 300 / l.weights.gate_block));
  }
  const std::int64_t out = l.halves == 2 && !two ? 2 * l.width : l.width;
  const auto tensor = [&](std::uint64_t address) {
    return l.weights.transposed ? padded(draw, address, dtype, l.experts, l.in, out, !in_contiguous)
                                : padded(draw, address, dtype, l.experts, out, l.in, in_contiguous);
  };
  l.weights.weight = tensor(kBase);
  if (l.halves == 2 && two) l.weights.second = tensor(kBase + (std::uint64_t{1} << 33));
  return l;
}

/// A box from row `first` of an expert's half on, element by element in the order in which it lies in shared memory.
void check_box(const Layout& l, const WeightHalf& h, const MapLayout& m, int half, int inner, int first, int expert) {
  const int block = h.in_contiguous() ? h.block_argument() : std::numeric_limits<int>::max();
  const std::int64_t inner_size = h.in_contiguous() ? l.in : l.width, outer_size = h.in_contiguous() ? l.width : l.in;
  int row = first;
  for (std::uint32_t b = 0; b < m.box[2]; ++b)
    for (std::uint32_t i = 0; i < m.box[1]; ++i, ++row)
      for (const int column : {inner, inner + static_cast<int>(m.box[0]) - 1}) {
        const auto address =
            address_of(m, {{column, first % block + static_cast<int>(i), first / block + static_cast<int>(b), expert}});
        ASSERT_EQ(address.has_value(), row < outer_size && column < inner_size) << "row " << row << ", column " << column;
        if (!address) continue;
        ASSERT_EQ(*address, h.in_contiguous() ? byte_of(l, half, row, column, expert) : byte_of(l, half, column, row, expert))
            << "half " << half << ", row " << row << ", column " << column << ", expert " << expert << ", gate_block "
            << l.weights.gate_block << ", transposed " << l.weights.transposed;
      }
}

TEST(WeightMaps, FindTheRightByteInEveryLayout) {
  Draw draw(2);
  for (int i = 0; i < 4000 && !HasFailure(); ++i) {
    const Layout l = draw_layout(draw);
    const int half = static_cast<int>(draw(0, l.halves - 1)), box_rows = draw.of(std::vector{32, 64, 128});
    const WeightHalf h = weight_half(l.weights, l.halves, half);
    const MapLayout m = layout_of(matrices_of(h, static_cast<int>(128 / size_of(h.dtype)), box_rows));
    check_encodable(m);
    ASSERT_EQ(m.box[1] * m.box[2], static_cast<std::uint32_t>(box_rows));
    const std::int64_t outer = h.in_contiguous() ? l.width : l.in, inner = h.in_contiguous() ? l.in : l.width;
    const std::int64_t first = box_rows * draw(0, outer / box_rows);  // the last one ends outside, or is outside altogether
    const std::int64_t column = m.box[0] * draw(0, inner / m.box[0]);
    check_box(l, h, m, half, static_cast<int>(column), static_cast<int>(first), static_cast<int>(draw(0, l.experts - 1)));
  }
}

/// 96 rows of a 128 x 192 tile, which are not a power of two: plain matrices only.
TEST(WeightMaps, TakeBoxesOf96Rows) {
  Draw draw(3);
  Layout l{{}, 3, 200, 72, 1};
  l.weights.weight = padded(draw, kBase, DType::float16, 3, 200, 72, true);
  const WeightHalf h = weight_half(l.weights, 1, 0);
  const MapLayout m = layout_of(matrices_of(h, 64, 96));
  check_encodable(m);
  for (const int first : {0, 96, 192})
    for (const int expert : {0, 2}) check_box(l, h, m, 0, 0, first, expert);
}

}  // namespace
}  // namespace intarsia::cuda::sm90
