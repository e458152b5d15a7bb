// bias_backward: db_up[e] = grad_scale * sum dz;  db_down[e] = grad_scale * sum s * dy[row_token] (score_on = input: sum dy).
// dz (R, G*I) [gate, up], dy (T, H) or (R, H), db_up (E, G*I) in the order of gate_block, db_down (E, H).
// Experts without rows: zeros, or untouched when `accumulate`.
// Column sums in fp32, in an order that depends on the offsets alone: rows are cut into fixed slices, and a slice gives one
// partial sum for each expert it meets; the partial sums of an expert are then added slice by slice (BiasSlices).
// Two launches for each gradient. Reads dz or dy once: bound by memory. Workspace: (slices + E) rows of the widest gradient.
// Verify: intarsia-ops verify bias_backward
#include "base/rows.h"
#include "cuda/routing/vector.cuh"
#include "plan/blocking.h"

namespace intarsia::cuda {
namespace {

/// What a row adds: weight(r) * source[place(r)].
template <class T>
struct Source {
  using S = Wide<T>;
  const T* data;
  std::int64_t row_step, step, row_count;
  const std::int32_t *row_token, *row_slot;
  const S* scores;
  std::int64_t score_count;

  __device__ __forceinline__ std::int64_t place(std::int64_t r) const { return row_token ? row_token[r] : r; }
  __device__ __forceinline__ S weight(std::int64_t r) const {
    if (!scores) return S(1);
    const std::int64_t i = row_slot ? std::int64_t{row_slot[r]} : r;
    return i >= 0 && i < score_count ? scores[i] : S(0);
  }
};

/// The rows of an expert, whatever the offsets hold.
struct Offsets {
  const std::int32_t* data;
  int experts;
  std::int64_t rows;
  __device__ __forceinline__ std::int64_t operator[](int e) const {
    return min(max(std::int64_t{data[e]}, std::int64_t{0}), rows);
  }
  /// The first expert whose rows end after row r; `experts` when there is none.
  __device__ int expert_of(std::int64_t r) const {
    int low = 0, high = experts;
    while (low < high) {
      const int middle = (low + high) / 2;
      if ((*this)[middle + 1] > r) high = middle;
      else low = middle + 1;
    }
    return low;
  }
};

template <class S>
struct Gradient {
  AnyRows out;
  std::int64_t columns, gate_block;
  S scale;
  bool accumulate;

