// Bytes that were handed out, counted without a lock.
#pragma once

#include <atomic>
#include <cstddef>

#include "intarsia/types.h"

namespace intarsia {

class MemoryCounter {
 public:
  void add(std::size_t bytes) {
    const std::size_t live = live_.fetch_add(bytes) + bytes;
    for (std::size_t peak = peak_.load(); live > peak && !peak_.compare_exchange_weak(peak, live);) {
    }
    count_.fetch_add(1);
  }
  void remove(std::size_t bytes) { live_.fetch_sub(bytes); }

  AllocatorStats stats() const { return {live_.load(), peak_.load(), count_.load()}; }
  void reset() {
    peak_.store(live_.load());
    count_.store(0);
  }

 private:
  std::atomic<std::size_t> live_{0}, peak_{0}, count_{0};
};

/// Workspaces of calls on a GPU, whoever lends the memory: the counterpart of host_allocator_stats().
MemoryCounter& device_workspaces();

}  // namespace intarsia
