// What workers take of a workspace.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/workspace.h"

namespace intarsia::cpu {

/// A row of n elements for each worker, on cache lines of its own.
template <class T>
class WorkerRows {
 public:
  WorkerRows(Workspace& workspace, int workers, std::int64_t n)
      : step_(static_cast<std::int64_t>(align_up(static_cast<std::size_t>(n) * sizeof(T)) / sizeof(T))),
        rows_(workspace.take<T>(step_ * workers)) {}
  T* operator()(int worker) const { return rows_ + step_ * worker; }

 private:
  std::int64_t step_;
  T* rows_;
};

}  // namespace intarsia::cpu
