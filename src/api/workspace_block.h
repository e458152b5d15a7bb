// Memory that a call needs beside its arguments, on their device.
#pragma once

#include <cstddef>
#include <new>
#include <optional>

#include "base/execution.h"
#include "base/memory_counter.h"
#include "intarsia/ops.h"
#if defined(INTARSIA_CUDA)
#include "cuda/cuda.h"
#endif

namespace intarsia {

/// What a block is to the plan: part of a pass's workspace, which is counted, or a tensor between two operations.
enum class BlockKind { workspace, transient };

/// Host memory that nobody counts.
class PlainMemory final : public Allocator {
 public:
  void* allocate(std::size_t bytes) override { return ::operator new(bytes, kAlignment); }
  void deallocate(void* pointer, std::size_t) noexcept override { ::operator delete(pointer, kAlignment); }

 private:
  static constexpr std::align_val_t kAlignment{kWorkspaceAlignment};
};

/// One block from the context's allocator, or else from the device's own; given back on every path.
class WorkspaceBlock {
 public:
  WorkspaceBlock(Device device, const Context& context, std::size_t bytes, BlockKind kind = BlockKind::workspace)
      : bytes_(bytes) {
    if (bytes_ == 0) return;
    allocator_ = context.allocator;
    if (device.type == DeviceType::cuda) {
      if (kind == BlockKind::workspace) counter_ = &device_workspaces();
#if defined(INTARSIA_CUDA)
      if (allocator_ == nullptr) allocator_ = &on_stream_.emplace(device.index, context.stream);
#endif
    }
    if (allocator_ == nullptr && kind == BlockKind::transient) allocator_ = &plain_;
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
  PlainMemory plain_;
  Allocator* allocator_ = nullptr;
  MemoryCounter* counter_ = nullptr;
  std::size_t bytes_;
  void* pointer_ = nullptr;
};

}  // namespace intarsia
