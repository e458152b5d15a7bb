// The CUDA backend: every operation on the caller's stream, without a host sync, an allocation or a read of device values.
#pragma once

#include <cstddef>
#include <string>

#include "base/execution.h"
#include "intarsia/ops.h"

namespace intarsia::cuda {

#define INTARSIA_DECLARE(Op)                                                              \
  void run(const Op&, const Execution&);                                                  \
  /** Bytes of workspace for this call on this device; 0 for an operation without any. */ \
  std::size_t workspace_bytes(const Op&);                                                 \
  /** Which kernels run would launch, and why not faster ones. */                         \
  std::string explain(const Op&);
INTARSIA_FOR_EACH_OPERATION(INTARSIA_DECLARE)
#undef INTARSIA_DECLARE

/// Workspaces for callers that bring no allocator: the device's memory pool, in the order of a stream (and part of a captured
/// graph). What the pool keeps between calls is the caller's to set (Context in ops.h): a pool of the library's own would hold
/// memory that nobody could take back.
class StreamAllocator final : public Allocator {
 public:
  StreamAllocator(int device, void* stream) : device_(device), stream_(stream) {}
  void* allocate(std::size_t bytes) override;
  void deallocate(void* pointer, std::size_t bytes) noexcept override;

 private:
  int device_;
  void* stream_;
};

/// Copies device memory to the host and waits for it: for INTARSIA_CHECK=1, and nothing else. Not while the stream is captured.
void copy_to_host(void* to, const void* from, std::size_t bytes, int device, void* stream);
/// True while what the stream is given goes into a CUDA graph.
bool is_captured(int device, void* stream);

/// Refuses a stream of another device than the tensors': the driver would run the kernels there.
void check_stream(const char* operation, int device, void* stream);

/// Empty when this process has a usable device of that index, else the reason in words.
std::string device_problem(int index);

}  // namespace intarsia::cuda
