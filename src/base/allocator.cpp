// The counting host allocator.
#include <sys/mman.h>

#include <new>

#include "base/memory_counter.h"

namespace intarsia {
namespace {

/// A cache line would do; 256 is what CUDA gives, so offsets are the same everywhere. Large blocks begin at a huge page and ask
/// for such pages: a workspace is fresh memory in every call, and faulting it in by small pages cost 2 to 4 % of a layer.
constexpr std::size_t kHugePage = std::size_t{2} << 20;
std::align_val_t alignment_of(std::size_t bytes) { return std::align_val_t{bytes >= 2 * kHugePage ? kHugePage : 256}; }

class HostAllocator final : public Allocator {
 public:
  void* allocate(std::size_t bytes) override {
    if (bytes == 0) return nullptr;
    void* pointer = ::operator new(bytes, alignment_of(bytes));
    if (bytes >= 2 * kHugePage) madvise(pointer, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);  // a hint: failing is no error
    counter_.add(bytes);
    return pointer;
  }

  void deallocate(void* pointer, std::size_t bytes) noexcept override {
    if (pointer == nullptr) return;
    ::operator delete(pointer, alignment_of(bytes));
    counter_.remove(bytes);
  }

  MemoryCounter& counter() { return counter_; }

 private:
  MemoryCounter counter_;
};

HostAllocator& instance() {
  static HostAllocator allocator;
  return allocator;
}

}  // namespace

Allocator::~Allocator() = default;
Allocator& host_allocator() { return instance(); }
AllocatorStats host_allocator_stats() { return instance().counter().stats(); }
void reset_host_allocator_stats() { instance().counter().reset(); }

MemoryCounter& device_workspaces() {
  static MemoryCounter counter;
  return counter;
}

}  // namespace intarsia
