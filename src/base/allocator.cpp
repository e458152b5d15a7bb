// The counting host allocator.
#include <sys/mman.h>

#include <atomic>
#include <new>

#include "intarsia/types.h"

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
    const std::size_t live = live_.fetch_add(bytes) + bytes;
    for (std::size_t peak = peak_.load(); live > peak && !peak_.compare_exchange_weak(peak, live);) {
    }
    count_.fetch_add(1);
    return pointer;
  }

  void deallocate(void* pointer, std::size_t bytes) noexcept override {
    if (pointer == nullptr) return;
    ::operator delete(pointer, alignment_of(bytes));
    live_.fetch_sub(bytes);
  }

  AllocatorStats stats() const { return {live_.load(), peak_.load(), count_.load()}; }

  void reset() {
    peak_.store(live_.load());
    count_.store(0);
  }

 private:
  std::atomic<std::size_t> live_{0}, peak_{0}, count_{0};
};

HostAllocator& instance() {
  static HostAllocator allocator;
  return allocator;
}

}  // namespace

Allocator::~Allocator() = default;
Allocator& host_allocator() { return instance(); }
AllocatorStats host_allocator_stats() { return instance().stats(); }
void reset_host_allocator_stats() { instance().reset(); }

}  // namespace intarsia
