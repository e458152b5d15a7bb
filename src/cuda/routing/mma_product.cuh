// The same C (m, n) = A (m, k) B (k, n) on the tensor cores (mma.sync m16n8k16), fp32 accumulation.
// An operand enters as a sum of `parts` 16-bit numbers: itself (parts 1), or, where the dtypes of the operands differ, bfloat16
// parts of 8 bits each: a float16 is two of them exactly, an fp32 is three, and two of it are enough for gradients (16 bits).
// Products of parts below the last bit that is kept are left out.
// A block makes 128 x 128 of C (128 x 64 for n <= 64) in steps of 32 along k; 8 warps of 32 x 64; 2 or 3 stages in shared
// memory. Operands in memory run along k ("k rows") or along m or n; pieces of 16 bytes come by cp.async where pointer and
// stride allow, as two float4 for fp32, else element by element, so that every size and stride is right.
#pragma once

#include "cuda/routing/mma.cuh"
#include "cuda/routing/product.cuh"

namespace intarsia::cuda {

constexpr int kTileM = 128, kTileK = 32, kMmaWarps = 8, kMmaThreads = kMmaWarps * kWarpSize;
constexpr int kPiece = 8;  // elements of 16 bits in 16 bytes

/// What a product is made of; a template argument. A type, because nvcc 13.0 cannot launch a kernel whose template argument is
/// a value of a class.
template <bool kARows, bool kBRows, int kPartsOfA, int kPartsOfB, int kColumns>
struct MmaConfig {
  static constexpr bool kAKRows = kARows, kBKRows = kBRows;  // memory runs along k
  static constexpr int kAParts = kPartsOfA, kBParts = kPartsOfB;
  static constexpr int kTileN = kColumns;

  static constexpr int kStages = kAParts + kBParts <= 3 ? 3 : 2;
  static constexpr int kABytes = kTileM * kTileK * 2, kBBytes = kTileN * kTileK * 2;  // of one part
  static constexpr int kStageBytes = kAParts * kABytes + kBParts * kBBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  static constexpr int kBlocksPerMultiprocessor = kAKRows && kBKRows && kAParts + kBParts == 2 ? 2 : 1;  // without spills
#else
  static constexpr int kBlocksPerMultiprocessor = 1;
#endif
};

enum class Pieces { copied, floats, elements };

/// One operand as rows along its contiguous axis.
struct Operand {
  const void* data;
  DType dtype;
  std::int64_t outer_step, inner_step, outer, inner;  // sizes of the axes; inner is the one that memory should run along
  Pieces pieces;
  bool k_inner;
  const std::int32_t* taking_part = nullptr;  // Product's, for the operand whose outer axis is k

  Operand(const AnyRows& v, std::int64_t rows, std::int64_t columns, bool k_rows, bool k_is_column, int parts)
      : data(v.data), dtype(v.dtype), k_inner(k_rows) {
    const bool inner_is_column = k_rows == k_is_column;
    outer_step = inner_is_column ? v.row_step : v.step;
    inner_step = inner_is_column ? v.step : v.row_step;
    outer = inner_is_column ? rows : columns;
    inner = inner_is_column ? columns : rows;
    const bool aligned = reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && (inner_step == 1 || inner == 1);
    pieces = Pieces::elements;
    if (parts == 1 && aligned && (outer_step % kPiece == 0 || outer == 1)) pieces = Pieces::copied;
    if (parts > 1 && dtype == DType::float32 && aligned && (outer_step % 4 == 0 || outer == 1) && inner % 4 == 0)
      pieces = Pieces::floats;
  }
};

/// Place of a piece of 8 elements in a tile: rows of 64 bytes (k rows) or of `size` elements, swizzled so that the eight rows
/// that ldmatrix reads at once lie in eight different groups of banks.
template <bool kKRows, int kSize>
__device__ __forceinline__ int piece_place(int row, int piece) {
  if constexpr (kKRows) return row * (kTileK * 2) + ((piece ^ (row >> 1 & 3)) << 4);
  else return row * (kSize * 2) + ((piece ^ (row & 7)) << 4);
}

/// A tile of an operand on its way: kSize along m or n, kTileK along k.
template <class T, bool kKRows, int kSize, int kParts>
struct TileLoader {
  static constexpr int kOuter = kKRows ? kSize : kTileK, kInnerPieces = (kKRows ? kTileK : kSize) / kPiece;
  static constexpr int kEach = kOuter * kInnerPieces / kMmaThreads;
  static constexpr int kPartBytes = kSize * kTileK * 2;
  static_assert(kOuter * kInnerPieces % kMmaThreads == 0);

  const Operand& from;
  std::int64_t mn0, k_end;
  float held[kParts > 1 ? kEach : 1][kPiece];  // on their way from memory to `store`, which splits them

  __device__ __forceinline__ TileLoader(const Operand& operand, std::int64_t first, std::int64_t end)
      : from(operand), mn0(first), k_end(end) {}

