// The one parallel loop of the CPU backends. Tasks are handed out by an atomic counter, so load balances itself; a task must
// not depend on which worker runs it, so that results are the same for every number of threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <type_traits>

#include "intarsia/ops.h"

namespace intarsia {

/// Workers that a parallel loop would use now; scratch is sized by it. 1 inside a parallel loop.
int max_workers();

/// Runs body(context, worker) for each worker in [0, workers) on the current thread pool; returns when all have ended.
void run_workers(int workers, void (*body)(void* context, int worker), void* context);

/// body(task, worker) for each task in [0, tasks). The first exception stops the loop and is rethrown here.
template <class Body>
void parallel_for(std::int64_t tasks, int workers, Body&& body) {
  if (tasks <= 0) return;
  if (workers > tasks) workers = static_cast<int>(tasks);
  if (workers <= 1) {
    for (std::int64_t task = 0; task < tasks; ++task) body(task, 0);
    return;
  }
  struct Loop {
    std::remove_reference_t<Body>* body;
    std::int64_t tasks;
    std::atomic<std::int64_t> next{0};
    std::exception_ptr error;
    std::mutex mutex;
  } loop{&body, tasks, {}, {}, {}};
  run_workers(
      workers,
      [](void* context, int worker) {
        auto& l = *static_cast<Loop*>(context);
        try {
          for (std::int64_t task; (task = l.next.fetch_add(1, std::memory_order_relaxed)) < l.tasks;) (*l.body)(task, worker);
        } catch (...) {
          l.next.store(l.tasks, std::memory_order_relaxed);
          const std::lock_guard lock(l.mutex);
          if (!l.error) l.error = std::current_exception();
        }
      },
      &loop);
  if (loop.error) std::rethrow_exception(loop.error);
}

template <class Body>
void parallel_for(std::int64_t tasks, Body&& body) {
  parallel_for(tasks, max_workers(), body);
}

}  // namespace intarsia
