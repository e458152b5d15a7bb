// The thread pool: every task once, exceptions, nesting, several callers, a lent pool.
#include "base/parallel.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <thread>
#include <vector>

#include "intarsia/error.h"

namespace intarsia {
namespace {

class Parallel : public testing::Test {
 protected:
  int before_ = num_threads();
  ~Parallel() override {
    set_thread_pool({});
    set_num_threads(before_);
  }
};

TEST_F(Parallel, RunsEveryTaskOnce) {
  for (const int threads : {1, 2, 3, 8}) {
    set_num_threads(threads);
    for (const std::int64_t tasks : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> count(static_cast<std::size_t>(tasks));
      std::atomic<bool> worker_in_range{true};
      parallel_for(tasks, [&](std::int64_t task, int worker) {
        ++count[static_cast<std::size_t>(task)];
        if (worker < 0 || worker >= threads) worker_in_range = false;
      });
      for (const auto& c : count) EXPECT_EQ(c.load(), 1);
      EXPECT_TRUE(worker_in_range);
    }
  }
}

TEST_F(Parallel, NegativeTaskCountsRunNothing) {
  parallel_for(-5, [](std::int64_t, int) { FAIL(); });
}

TEST_F(Parallel, RethrowsAndStaysUsable) {
  for (const int threads : {1, 3}) {
    set_num_threads(threads);
    for (int round = 0; round < 20; ++round) {
      EXPECT_THROW(parallel_for(100,
                                [](std::int64_t task, int) {
                                  if (task == 37) throw std::domain_error("task 37");
                                }),
                   std::domain_error);
      std::atomic<int> sum{0};
      parallel_for(10, [&](std::int64_t, int) { ++sum; });
      EXPECT_EQ(sum.load(), 10);
    }
  }
}

TEST_F(Parallel, NestedLoopsRunAlone) {
  set_num_threads(3);
  std::atomic<int> inner{0};
  std::atomic<bool> alone{true};
  parallel_for(8, [&](std::int64_t, int) {
    if (max_workers() != 1) alone = false;
    parallel_for(5, [&](std::int64_t, int worker) {
      ++inner;
      if (worker != 0) alone = false;
    });
  });
  EXPECT_EQ(inner.load(), 40);
  EXPECT_TRUE(alone);
  EXPECT_EQ(max_workers(), 3);
}

TEST_F(Parallel, TwoCallersDoNotDisturbEachOther) {
  set_num_threads(2);
  std::atomic<std::int64_t> total{0};
  const auto caller = [&] {
    for (int round = 0; round < 200; ++round) parallel_for(50, [&](std::int64_t task, int) { total += task; });
  };
  std::thread first(caller), second(caller);
  first.join();
  second.join();
  EXPECT_EQ(total.load(), 2 * 200 * (49 * 50 / 2));
}

std::atomic<int> lent_runs{0};

TEST_F(Parallel, UsesALentPool) {
  set_thread_pool({.max_workers = [] { return 4; },
                   .run =
                       [](int workers, void (*body)(void*, int), void* context) {
                         ++lent_runs;
                         for (int worker = 0; worker < workers; ++worker) body(context, worker);
                       }});
  lent_runs = 0;
  EXPECT_EQ(num_threads(), 4);
  std::atomic<int> tasks{0};
  parallel_for(10, [&](std::int64_t, int) { ++tasks; });
  EXPECT_EQ(tasks.load(), 10);
  EXPECT_EQ(lent_runs.load(), 1);
  set_thread_pool({});
  parallel_for(10, [&](std::int64_t, int) { ++tasks; });
  EXPECT_EQ(lent_runs.load(), 1);
}

TEST_F(Parallel, RefusesNonsense) {
  EXPECT_THROW(set_num_threads(0), InvalidArgument);
  EXPECT_THROW(set_thread_pool({.max_workers = [] { return 1; }, .run = nullptr}), InvalidArgument);
}

}  // namespace
}  // namespace intarsia