  /// Piece i of this thread: its row and piece in the tile, and its place in memory.
  struct Where {
    int row, piece;
    std::int64_t outer, inner;
  };
  __device__ __forceinline__ Where where(int i, std::int64_t k0) const {
    const int p = static_cast<int>(threadIdx.x) + i * kMmaThreads, row = p / kInnerPieces, piece = p % kInnerPieces;
    const std::int64_t outer = (kKRows ? mn0 : k0) + row, inner = (kKRows ? k0 : mn0) + piece * kPiece;
    return {row, piece, outer, inner};
  }
  /// Elements of a piece that exist: 0 to 8.
  __device__ __forceinline__ int valid(const Where& w) const {
    const std::int64_t outer_end = kKRows ? from.outer : k_end, inner_end = kKRows ? k_end : from.inner;
    if (w.outer >= outer_end) return 0;
    if (!kKRows && from.taking_part && from.taking_part[w.outer] < 0) return 0;
    return static_cast<int>(min(max(inner_end - w.inner, std::int64_t{0}), std::int64_t{kPiece}));
  }

  /// Before the products of a step: starts copies, or loads what `store` will split.
  __device__ __forceinline__ void fetch(unsigned char* tile, std::int64_t k0) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const Where w = where(i, k0);
      const int n = valid(w);
      if constexpr (kParts == 1) {
        unsigned char* const to = tile + piece_place<kKRows, kSize>(w.row, w.piece);
        if (from.pieces == Pieces::copied) {
          copy_async(to, static_cast<const T*>(from.data) + (n > 0 ? w.outer * from.outer_step + w.inner : 0), n * 2);
        } else {
          gather(w, n, held[0]);
          *reinterpret_cast<uint4*>(to) = take_part(held[0]);
        }
      } else if (from.pieces == Pieces::floats) {
        const auto* p =
            reinterpret_cast<const float4*>(static_cast<const float*>(from.data) + w.outer * from.outer_step + w.inner);
        const float4 low = n > 0 ? p[0] : float4{0, 0, 0, 0}, high = n > 4 ? p[1] : float4{0, 0, 0, 0};
        const float all[kPiece] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        for (int j = 0; j < kPiece; ++j) held[i][j] = all[j];
      } else {
        gather(w, n, held[i]);
      }
    }
  }

  /// After the products of a step: writes what fetch has left, in parts.
  __device__ __forceinline__ void store(unsigned char* tile, std::int64_t k0) {
    if constexpr (kParts > 1) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const Where w = where(i, k0);
#pragma unroll
        for (int part = 0; part < kParts; ++part)
          *reinterpret_cast<uint4*>(tile + part * kPartBytes + piece_place<kKRows, kSize>(w.row, w.piece)) = take_part(held[i]);
      }
    }
  }

 private:
  /// A piece, element by element: any dtype, any strides.
  __device__ __forceinline__ void gather(const Where& w, int n, float (&value)[kPiece]) const {
    for (int j = 0; j < kPiece; ++j)
      value[j] =
          j < n ? load_any<float>(from.data, from.dtype, w.outer * from.outer_step + (w.inner + j) * from.inner_step) : 0.0f;
  }
  /// The values rounded to T; what that leaves of them stays for the next part.
  __device__ __forceinline__ uint4 take_part(float (&value)[kPiece]) const {
    union Packed {
      uint4 bits;
      T element[kPiece];
      __device__ Packed() {}
    } packed;
    for (int j = 0; j < kPiece; ++j) {
      packed.element[j] = narrow<T>(value[j]);
      value[j] -= widen(packed.element[j]);
    }
    return packed.bits;
  }
};

/// Rows mn .. mn + 15 and k .. k + 15 of a tile as the A operand of an mma.
template <bool kKRows, int kSize>
__device__ __forceinline__ void load_a(std::uint32_t (&r)[4], const unsigned char* tile, int mn, int k) {
  const int l = lane_index();
  if constexpr (kKRows) load_matrices(r, tile + piece_place<true, kSize>(mn + l % 16, k / 8 + l / 16));
  else load_matrices_transposed(r, tile + piece_place<false, kSize>(k + l / 16 * 8 + l % 8, (mn + l / 8 % 2 * 8) / 8));
}

/// Columns mn .. mn + 15 as two B operands: (r[0], r[1]) and (r[2], r[3]).
template <bool kKRows, int kSize>
__device__ __forceinline__ void load_b(std::uint32_t (&r)[4], const unsigned char* tile, int mn, int k) {
  const int l = lane_index();
  if constexpr (kKRows) load_matrices(r, tile + piece_place<true, kSize>(mn + l / 16 * 8 + l % 8, k / 8 + l / 8 % 2));
  else load_matrices_transposed(r, tile + piece_place<false, kSize>(k + l / 8 % 2 * 8 + l % 8, (mn + l / 16 * 8) / 8));
}

constexpr int kWarpM = 32;

