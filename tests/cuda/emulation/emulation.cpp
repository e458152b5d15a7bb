// The fibres: threads that run in turn until they wait.
#include "fibres.h"

#include <cstdio>
#include <cstdlib>
#include <string>

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
When copies = When::late, reads = When::late;
bool reversed = false, hopper = false;

namespace {

struct Landing {
  Block* block;
  std::uint32_t barrier;
  std::function<void()> land;
};

constexpr std::size_t kStackBytes = 128 * 1024;
std::vector<Fibre> fibres;  // as many as the largest cluster had: their stacks are kept
std::vector<Block> cluster;
std::deque<Landing> landings;
const std::function<void()>* body_of_block = nullptr;
void* scheduler = nullptr;
int alive = 0;

void entry() {
  (*body_of_block)();
  Fibre& f = self();
  if (!f.copy_groups.open.empty()) fail("a thread ends with copies it never committed");
  if (!f.copy_groups.empty()) fail("a thread ends with copies under way");
  f.copy_groups.committed.clear();
  finish_wgmma(f);
  finish_stores(f);
  f.done = true;
  --alive;
  --f.home->alive;
  emulation_switch(&f.pointer, scheduler);
}

void prepare(Fibre& f) {
  if (!f.stack) f.stack = std::make_unique_for_overwrite<unsigned char[]>(kStackBytes);
  auto top = reinterpret_cast<std::uintptr_t>(f.stack.get() + kStackBytes) / 16 * 16 - 64;
  auto* slots = reinterpret_cast<void**>(top);  // six registers, then the address that ret takes
  slots -= 6;
  std::fill_n(slots, 6, nullptr);
  slots[6] = reinterpret_cast<void*>(&entry);
  f.pointer = slots;
  f.waits_for = nullptr;
  f.done = false;
  f.gathering = 0;
  f.issued = 0;
  f.unfenced.clear();
}

void resume(Fibre& f) {
  f.waits_for = nullptr;
  thread = &f;
  threadIdx = f.index;
  blockIdx = f.block;
  gridDim = f.blocks;
  blockDim = f.threads;
  emulation_switch(&scheduler, f.pointer);
  thread = nullptr;
}

/// Everything that the barrier of the oldest landing is told of.
bool land_some() {
  if (landings.empty()) return false;
  Block* const block = landings.front().block;
  const std::uint32_t barrier = landings.front().barrier;
  std::deque<Landing> others;
  for (Landing& l : landings) {
    if (l.block == block && l.barrier == barrier) l.land();
    else others.push_back(std::move(l));
  }
  landings.swap(others);
  return true;
}

[[noreturn]] void fail_waiting() {
  std::map<std::string, int> waiting;
  for (const Fibre& f : fibres)
    if (f.home != nullptr && !f.done) ++waiting["block " + std::to_string(f.block.x) + " at " + f.waits_at];
  for (const auto& [where, count] : waiting) std::fprintf(stderr, "emulation: %d threads of %s\n", count, where.c_str());
  for (const Block& block : cluster)
    for (const auto& [address, m] : block.mbarriers)
      if (m.in_phase())
        std::fprintf(stderr, "emulation: mbarrier %u of CTA %u waits for %d of %d arrivals and %ld bytes\n", address,
                     block.rank, m.pending, m.expected, static_cast<long>(m.bytes));
  fail("threads wait for each other: a barrier or a warp operation that not all reach");
}

/// body(i) for 0 .. count - 1 in the order of threads; whether any of them did something.
template <class Body>
bool in_order(int count, Body&& body) {
  bool progress = false;
  for (int i = 0; i < count; ++i) progress |= body(reversed ? count - 1 - i : i);
  return progress;
}

/// Runs the warps of a block, each for as long as it can before another one runs: barriers alone keep warps together.
bool run_block(int rank, int threads) {
  return in_order((threads + kWarp - 1) / kWarp, [&](int warp) {
    bool progress = false;
    const auto resume_if_able = [&](int lane) {
      Fibre& f = fibres[static_cast<std::size_t>(rank * threads + warp * kWarp + lane)];
      if (f.done || (f.waits_for != nullptr && *f.waits_for == f.seen)) return false;
      resume(f);
      return true;
    };
    while (in_order(std::min(kWarp, threads - warp * kWarp), resume_if_able)) progress = true;
    return progress;
  });
}

/// The same with blocks.
void run_cluster(int threads) {
  while (alive > 0) {
    const bool progress = in_order(static_cast<int>(cluster.size()), [&](int rank) {
      bool any = false;
      while (run_block(rank, threads)) any = true;
      return any;
    });
    if (!progress && !land_some()) fail_waiting();
  }
  if (!landings.empty()) fail("a block ends with copies under way");
  finish_cluster();
}

void prepare_block(const Grid& grid, std::uint32_t rank, dim3 place) {
  const int count = static_cast<int>(grid.threads.x);
  Block& b = cluster[rank];
  b.rank = rank;
  b.alive = count;
  b.shared.assign(grid.shared_bytes, 0xff);
  b.unfenced.assign(grid.shared_bytes / 16 + 1, nullptr);
  b.warps.resize(static_cast<std::size_t>((count + kWarp - 1) / kWarp));
  for (Warp& w : b.warps) w.arrived = 0, w.performed = 0;
  b.wgmma.assign(b.warps.size() / 4 + 1, {});
  b.mbarriers.clear();
  b.named = {};
  for (int i = 0; i < count; ++i) {
    Fibre& f = fibres[rank * grid.threads.x + static_cast<unsigned>(i)];
    f.home = &b;
    f.index = dim3(static_cast<unsigned>(i), 0, 0);
    f.block = place;
    f.blocks = grid.blocks;
    f.threads = grid.threads;
    f.lane = i % kWarp;
    f.warp = i / kWarp;
    prepare(f);
  }
}

}  // namespace

