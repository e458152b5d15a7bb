// mbarriers, named barriers and clusters.
#include "fibres.h"

namespace emulation {
namespace {

constexpr std::uint64_t kMark =
    0x4d'62'61'72'72'69'65'72;  // in shared memory where an mbarrier is, so that others leave traces

unsigned char* place_of(Block& block, std::uint32_t address) { return shared_at(block, address, sizeof kMark, "an mbarrier"); }

Mbarrier& mbarrier(Block& block, std::uint32_t address) {
  if (block.alive == 0) fail("an arrival at a CTA that has ended");
  const auto found = block.mbarriers.find(address);
  if (found == block.mbarriers.end()) fail("an mbarrier that was never initialised");
  if (std::memcmp(place_of(block, address), &kMark, sizeof kMark) != 0) fail("an mbarrier that something was written over");
  return found->second;
}

void complete_if_all(Mbarrier& m) {
  if (m.pending > 0 || m.bytes != 0) return;
  m.pending = m.expected;
  ++m.phase;
}

void arrive(Block& block, std::uint32_t address, std::int64_t bytes) {
  Mbarrier& m = mbarrier(block, address);
  if (m.pending == 0) fail("more arrivals at an mbarrier than a phase expects");
  m.bytes += bytes;
  --m.pending;
  complete_if_all(m);
}

Rendezvous of_cluster;

}  // namespace

void barrier_init(std::uint32_t barrier, std::uint32_t arrivals) {
  Block& block = *self().home;
  std::memcpy(place_of(block, barrier), &kMark, sizeof kMark);
  const int count = static_cast<int>(arrivals);
  if (!block.mbarriers.emplace(barrier, Mbarrier{count, count}).second) fail("an mbarrier is initialised twice");
}

void barrier_expect(std::uint32_t barrier, std::uint32_t bytes) { arrive(*self().home, barrier, bytes); }
void barrier_arrive(std::uint32_t barrier) { arrive(*self().home, barrier, 0); }
void barrier_arrive_remote(std::uint32_t barrier, std::uint32_t cta) { arrive(blocks_of_cluster().at(cta), barrier, 0); }

void barrier_wait(std::uint32_t barrier, std::uint32_t parity) {
  const Mbarrier& m = mbarrier(*self().home, barrier);
  while (static_cast<std::uint32_t>(m.phase) % 2 == parity) yield_until_changed(m.phase, m.phase, "an mbarrier");
}

void barrier_complete(Block& block, std::uint32_t barrier, std::int64_t bytes) {
  Mbarrier& m = mbarrier(block, barrier);
  m.bytes -= bytes;
  complete_if_all(m);
}

void copies_arrive(std::uint32_t barrier) {
  Fibre& f = self();
  if (!f.copy_groups.committed.empty()) fail("cp.async.mbarrier.arrive beside groups of cp.async");
  Block* const block = f.home;
  land(*block, barrier, [block, barrier, landed = std::move(f.copy_groups.open)] {
    for (const Copy& c : landed) perform(*block, c);
    arrive(*block, barrier, 0);
  });
  f.copy_groups.open.clear();
}

void named_barrier(int barrier, int threads, bool wait) {
  if (barrier < 1 || barrier > 15 || threads <= 0 || threads % kWarp != 0) fail("a named barrier that does not exist");
  meet(self().home->named[static_cast<std::size_t>(barrier)], threads, wait, "a named barrier");
}

std::uint32_t cluster_rank() { return self().home->rank; }

void cluster_barrier() {
  const auto threads = static_cast<int>(blockDim.x * blocks_of_cluster().size());
  meet(of_cluster, threads, true, "the cluster's barrier");
}

/// Phases of these kernels are whole in the end: anything else is a wrong count of arrivals or bytes.
void finish_cluster() {
  for (const Block& block : blocks_of_cluster()) {
    for (const auto& [address, m] : block.mbarriers)
      if (m.in_phase()) fail("a block ends with an mbarrier in the middle of a phase");
    for (std::size_t i = 0; i < block.wgmma.size(); ++i)
      for (std::size_t w = 4 * i; w < std::min(4 * i + 4, block.warps.size()); ++w)
        if (block.warps[w].performed != block.wgmma[i].size()) fail("a wgmma that not all warps of a warpgroup have issued");
  }
}

}  // namespace emulation