/// One step along k of a warp: 32 x tile_n / 2 of C.
template <class T, class Config>
__device__ __forceinline__ void multiply_stage(const unsigned char* stage, float (&sum)[2][Config::kTileN / 16][4]) {
  constexpr int kWarpN = Config::kTileN / 2;
  const int m = warp_index() / 2 * kWarpM, n = warp_index() % 2 * kWarpN;
  const unsigned char* const b_tiles = stage + Config::kAParts * Config::kABytes;
#pragma unroll
  for (int k = 0; k < kTileK; k += 16) {
#pragma unroll
    for (int pa = 0; pa < Config::kAParts; ++pa) {
      std::uint32_t a[2][4];
      for (int i = 0; i < 2; ++i) load_a<Config::kAKRows, kTileM>(a[i], stage + pa * Config::kABytes, m + i * 16, k);
#pragma unroll
      for (int pb = 0; pb < Config::kBParts; ++pb) {
        if (pa + pb >= (Config::kAParts > Config::kBParts ? Config::kAParts : Config::kBParts))
          continue;  // below the last bit kept
#pragma unroll
        for (int j = 0; j < kWarpN / 16; ++j) {
          std::uint32_t b[4];
          load_b<Config::kBKRows, Config::kTileN>(b, b_tiles + pb * Config::kBBytes, n + j * 16, k);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            multiply_add(sum[i][2 * j], a[i], b[0], b[1], T{});
            multiply_add(sum[i][2 * j + 1], a[i], b[2], b[3], T{});
          }
        }
      }
    }
  }
}

/// Grid (tiles of n, tiles of m, slices). The first part of A or B is T; further parts are what T left of it.
template <class T, class Config>
__global__ void __launch_bounds__(kMmaThreads, Config::kBlocksPerMultiprocessor)
    mma_product_kernel(const __grid_constant__ Product p, const __grid_constant__ Operand a,
                       const __grid_constant__ Operand b) {
  constexpr int kStages = Config::kStages, kWarpN = Config::kTileN / 2;
  unsigned char* const shared = dynamic_shared();
  const std::int64_t n0 = std::int64_t{blockIdx.x} * Config::kTileN, k_first = blockIdx.z * p.slice;
  const std::int64_t k_end = min(k_first + p.slice, static_cast<std::int64_t>(p.k));
  const int steps = static_cast<int>((k_end - k_first + kTileK - 1) / kTileK);

  for (std::int64_t m0 = std::int64_t{blockIdx.y} * kTileM; m0 < p.m; m0 += std::int64_t{gridDim.y} * kTileM) {
    TileLoader<T, Config::kAKRows, kTileM, Config::kAParts> load_left(a, m0, k_end);
    TileLoader<T, Config::kBKRows, Config::kTileN, Config::kBParts> load_right(b, n0, k_end);
    float sum[2][kWarpN / 8][4] = {};
    const auto stage = [&](int step) { return shared + step % kStages * Config::kStageBytes; };
    const auto k_of = [&](int step) { return k_first + std::int64_t{step} * kTileK; };
    const auto fetch = [&](int step) {
      if (step < steps) {
        load_left.fetch(stage(step), k_of(step));
        load_right.fetch(stage(step) + Config::kAParts * Config::kABytes, k_of(step));
      }
      commit_copies();  // a group for every step, so that counts of pending groups hold at the end too
    };
    const auto store = [&](int step) {
      if (step >= steps) return;
      load_left.store(stage(step), k_of(step));
      load_right.store(stage(step) + Config::kAParts * Config::kABytes, k_of(step));
    };

    __syncthreads();  // the former tile has been read
    for (int step = 0; step < kStages - 1; ++step) fetch(step), store(step);
    for (int step = 0; step < steps; ++step) {
      wait_copies<kStages - 2>();
      __syncthreads();  // this step has arrived; the stage that is fetched into now was read in the step before
      fetch(step + kStages - 1);
      multiply_stage<T, Config>(stage(step), sum);
      store(step + kStages - 1);
    }

    const int row = warp_index() / 2 * kWarpM + lane_index() / 4, column = warp_index() % 2 * kWarpN + lane_index() % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < kWarpN / 8; ++j)
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const std::int64_t m = m0 + row + i * 16 + r / 2 * 8, n = n0 + column + j * 8 + r % 2;
          if (m < p.m && n < p.n) p.store(sum[i][j][r], m, n);
        }
  }
}

// ---- launchers

inline std::int64_t mma_tiles(const Product& p) { return ceil_div(p.m, kTileM) * ceil_div(p.n, 128); }

template <class T, class Config>
void launch_mma(const char* name, const Product& p, cudaStream_t stream) {
  const Operand a(p.a, p.m, p.k, Config::kAKRows, true, Config::kAParts);
  Operand b(p.b, p.k, p.n, Config::kBKRows, false, Config::kBParts);
  b.taking_part = p.taking_part;
  const dim3 grid(blocks(p.n, Config::kTileN), std::min(blocks(p.m, kTileM), kMaxGridY), static_cast<unsigned>(p.slices));
  launch(name, mma_product_kernel<T, Config>, grid, kMmaThreads, stream, Config::kSharedBytes, p, a, b);
  launch_sum<float>(name, p, stream);
}

}  // namespace intarsia::cuda