void fail(const char* what) {
  std::fprintf(stderr, "emulation: %s", what);
  if (thread) std::fprintf(stderr, " (block %u, thread %u)", blockIdx.x, threadIdx.x);
  std::fprintf(stderr, "\n");
  std::abort();
}

std::vector<Block>& blocks_of_cluster() { return cluster; }

void run(const Grid& grid, const std::function<void()>& body) {
  if (grid.blocks.x % grid.cluster != 0) fail("a grid that is not made of whole clusters");
  const unsigned count = grid.threads.x * grid.cluster;
  for (Fibre& f : fibres) f.home = nullptr;
  fibres.resize(std::max<std::size_t>(fibres.size(), count));
  cluster.resize(grid.cluster);
  body_of_block = &body;
  for (unsigned z = 0; z < grid.blocks.z; ++z)
    for (unsigned y = 0; y < grid.blocks.y; ++y)
      for (unsigned x = 0; x < grid.blocks.x; x += grid.cluster) {
        for (unsigned rank = 0; rank < grid.cluster; ++rank) prepare_block(grid, rank, dim3(x + rank, y, z));
        alive = static_cast<int>(count);
        run_cluster(static_cast<int>(grid.threads.x));
      }
}

void yield_until_changed(const int& counter, int seen, const char* what) {
  Fibre& f = self();
  f.waits_for = &counter;
  f.seen = seen;
  f.waits_at = what;
  emulation_switch(&f.pointer, scheduler);
}

void meet(Rendezvous& r, int threads, bool wait, const char* what) {
  if (r.arrived > 0 && r.threads != threads) fail("a barrier of which threads expect different numbers of others");
  r.threads = threads;
  if (++r.arrived == threads) {
    r.arrived = 0;
    ++r.generation;
  } else if (wait) {
    yield_until_changed(r.generation, r.generation, what);
  }
}

void block_barrier() {
  Block& block = *self().home;
  block.named[0].threads = block.alive;  // threads that have ended are not waited for
  meet(block.named[0], block.alive, true, "__syncthreads");
}

const unsigned char* gather_warp(const void* mine, std::size_t bytes) {
  if (bytes > kSlotBytes) fail("too many bytes for a warp's gathering");
  Fibre& f = self();
  Warp& w = f.home->warps[static_cast<std::size_t>(f.warp)];
  unsigned char* slots = w.slots[f.gathering++ % 2];
  if (bytes > 0) std::memcpy(slots + f.lane * kSlotBytes, mine, bytes);
  if (++w.arrived == kWarp) {
    w.arrived = 0;
    ++w.generation;
  } else {
    yield_until_changed(w.generation, w.generation, "a warp operation");
  }
  return slots;
}

// ---- shared memory and cp.async

unsigned char* shared_memory() { return self().home->shared.data(); }

std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(static_cast<const unsigned char*>(pointer) - shared_memory()) + kSharedBase;
}

unsigned char* shared_at(Block& block, std::uint32_t address, std::size_t bytes, const char* what) {
  const bool inside = address >= kSharedBase && address - kSharedBase + bytes <= block.shared.size();
  if (!inside || address % bytes != 0) {
    std::fprintf(stderr, "emulation: %s at shared address %u\n", what, address);
    fail("outside of shared memory, or not aligned");
  }
  return block.shared.data() + (address - kSharedBase);
}
unsigned char* shared_at(std::uint32_t address, std::size_t bytes, const char* what) {
  return shared_at(*self().home, address, bytes, what);
}

void perform(Block& block, const Copy& c) {
  unsigned char* const to = shared_at(block, c.to, 16, "cp.async");
  std::memset(to, 0, 16);
  std::memcpy(to, c.from, static_cast<std::size_t>(c.bytes));
}

void copy_async(std::uint32_t to, const void* from, int bytes) {
  if (reinterpret_cast<std::uintptr_t>(from) % 16 != 0) fail("cp.async from an address that is not a multiple of 16");
  volatile unsigned char touch = *static_cast<const unsigned char*>(from);
  (void)touch;
  if (copies == When::early) perform(*self().home, {to, from, bytes});
  else self().copy_groups.open.push_back({to, from, bytes});
}

void commit_copies() { self().copy_groups.commit(); }

void wait_copies(int pending) {
  Fibre& f = self();
  f.copy_groups.wait(pending, [&](const Copy& c) { perform(*f.home, c); });
}

void land(Block& block, std::uint32_t barrier, std::function<void()> landing) {
  if (copies == When::early) landing();
  else landings.push_back({&block, barrier, std::move(landing)});
}

}  // namespace emulation