  /// Column j of [gate, up] on the caller's axis.
  __device__ __forceinline__ std::int64_t place(std::int64_t j) const {
    if (gate_block == 0) return j;
    const std::int64_t width = columns / 2, i = j % width;
    return i / gate_block * 2 * gate_block + i % gate_block + (j < width ? 0 : gate_block);
  }
};

// ---- kernels

constexpr int kBiasThreads = 128;
constexpr int kBiasRowsInFlight = 4;

/// Grid (slices, columns). partial is (slices + E, columns).
template <class T, int kWidth, class S = Wide<T>>
__global__ void __launch_bounds__(kBiasThreads) slice_kernel(const __grid_constant__ Source<T> source, Offsets offsets,
                                                             std::int64_t slice_size, std::int64_t columns, S* partial) {
  const std::int64_t slice = blockIdx.x;
  const std::int64_t column = (std::int64_t{blockIdx.y} * kBiasThreads + threadIdx.x) * kWidth;
  if (column >= columns) return;
  std::int64_t row = slice * slice_size;
  const std::int64_t end = min(row + slice_size, offsets.rows);
  for (int e = offsets.expert_of(row); e < offsets.experts && row < end; ++e) {
    row = max(row, offsets[e]);
    const std::int64_t last = min(offsets[e + 1], end);
    if (row >= last) continue;
    S sum[kWidth];
    for (int i = 0; i < kWidth; ++i) sum[i] = S(0);
    for (; row < last; row += kBiasRowsInFlight) {
      Vector<T, kWidth> v[kBiasRowsInFlight];
      bool here[kBiasRowsInFlight];
#pragma unroll
      for (int j = 0; j < kBiasRowsInFlight; ++j) {
        const std::int64_t from = row + j < last ? source.place(row + j) : -1;
        here[j] = from >= 0 && from < source.row_count;
        if (here[j]) v[j].load(source.data + from * source.row_step + column * source.step);
      }
#pragma unroll
      for (int j = 0; j < kBiasRowsInFlight; ++j) {
        if (!here[j]) continue;
        const S weight = source.weight(row + j);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) sum[i] += weight * v[j][i];
      }
    }
    row = last;
    for (int i = 0; i < kWidth; ++i) partial[(slice + e) * columns + column + i] = sum[i];
  }
}

/// Grid (columns, experts).
template <class S>
__global__ void __launch_bounds__(kBiasThreads)
    gradient_kernel(const S* partial, Offsets offsets, std::int64_t slice_size, const __grid_constant__ Gradient<S> gradient) {
  const std::int64_t j = std::int64_t{blockIdx.x} * kBiasThreads + threadIdx.x;
  if (j >= gradient.columns) return;
  for (int e = static_cast<int>(blockIdx.y); e < offsets.experts; e += static_cast<int>(gridDim.y)) {
    const std::int64_t first = offsets[e], last = offsets[e + 1], place = gradient.place(j);
    S sum = S(0);
    if (first < last) {
#pragma unroll 8
      for (std::int64_t slice = first / slice_size; slice <= (last - 1) / slice_size; ++slice)
        sum += partial[(slice + e) * gradient.columns + j];
      sum *= gradient.scale;
      if (gradient.accumulate) sum += gradient.out.template load<S>(e, place);
    } else if (gradient.accumulate) {
      continue;
    }
    gradient.out.store(sum, e, place);
  }
}

// ---- launchers

std::int64_t row_count(const BiasBackward& op) {
  return op.dz.defined() ? op.dz.size(0) : op.row_token.defined() ? op.row_token.size(0) : op.dy.size(0);
}

template <class T, class S = Wide<T>>
void launch_bias(const BiasBackward& op, const Source<T>& source, const TensorView& db, std::int64_t gate_block, S* partial,
                 cudaStream_t stream) {
  const BiasSlices slices(row_count(op));
  const std::int64_t columns = db.size(1);
  const int experts = static_cast<int>(op.expert_offsets.size(0) - 1);
  const Offsets offsets{op.expert_offsets.as<const std::int32_t>(), experts, slices.rows};
  const int width = source.step == 1 || columns == 1 ? widest_vector<T>(columns, {{source.data, source.row_step}}) : 1;
  dispatch_vector_width<T>(width, [&](auto w) {
    const dim3 grid(static_cast<unsigned>(slices.count), blocks(columns, kBiasThreads * w.value));
    launch(BiasBackward::kName, slice_kernel<T, w.value>, grid, kBiasThreads, stream, 0, source, offsets, slices.size, columns,
           partial);
  });
  const Gradient<S> gradient{db, columns, gate_block, static_cast<S>(op.grad_scale), op.accumulate};
  const dim3 grid(blocks(columns, kBiasThreads), static_cast<unsigned>(std::min(experts, 65535)));
  launch(BiasBackward::kName, gradient_kernel<S>, grid, kBiasThreads, stream, 0, static_cast<const S*>(partial), offsets,
         slices.size, gradient);
}

template <class T>
void launch_all(const BiasBackward& op, const Execution& execution) {
  using S = Wide<T>;
  auto* const partial = reinterpret_cast<S*>(execution.workspace);
  const cudaStream_t stream = stream_of(execution.stream);
  if (op.db_up.defined()) {
    const Source<T> dz{op.dz.as<const T>(), op.dz.step(0), op.dz.step(1), op.dz.size(0), nullptr, nullptr, nullptr, 0};
    launch_bias(op, dz, op.db_up, op.gate_block, partial, stream);
  }
  if (op.db_down.defined()) {
    const bool scored = op.scores.defined() && op.score_on != ScorePlacement::input;
    const Source<T> dy{op.dy.as<const T>(),
                       op.dy.step(0),
                       op.dy.step(1),
                       op.dy.size(0),
                       list(op.row_token),
                       scored && op.scores.rank == 2 ? list(op.row_slot) : nullptr,
                       scored ? op.scores.as<const S>() : nullptr,
                       scored ? op.scores.numel() : 0};
    launch_bias(op, dy, op.db_down, 0, partial, stream);
  }
}

DType dtype_of(const BiasBackward& op) { return op.dz.defined() ? op.dz.dtype : op.dy.dtype; }

}  // namespace

std::size_t workspace_bytes(const BiasBackward& op) {
  const std::int64_t columns =
      std::max(op.db_up.defined() ? op.db_up.size(1) : 0, op.db_down.defined() ? op.db_down.size(1) : 0);
  const std::int64_t places = BiasSlices(row_count(op)).sums(op.expert_offsets.size(0) - 1);
  return align_up(static_cast<std::size_t>(places * columns) * (dtype_of(op) == DType::float64 ? 8 : 4));
}

std::string explain(const BiasBackward& op) {
  return "cuda: column sums of " + std::to_string(BiasSlices(row_count(op)).count) +
         " slices of rows, then of each expert's slices";
}

void run(const BiasBackward& op, const Execution& execution) {
  const DeviceGuard guard(op.expert_offsets.device.index);
  dispatch_device_float(dtype_of(op), [&](auto tag) { launch_all<typename decltype(tag)::type>(op, execution); });
}

}  // namespace intarsia::cuda
