// What the parts of the emulation share: threads, warps and blocks as they run.
#pragma once

#include <algorithm>
#include <array>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "emulation.h"
#include "hopper.h"

namespace emulation {

/// Dynamic shared memory begins here: the system has the first KiB.
constexpr std::uint32_t kSharedBase = 1024;

struct Copy {
  std::uint32_t to;
  const void* from;
  int bytes;
};

/// What a CUtensorMap holds here.
struct TensorMap {
  std::uint64_t magic;
  unsigned char* data;
  std::uint64_t dims[4], strides[4];  ///< strides in bytes, the first is an element's
  std::uint32_t box[4];
  std::int32_t type;
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap));

struct Box {
  TensorMap map;
  Coordinates at;
};

struct Store {
  Box box;
  std::uint32_t source;
  bool add;
  std::vector<unsigned char> read;  ///< what was in shared memory when it was read
};

struct Mbarrier {
  int expected = 0, pending = 0, phase = 0;                            ///< phase: how many are complete
  std::int64_t bytes = 0;                                              ///< announced and not landed
  bool in_phase() const { return pending != expected || bytes != 0; }  ///< something has come, and not all
};

/// __syncthreads, bar.sync and barrier.cluster.
struct Rendezvous {
  int threads = 0, arrived = 0, generation = 0;
};

/// A wgmma of a warp: its 16 rows of D.
struct Product {
  Operands operands;
  int lanes = 0;  ///< that have issued it
  float* d[kWarp];
};

struct Warp {
  int generation = 0, arrived = 0;
  alignas(64) unsigned char slots[2][kWarp * kSlotBytes];
  std::deque<Product> products;
  std::size_t performed = 0;  ///< products before the first of `products`
};

struct Block {
  std::uint32_t rank = 0;
  int alive = 0;
  std::vector<unsigned char> shared;
  std::vector<const Thread*> unfenced;  ///< of each 16 bytes, the thread that wrote them and has not fenced since
  std::vector<Warp> warps;
  std::vector<std::vector<Operands>> wgmma;  ///< of each warpgroup, what its foremost warp has performed
  std::map<std::uint32_t, Mbarrier> mbarriers;
  std::array<Rendezvous, 16> named;  ///< 0: __syncthreads
};

/// Asynchronous work of a thread in groups: what is open, and what was committed, the oldest first.
template <class T>
struct Groups {
  std::vector<T> open;
  std::deque<std::vector<T>> committed;

  void commit() {
    committed.push_back(std::move(open));
    open.clear();
  }
  /// body(piece) for the pieces of all groups but the last `pending`, which are done with then.
  template <class Body>
  void wait(int pending, Body&& body) {
    for (; static_cast<int>(committed.size()) > pending; committed.pop_front())
      for (T& piece : committed.front()) body(piece);
  }
  bool empty() const {
    return open.empty() && std::all_of(committed.begin(), committed.end(), [](const auto& group) { return group.empty(); });
  }
};

struct Fibre : Thread {
  Block* home = nullptr;
  std::unique_ptr<unsigned char[]> stack;
  void* pointer = nullptr;
  const int* waits_for = nullptr;  // runnable when *waits_for differs from `seen`
  int seen = 0;
  const char* waits_at = "";
  bool done = false;
  int gathering = 0;
  Groups<Copy> copy_groups;
  Groups<Store> store_groups;
  std::vector<Store> read_stores;
  std::vector<std::uint32_t> unfenced;
  std::size_t issued = 0;             // wgmma
  std::deque<std::size_t> committed;  // how many were issued when a group that is not waited for was committed
};

inline Fibre& self() { return *static_cast<Fibre*>(thread); }
std::vector<Block>& blocks_of_cluster();

void yield_until_changed(const int& counter, int seen, const char* what);
/// Waits for all of `threads`, or only arrives.
void meet(Rendezvous& r, int threads, bool wait, const char* what);

unsigned char* shared_at(Block& block, std::uint32_t address, std::size_t bytes, const char* what);
void perform(Block& block, const Copy& c);
/// Bytes that were announced have landed.
void barrier_complete(Block& block, std::uint32_t barrier, std::int64_t bytes);
/// What lands in a block's shared memory and then tells its barrier: now, or when no thread can run otherwise.
void land(Block& block, std::uint32_t barrier, std::function<void()> landing);
/// Fails where the bytes are not all of one allocation.
void check_global(const void* pointer, std::size_t bytes, const char* what);

/// Things that a thread must not leave behind, and a cluster.
void finish_wgmma(const Fibre& f);
void finish_stores(Fibre& f);
void finish_cluster();

}  // namespace emulation
