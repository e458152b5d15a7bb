// Memory that a call needs beside its arguments, on their device.
#pragma once

#include <cstddef>
#include <optional>

#include "base/memory_counter.h"
#include "intarsia/ops.h"
#if defined(INTARSIA_CUDA)
#include "cuda/cuda.h"
#endif

namespace intarsia {

/// One block from the context's allocator, or else from the device's own; counted, and given back on every path.
class WorkspaceBlock {
 public:
  WorkspaceBlock(Device device, const Context& context, std::size_t bytes) : bytes_(bytes) {
    if (bytes_ == 0) return;
    allocator_ = context.allocator;
    if (device.type == DeviceType::cuda) {
      counter_ = &device_workspaces();
#if defined(INTARSIA_CUDA)
      if (allocator_ == nullptr) allocator_ = &on_stream_.emplace(device.index, context.stream);
#endif
    }
    if (allocator_ == nullptr) allocator_ = &host_allocator();  // which counts by itself
    pointer_ = allocator_->allocate(bytes_);
    if (counter_) counter_->add(bytes_);
  }
  ~WorkspaceBlock() {
    if (!pointer_) return;
    allocator_->deallocate(pointer_, bytes_);
    if (counter_) counter_->remove(bytes_);
  }
  WorkspaceBlock(const WorkspaceBlock&) = delete;
  WorkspaceBlock& operator=(const WorkspaceBlock&) = delete;
  std::byte* get() const { return static_cast<std::byte*>(pointer_); }

 private:
#if defined(INTARSIA_CUDA)
  std::optional<cuda::StreamAllocator> on_stream_;
#endif
  Allocator* allocator_ = nullptr;
  MemoryCounter* counter_ = nullptr;
  std::size_t bytes_;
  void* pointer_ = nullptr;
};

}  // namespace intarsia
