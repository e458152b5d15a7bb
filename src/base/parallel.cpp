// The library's own thread pool: started on first use, workers sleep on a condition variable (never spin), one loop at a time.
// A second caller that finds the pool busy runs its loop alone, which changes speed and nothing else.
#include "base/parallel.h"

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "intarsia/error.h"

namespace intarsia {
namespace {

thread_local bool inside_loop = false;

int threads_from_environment() {
  if (const char* text = std::getenv("OMP_NUM_THREADS")) {
    const int n = std::atoi(text);
    if (n > 0) return n;
  }
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

std::atomic<int>& requested_threads() {
  static std::atomic<int> threads{threads_from_environment()};
  return threads;
}

class Pool {
 public:
  ~Pool() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  /// False when another loop has the pool.
  bool run(int workers, void (*body)(void*, int), void* context) {
    const std::unique_lock busy(busy_, std::try_to_lock);
    if (!busy.owns_lock()) return false;
    {
      const std::lock_guard lock(mutex_);
      while (static_cast<int>(threads_.size()) < workers - 1)
        threads_.emplace_back([this, worker = static_cast<int>(threads_.size()) + 1] { work(worker); });
      body_ = body;
      context_ = context;
      workers_ = workers;
      running_ = workers - 1;
      ++generation_;
    }
    wake_.notify_all();
    body(context, 0);
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return running_ == 0; });
    return true;
  }

 private:
  void work(int worker) {
    inside_loop = true;
    std::uint64_t seen = 0;
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [&] { return stop_ || (generation_ != seen && worker < workers_); });
      if (stop_) return;
      seen = generation_;
      const auto body = body_;
      const auto context = context_;
      lock.unlock();
      body(context, worker);
      lock.lock();
      if (--running_ == 0) done_.notify_one();
    }
  }

  std::mutex busy_, mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> threads_;
  void (*body_)(void*, int) = nullptr;
  void* context_ = nullptr;
  int workers_ = 0, running_ = 0;
  std::uint64_t generation_ = 0;
  bool stop_ = false;
};

Pool& own_pool() {
  static Pool pool;
  return pool;
}

std::mutex lent_mutex;
ThreadPool lent_pool;

ThreadPool current_pool() {
  const std::lock_guard lock(lent_mutex);
  return lent_pool;
}

}  // namespace

int num_threads() {
  const ThreadPool pool = current_pool();
  return pool.max_workers ? std::max(1, pool.max_workers()) : requested_threads().load();
}

void set_num_threads(int threads) {
  if (threads < 1) throw InvalidArgument("set_num_threads: threads must be at least 1, got " + std::to_string(threads));
  requested_threads().store(threads);
}

void set_thread_pool(ThreadPool pool) {
  if ((pool.max_workers == nullptr) != (pool.run == nullptr))
    throw InvalidArgument("set_thread_pool: give both functions, or neither to return to the library's own pool");
  const std::lock_guard lock(lent_mutex);
  lent_pool = pool;
}

int max_workers() { return inside_loop ? 1 : num_threads(); }

void run_workers(int workers, void (*body)(void* context, int worker), void* context) {
  struct Nested {
    bool before = inside_loop;
    Nested() { inside_loop = true; }
    ~Nested() { inside_loop = before; }
  };
  struct Call {
    void (*body)(void*, int);
    void* context;
  } call{body, context};
  const auto guarded = [](void* pointer, int worker) {
    const Nested nested;
    const auto& c = *static_cast<Call*>(pointer);
    c.body(c.context, worker);
  };
  if (!inside_loop && workers > 1) {
    if (const ThreadPool pool = current_pool(); pool.run) return pool.run(workers, guarded, &call);
    if (own_pool().run(workers, guarded, &call)) return;
  }
  for (int worker = 0; worker < workers; ++worker) guarded(&call, worker);
}

}  // namespace intarsia
