// The walk of the Hopper kernels over tiles, run for every CTA of a launch as the GPU would.
#include "cuda/sm90/scheduler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <ranges>
#include <string>
#include <vector>

namespace intarsia::cuda::sm90 {
namespace {

constexpr int kTileM = 128;

struct HostPlace {
  int block = 0, grid = 1;
  template <int kCluster>
  int cluster() const {
    return block / kCluster;
  }
  template <int kCluster>
  int clusters() const {
    return grid / kCluster;
  }
  template <int kCluster>
  int rank() const {
    return block % kCluster;
  }
};

struct Problem {
  std::vector<std::int32_t> offsets;  ///< empty: slices
  ScheduleArguments arguments{};
  int clusters = 1;

  ScheduleArguments with_list() const {
    ScheduleArguments a = arguments;
    a.expert_offsets = offsets.empty() ? nullptr : offsets.data();
    return a;
  }
  /// As the contract has it: an offset outside [0, capacity] is clamped, an expert whose end lies before its begin is empty.
  int begin(int expert) const {
    const std::int64_t offset =
        offsets.empty() ? std::int64_t{expert} * arguments.slice : offsets[static_cast<std::size_t>(expert)];
    return static_cast<int>(std::clamp<std::int64_t>(offset, 0, arguments.capacity));
  }
  int rows(int expert) const { return std::max(begin(expert + 1) - begin(expert), 0); }
};

std::ostream& operator<<(std::ostream& out, const Problem& p) {
  const ScheduleArguments& a = p.arguments;
  out << "experts " << a.experts << ", capacity " << a.capacity << ", slice " << a.slice << ", m_tiles " << a.m_tiles
      << ", n_tiles " << a.n_tiles << ", group " << a.raster.group << ", bands " << a.raster.bands << ", clusters "
      << p.clusters << ", offsets";
  for (const std::int32_t offset : p.offsets | std::views::take(20)) out << ' ' << offset;
  return out;
}

template <int kCluster, bool kWeight>
std::vector<Tile> walk(const Problem& p, int block, std::size_t at_most) {
  const ScheduleArguments arguments = p.with_list();
  Scheduler<kTileM, kCluster, kWeight, HostPlace> scheduler(arguments, HostPlace{block, p.clusters * kCluster});
  std::vector<Tile> tiles;
  for (Tile tile; tiles.size() <= at_most && scheduler.next(tile);) tiles.push_back(tile);
  return tiles;
}

/// How often each (expert, m, n) was handed out.
template <bool kWeight>
class Coverage {
 public:
  explicit Coverage(const Problem& p) : n_tiles_(p.arguments.n_tiles) {
    for (int e = 0; e < p.arguments.experts; ++e)
      first_.push_back(first_.back() + (kWeight ? p.arguments.m_tiles : (p.rows(e) + kTileM - 1) / kTileM));
    times_.resize(static_cast<std::size_t>(first_.back()) * static_cast<std::size_t>(n_tiles_));
  }
  std::size_t tiles() const { return times_.size(); }
  /// False for a tile that does not exist, or exists once and has been seen.
  bool add(const Tile& t) {
    const auto e = static_cast<std::size_t>(t.expert);
    if (t.expert < 0 || e + 1 >= first_.size() || t.m < 0 || t.m >= first_[e + 1] - first_[e] || t.n < 0 || t.n >= n_tiles_)
      return false;
    return times_[static_cast<std::size_t>(first_[e] + t.m) * static_cast<std::size_t>(n_tiles_) +
                  static_cast<std::size_t>(t.n)]++ == 0;
  }
  bool complete() const {
    return std::ranges::all_of(times_, [](int times) { return times == 1; });
  }

 private:
  int n_tiles_;
  std::vector<int> first_{0};  // m tiles of the experts before
  std::vector<std::uint8_t> times_;
};

/// What a pair of CTAs must share: the barriers of one are filled and freed by the other, so both make the same steps, and a
/// multicast operand must be what both want.
void check_pair(const Problem& p, const std::vector<Tile>& even, const std::vector<Tile>& odd, bool weight) {
  ASSERT_EQ(even.size(), odd.size()) << p;
  for (std::size_t i = 0; i < even.size(); ++i) {
    const Tile &a = even[i], &b = odd[i];
    ASSERT_TRUE(a.expert == b.expert && a.first_row == b.first_row && a.rows == b.rows) << p << ": step " << i;
    ASSERT_EQ(a.multicast, b.multicast) << p << ": step " << i;
    if (a.multicast) {
      ASSERT_TRUE(a.n == b.n && a.m % 2 == 0 && b.m == a.m + 1) << p << ": step " << i;
    } else {
      ASSERT_FALSE(weight) << p;
      const int last = (p.rows(a.expert) + kTileM - 1) / kTileM - 1;
      ASSERT_TRUE(a.m == last && b.m == last && last % 2 == 0) << p << ": only an odd last m tile is shared, step " << i;
      ASSERT_TRUE(a.n % 2 == 0 && b.n == a.n + 1 && a.n < p.arguments.n_tiles) << p << ": step " << i;
    }
  }
}

template <int kCluster, bool kWeight>
void check(const Problem& p) {
  Coverage<kWeight> coverage(p);
  std::vector<Tile> other;
  for (int block = 0; block < p.clusters * kCluster; ++block) {
    std::vector<Tile> tiles = walk<kCluster, kWeight>(p, block, 2 * coverage.tiles());
    for (const Tile& t : tiles) {
      ASSERT_TRUE(t.expert >= 0 && t.expert < p.arguments.experts) << p;
      ASSERT_EQ(t.first_row, p.begin(t.expert)) << p;
      ASSERT_EQ(t.rows, p.rows(t.expert)) << p;
      ASSERT_TRUE(kWeight || t.m * kTileM < t.rows) << p << ": a tile without rows";
      ASSERT_TRUE(kCluster > 1 || !t.multicast) << p;
      const bool idle = kCluster > 1 && !t.multicast && block % kCluster == 1 && t.n == p.arguments.n_tiles;
      ASSERT_TRUE(idle || coverage.add(t)) << p << ": tile " << t.expert << ' ' << t.m << ' ' << t.n << " twice or not there";
    }
    if (kCluster == 2 && block % 2 == 1) {
      check_pair(p, other, tiles, kWeight);
      if (testing::Test::HasFatalFailure()) return;
    }
    other = std::move(tiles);
  }
  ASSERT_TRUE(coverage.complete()) << p << ": a tile was left out";
}

class Draw {
 public:
  explicit Draw(unsigned seed) : engine_(seed) {}
  int operator()(int from, int to) { return std::uniform_int_distribution<int>(from, to)(engine_); }
  /// Small values as often as large ones.
  int log_uniform(int from, int to) {
    return static_cast<int>(std::exp(std::uniform_real_distribution<>(std::log(from), std::log(to + 0.999))(engine_)));
  }

