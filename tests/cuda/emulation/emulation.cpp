// The fibres, and the part of the CUDA runtime that the kernels' launchers and the test drivers call.
#include "emulation.h"

#include <cuda.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#if !defined(__x86_64__)
#error "the fibres of this emulation switch stacks on x86-64 only"
#endif

asm(R"(
.text
.globl emulation_switch
.type emulation_switch, @function
emulation_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
extern "C" void emulation_switch(void** save, void* load);

dim3 threadIdx, blockIdx, gridDim, blockDim;

namespace emulation {

Thread* thread = nullptr;
Copies copies = Copies::late;
bool reversed = false;

namespace {

struct Copy {
  std::uint32_t to;
  const void* from;
  int bytes;
};

struct Warp {
  int generation = 0, arrived = 0;
  alignas(64) unsigned char slots[2][kWarp * kSlotBytes];
};

struct Fibre : Thread {
  std::unique_ptr<unsigned char[]> stack;
  void* pointer = nullptr;
  const int* waits_for = nullptr;  // runnable when *waits_for differs from `seen`
  int seen = 0;
  bool done = false;
  int gathering = 0;
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
};

constexpr std::size_t kStackBytes = 128 * 1024;
std::vector<Fibre> fibres;  // as many as the largest block had: their stacks are kept
std::vector<Warp> warps;
std::vector<unsigned char> shared;
const std::function<void()>* body_of_block = nullptr;
void* scheduler = nullptr;
int block_generation = 0, block_arrived = 0, alive = 0;

Fibre& self() { return *static_cast<Fibre*>(thread); }

void yield_until(const int& counter, int seen) {
  Fibre& f = self();
  f.waits_for = &counter;
  f.seen = seen;
  emulation_switch(&f.pointer, scheduler);
}

void perform(const Copy& c) {
  if (c.to % 16 != 0 || c.to + 16 > shared.size()) fail("cp.async outside of shared memory");
  std::memset(shared.data() + c.to, 0, 16);
  std::memcpy(shared.data() + c.to, c.from, static_cast<std::size_t>(c.bytes));
}

void entry() {
  (*body_of_block)();
  Fibre& f = self();
  for (const auto& group : f.groups)
    if (!group.empty()) fail("a thread ends with copies under way");
  if (!f.open.empty()) fail("a thread ends with copies it never committed");
  f.groups.clear();
  f.done = true;
  --alive;
  emulation_switch(&f.pointer, scheduler);
}

void prepare(Fibre& f) {
  if (!f.stack) f.stack = std::make_unique<unsigned char[]>(kStackBytes);
  auto top = reinterpret_cast<std::uintptr_t>(f.stack.get() + kStackBytes) / 16 * 16 - 64;
  auto* slots = reinterpret_cast<void**>(top);  // six registers, then the address that ret takes
  slots -= 6;
  std::fill_n(slots, 6, nullptr);
  slots[6] = reinterpret_cast<void*>(&entry);
  f.pointer = slots;
  f.waits_for = nullptr;
  f.done = false;
  f.gathering = 0;
}

void run_block(int count) {
  while (alive > 0) {
    bool progress = false;
    for (int i = 0; i < count; ++i) {
      Fibre& f = fibres[static_cast<std::size_t>(reversed ? count - 1 - i : i)];
      if (f.done || (f.waits_for != nullptr && *f.waits_for == f.seen)) continue;
      f.waits_for = nullptr;
      thread = &f;
      threadIdx = f.index;
      blockIdx = f.block;
      gridDim = f.blocks;
      blockDim = f.threads;
      emulation_switch(&scheduler, f.pointer);
      progress = true;
    }
    if (!progress) fail("threads wait for each other: a barrier or a warp operation that not all reach");
  }
}

}  // namespace

void fail(const char* what) {
  std::fprintf(stderr, "emulation: %s\n", what);
  std::abort();
}

void run(dim3 blocks, dim3 threads, std::size_t shared_bytes, const std::function<void()>& body) {
  const int count = static_cast<int>(threads.x);
  fibres.resize(std::max(fibres.size(), static_cast<std::size_t>(count)));
  warps.resize(static_cast<std::size_t>((count + kWarp - 1) / kWarp));
  body_of_block = &body;
  for (unsigned z = 0; z < blocks.z; ++z)
    for (unsigned y = 0; y < blocks.y; ++y)
      for (unsigned x = 0; x < blocks.x; ++x) {
        shared.assign(shared_bytes, 0xff);
        block_arrived = 0;
        for (Warp& w : warps) w.arrived = 0;
        for (int i = 0; i < count; ++i) {
          Fibre& f = fibres[static_cast<std::size_t>(i)];
          f.index = dim3(static_cast<unsigned>(i), 0, 0);
          f.block = dim3(x, y, z);
          f.blocks = blocks;
          f.threads = threads;
          f.lane = i % kWarp;
          f.warp = i / kWarp;
          prepare(f);
        }
        alive = count;
        run_block(count);
      }
}

void block_barrier() {
  if (++block_arrived == alive) {
    block_arrived = 0;
    ++block_generation;
    return;
  }
  yield_until(block_generation, block_generation);
}

const unsigned char* gather_warp(const void* mine, std::size_t bytes) {
  if (bytes > kSlotBytes) fail("too many bytes for a warp's gathering");
  Fibre& f = self();
  Warp& w = warps[static_cast<std::size_t>(f.warp)];
  unsigned char* slots = w.slots[f.gathering++ % 2];
  if (bytes > 0) std::memcpy(slots + f.lane * kSlotBytes, mine, bytes);
  if (++w.arrived == kWarp) {
    w.arrived = 0;
    ++w.generation;
  } else {
    yield_until(w.generation, w.generation);
  }
  return slots;
}

unsigned char* shared_memory() { return shared.data(); }
std::size_t shared_bytes() { return shared.size(); }

void copy_async(std::uint32_t to, const void* from, int bytes) {
  if (reinterpret_cast<std::uintptr_t>(from) % 16 != 0) fail("cp.async from an address that is not a multiple of 16");
  volatile unsigned char touch = *static_cast<const unsigned char*>(from);
  (void)touch;
  if (copies == Copies::early) perform({to, from, bytes});
  else self().open.push_back({to, from, bytes});
}

void commit_copies() {
  Fibre& f = self();
  f.groups.push_back(std::move(f.open));
  f.open.clear();
}

void wait_copies(int pending) {
  Fibre& f = self();
  while (static_cast<int>(f.groups.size()) > pending) {
    for (const Copy& c : f.groups.front()) perform(c);
    f.groups.pop_front();
  }
}

}  // namespace emulation

// ---- the CUDA runtime

namespace {

std::map<void*, std::pair<void*, std::size_t>> mappings;  // pointer -> mapping

}  // namespace

extern "C" {

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t used = (bytes + 15) / 16 * 16, pages = (used + page - 1) / page * page;
  void* base = mmap(nullptr, pages + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) return cudaErrorMemoryAllocation;
  mprotect(static_cast<char*>(base) + pages, page, PROT_NONE);
  *pointer = static_cast<char*>(base) + pages - used;
  mappings[*pointer] = {base, pages + page};
  return cudaSuccess;
}
cudaError_t cudaFree(void* pointer) {
  const auto found = mappings.find(pointer);
  if (found == mappings.end()) return pointer ? cudaErrorInvalidValue : cudaSuccess;
  munmap(found->second.first, found->second.second);
  mappings.erase(found);
  return cudaSuccess;
}
cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t) { return cudaMalloc(pointer, bytes); }
cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return cudaFree(pointer); }
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) { return cudaMemset(to, value, bytes); }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "an error of the emulation"; }
cudaError_t cudaGetDevice(int* index) {
  *index = 0;
  return cudaSuccess;
}
/// What is asked for are calls about contexts, and there is one device: all of them succeed and do nothing.
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult*) {
  *function = reinterpret_cast<void*>(+[] { return CUDA_SUCCESS; });
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = 2; break;  // few CTAs, so that each takes several tiles
    case cudaDevAttrComputeCapabilityMajor: *value = 8; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 163 * 1024; break;
    default: *value = 0;
  }
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaEventCreate(cudaEvent_t*) { return cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) {
  *ms = 1.0f;
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  *stream = nullptr;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return cudaStreamCreate(stream); }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }

}  // extern "C"
