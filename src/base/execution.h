// What a backend gets beside the arguments: already checked, memory already there.
#pragma once

#include <cstddef>

#include "intarsia/error.h"

namespace intarsia {

struct Execution {
  void* stream = nullptr;
  std::byte* workspace = nullptr;  ///< workspace_bytes(op) bytes, aligned to 256, contents undefined
  int workers = 1;                 ///< what max_workers() said when the workspace was sized
};

constexpr std::size_t kWorkspaceAlignment = 256;
constexpr std::size_t align_up(std::size_t bytes) {
  return (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
}

}  // namespace intarsia