 private:
  std::mt19937 engine_;
};

Problem problem(Draw& draw, bool weight) {
  Problem p;
  ScheduleArguments& a = p.arguments;
  a.experts = draw.log_uniform(1, 2048);
  a.n_tiles = draw.log_uniform(1, 40);
  a.m_tiles = weight ? 2 * draw.log_uniform(1, 8) : 0;
  a.raster = {draw.log_uniform(1, 64), draw(1, 4)};
  p.clusters = draw.log_uniform(1, std::max(1, std::min(132, 100000 / a.experts)));
  const int most = std::max(2, std::min(6000, 200000 / a.experts));
  if (draw(0, 7) == 0) {
    a.slice = draw.log_uniform(1, most);
    a.capacity = a.slice * a.experts - draw(0, a.slice - 1);  // the last slice may be short
    return p;
  }
  int rows = draw(0, 3) == 0 ? -draw(1, 50) : 0;  // a wrong list may begin below zero
  const bool borders = draw(0, 1) == 1;
  for (int e = 0; e <= a.experts; ++e) {
    p.offsets.push_back(rows);
    const int around = kTileM * draw(0, 4) + draw(-1, 1);
    if (draw(0, 3) > 0) rows += borders ? std::max(around, 0) : draw.log_uniform(1, most);
  }
  a.capacity = draw(0, 3) == 0 ? draw(0, std::max(rows, 1)) : std::max(rows, 0);
  for (int wrong = draw(0, 7) - 4; wrong > 0; --wrong)
    p.offsets[static_cast<std::size_t>(draw(0, a.experts))] = draw(0, 1) == 1 ? draw(-5, a.capacity + 500) : 0x7fffffff;
  return p;
}

template <int kCluster, bool kWeight>
void check_random(unsigned seed) {
  Draw draw(seed);
  for (int i = 0; i < 600 && !testing::Test::HasFatalFailure(); ++i) check<kCluster, kWeight>(problem(draw, kWeight));
}

TEST(Scheduler, HandsOutEveryTileOfRowsOnce) { check_random<1, false>(1); }
TEST(Scheduler, HandsOutEveryTileOfRowsOnceToPairs) { check_random<2, false>(2); }
TEST(Scheduler, HandsOutEveryTileOfWeightsOnce) { check_random<1, true>(3); }
TEST(Scheduler, HandsOutEveryTileOfWeightsOnceToPairs) { check_random<2, true>(4); }

/// The gradient of an expert without rows is zero, and somebody has to write that.
TEST(Scheduler, EmptyExpertsHaveWeightTilesAndNoRowTiles) {
  Problem p;
  p.offsets = {0, 0, 300, 300};
  p.arguments = {.experts = 3, .capacity = 300, .m_tiles = 4, .n_tiles = 2};
  EXPECT_EQ((walk<2, true>(p, 0, 100).size()), 3u * 2 * 2);
  EXPECT_EQ((walk<1, false>(p, 0, 100).size()), 3u * 2);
  EXPECT_EQ((walk<2, false>(p, 1, 100).size()), 2u + 1) << "two m tiles together, the third as a pair of n tiles";
}

/// What Raster means: bands follow one another through all experts, and inside one `group` m tiles share a sweep over n.
TEST(Scheduler, FollowsTheRaster) {
  Problem p;
  p.offsets = {0, 10 * kTileM, 10 * kTileM, 17 * kTileM};
  p.arguments = {.experts = 3, .capacity = 17 * kTileM, .n_tiles = 3, .raster = {.group = 4, .bands = 2}};
  std::string order;
  for (const Tile& t : walk<1, false>(p, 0, 100))
    order += static_cast<char>('A' + t.expert) + std::to_string(t.m) + '.' + std::to_string(t.n) + ' ';
  EXPECT_EQ(order,
            "A0.0 A1.0 A2.0 A3.0 A0.1 A1.1 A2.1 A3.1 A0.2 A1.2 A2.2 A3.2 A4.0 A4.1 A4.2 "
            "C0.0 C1.0 C2.0 C0.1 C1.1 C2.1 C0.2 C1.2 C2.2 "
            "A5.0 A6.0 A7.0 A8.0 A5.1 A6.1 A7.1 A8.1 A5.2 A6.2 A7.2 A8.2 A9.0 A9.1 A9.2 "
            "C3.0 C4.0 C5.0 C6.0 C3.1 C4.1 C5.1 C6.1 C3.2 C4.2 C5.2 C6.2 ");
}

}  // namespace
}  // namespace intarsia::cuda::sm90
