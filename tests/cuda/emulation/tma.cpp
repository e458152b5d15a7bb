// TMA: boxes of rank-4 tensors whose rows are 128 bytes in shared memory, with the 128-byte swizzle.
#include "fibres.h"

namespace emulation {
namespace {

constexpr std::uint64_t kMagic = 0x70616d726f736e74;
constexpr std::uint32_t kRowBytes = 128, kChunk = 16;

TensorMap decode(const CUtensorMap& map) {
  TensorMap m;
  std::memcpy(&m, &map, sizeof m);
  if (m.magic != kMagic || reinterpret_cast<std::uintptr_t>(&map) % 64 != 0) fail("TMA with something that is no tensor map");
  return m;
}

std::uint32_t rows_of(const TensorMap& m) { return m.box[1] * m.box[2] * m.box[3]; }

/// Row `row` of a box in global memory, and how many of its bytes are inside the tensor.
struct BoxRow {
  unsigned char* data;
  std::size_t bytes = 0;

  BoxRow(const Box& box, std::uint32_t row) {
    const TensorMap& m = box.map;
    const std::uint64_t inside[4] = {0, row % m.box[1], row / m.box[1] % m.box[2], row / m.box[1] / m.box[2]};
    std::uint64_t address = reinterpret_cast<std::uint64_t>(m.data);  // modulo 2^64, as the hardware has it
    bool exists = true;
    for (int d = 0; d < 4; ++d) {
      const std::int64_t c = box.at.c[d] + static_cast<std::int64_t>(inside[d]);
      exists &= c >= 0 && static_cast<std::uint64_t>(c) < m.dims[d];
      address += static_cast<std::uint64_t>(c) * m.strides[d];
    }
    data = reinterpret_cast<unsigned char*>(address);
    if (!exists) return;
    bytes = std::min<std::uint64_t>(m.dims[0] - static_cast<std::uint64_t>(box.at.c[0]), m.box[0]) * m.strides[0];
    check_global(data, bytes, "TMA");
  }
};

unsigned char* chunk_at(Block& block, std::uint32_t tile, std::uint32_t row, std::uint32_t chunk) {
  const std::uint32_t linear = tile + row * kRowBytes + chunk * kChunk;
  return shared_at(block, linear ^ (linear >> 7 & 7) << 4, kChunk, "TMA");
}

void check_tile(std::uint32_t tile) {
  if (tile % 1024 != 0) fail("TMA with a tile that is not 1024-byte aligned");
}

void load(Block& block, std::uint32_t target, const Box& box) {
  for (std::uint32_t row = 0; row < rows_of(box.map); ++row) {
    const BoxRow from(box, row);
    unsigned char bytes[kRowBytes] = {};
    std::memcpy(bytes, from.data, from.bytes);
    for (std::uint32_t c = 0; c < kRowBytes / kChunk; ++c)
      std::memcpy(chunk_at(block, target, row, c), bytes + c * kChunk, kChunk);
  }
}

template <class T>
void add(unsigned char* to, const unsigned char* from, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; i += sizeof(T)) {
    T a, b;
    std::memcpy(static_cast<void*>(&a), to + i, sizeof a);
    std::memcpy(static_cast<void*>(&b), from + i, sizeof b);
    a = T(static_cast<float>(a) + static_cast<float>(b));
    std::memcpy(to + i, static_cast<const void*>(&a), sizeof a);
  }
}

void read(Block& block, Store& s) {
  s.read.resize(rows_of(s.box.map) * kRowBytes);
  for (std::uint32_t row = 0; row < rows_of(s.box.map); ++row)
    for (std::uint32_t c = 0; c < kRowBytes / kChunk; ++c)
      std::memcpy(&s.read[row * kRowBytes + c * kChunk], chunk_at(block, s.source, row, c), kChunk);
}

void write(const Store& s) {
  for (std::uint32_t row = 0; row < rows_of(s.box.map); ++row) {
    const BoxRow to(s.box, row);
    const unsigned char* const from = &s.read[row * kRowBytes];
    if (!s.add) std::memcpy(to.data, from, to.bytes);
    else if (s.box.map.type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32) add<float>(to.data, from, to.bytes);
    else if (s.box.map.type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16) add<__half>(to.data, from, to.bytes);
    else add<__nv_bfloat16>(to.data, from, to.bytes);
  }
}

void check_fenced(Block& block, std::uint32_t source, std::uint32_t bytes) {
  for (std::uint32_t at = source; at < source + bytes; at += kChunk) {
    shared_at(block, at, kChunk, "a TMA store");
    if (block.unfenced[(at - kSharedBase) / kChunk] != nullptr) fail("TMA reads what a thread wrote without fencing it");
  }
}

}  // namespace

CUresult encode_tiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data, const cuuint64_t* dims,
                      const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* steps,
                      CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                      CUtensorMapFloatOOBfill fill) {
  const bool is_float = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  const bool known = is_float || type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 || type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const std::uint32_t size = is_float ? 4 : 2;
  bool right = known && rank == 4 && interleave == CU_TENSOR_MAP_INTERLEAVE_NONE && swizzle == CU_TENSOR_MAP_SWIZZLE_128B &&
               fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE && reinterpret_cast<std::uintptr_t>(data) % 16 == 0 &&
               reinterpret_cast<std::uintptr_t>(map) % 64 == 0 && box[0] * size == kRowBytes;
  for (int d = 0; d < 4; ++d) {
    right &= dims[d] >= 1 && dims[d] <= std::uint64_t{1} << 32 && box[d] >= 1 && box[d] <= 256 && steps[d] == 1;
    right &= d == 3 || (strides[d] % 16 == 0 && strides[d] < std::uint64_t{1} << 40);
  }
  if (!right) return CUDA_ERROR_INVALID_VALUE;
  const TensorMap m{kMagic,
                    static_cast<unsigned char*>(data),
                    {dims[0], dims[1], dims[2], dims[3]},
                    {size, strides[0], strides[1], strides[2]},
                    {box[0], box[1], box[2], box[3]},
                    type};
  std::memcpy(map, &m, sizeof m);
  return CUDA_SUCCESS;
}

void check_map(const CUtensorMap& map) { decode(map); }

void load_box(std::uint32_t target, const CUtensorMap& map, std::uint32_t barrier, std::uint16_t mask, Coordinates at) {
  check_tile(target);
  const Box box{decode(map), at};
  for (Block& block : blocks_of_cluster()) {
    if ((mask >> block.rank & 1) == 0) continue;
    land(block, barrier, [&block, target, barrier, box] {
      load(block, target, box);
      barrier_complete(block, barrier, rows_of(box.map) * kRowBytes);
    });
  }
}

void store_box(const CUtensorMap& map, std::uint32_t source, bool add, Coordinates at) {
  check_tile(source);
  Fibre& f = self();
  Store s{{decode(map), at}, source, add, {}};
  check_fenced(*f.home, source, rows_of(s.box.map) * kRowBytes);
  if (reads == When::early) {
    read(*f.home, s);
    write(s);
  } else {
    f.store_groups.open.push_back(std::move(s));
  }
}

void commit_stores() { self().store_groups.commit(); }

void wait_stores_read(int pending) {
  Fibre& f = self();
  f.store_groups.wait(pending, [&](Store& s) {
    read(*f.home, s);
    f.read_stores.push_back(std::move(s));
  });
}

void wait_stores() {
  wait_stores_read(0);
  for (const Store& s : self().read_stores) write(s);
  self().read_stores.clear();
}

void finish_stores(Fibre& f) {
  if (!f.store_groups.empty()) fail("a thread ends while its stores may read shared memory");
  wait_stores();
}

void write_shared(std::uint32_t address, const void* from, std::size_t bytes) {
  Fibre& f = self();
  std::memcpy(shared_at(address, bytes, "a write"), from, bytes);
  const std::uint32_t chunk = (address - kSharedBase) / kChunk;
  f.home->unfenced[chunk] = &f;
  f.unfenced.push_back(chunk);
}

void fence_async_proxy() {
  Fibre& f = self();
  for (const std::uint32_t chunk : f.unfenced)
    if (f.home->unfenced[chunk] == &f) f.home->unfenced[chunk] = nullptr;
  f.unfenced.clear();
}

}  // namespace emulation
