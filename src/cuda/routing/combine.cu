// combine: y[t] = addend[t] + sum over the rows r of token t of s * rows[r], in fp32, in ascending slot order, rounded once.
// rows (R, H), y (T, H), addend (T, H) of any strides, maybe y itself; the rows of a token come from slot_row (T, K) with
// scores (T, K), or from token_offsets (T+1), token_rows (R) with scores (R). A row id outside [0, R) is no row. A thread owns
// vectors of 16 bytes (8 columns in 16 bits) of a token and keeps 16 of them in flight: two of each of eight rows, or more of
// each where K is small; vectors of 4 bytes or of one element where pointers, strides or H do not allow 16 bytes. No workspace,
// one launch; any K, T and H. Bytes moved: rows once, addend and y once, the lists once: bound by memory. Verify: intarsia-ops
// verify combine
#include "cuda/routing/vector.cuh"

namespace intarsia::cuda {
namespace {

template <class T>
struct Arguments {
  using S = Wide<T>;
  const T* rows;
  std::int64_t row_step, row_count;
  const std::int32_t *slot_row, *token_offsets, *token_rows;
  std::int64_t list_size;  // of token_rows
  int k_count;
  const S* scores;
  const T* addend;
  std::int64_t addend_row_step, addend_step;
  T* y;
  std::int64_t y_row_step, tokens;
  int hidden;

  explicit Arguments(const Combine& op)
      : rows(op.rows.as<const T>()),
        row_step(op.rows.step(0)),
        row_count(op.rows.size(0)),
        slot_row(op.slot_row.defined() ? op.slot_row.as<const std::int32_t>() : nullptr),
        token_offsets(op.token_offsets.defined() ? op.token_offsets.as<const std::int32_t>() : nullptr),
        token_rows(op.token_rows.defined() ? op.token_rows.as<const std::int32_t>() : nullptr),
        list_size(op.token_rows.defined() ? op.token_rows.size(0) : 0),
        k_count(op.slot_row.defined() ? static_cast<int>(op.slot_row.size(1)) : 0),
        scores(op.scores.defined() ? op.scores.as<const S>() : nullptr),
        addend(op.addend.defined() ? op.addend.as<const T>() : nullptr),
        addend_row_step(op.addend.defined() ? op.addend.step(0) : 0),
        addend_step(op.addend.defined() ? op.addend.step(1) : 0),
        y(op.y.as<T>()),
        y_row_step(op.y.step(0)),
        tokens(op.y.size(0)),
        hidden(static_cast<int>(op.y.size(1))) {}
};

/// Columns that a thread may own: as many as every pointer and stride allow.
template <class T>
int vector_width(const Arguments<T>& a) {
  const bool plain_addend = !a.addend || a.addend_step == 1 || a.hidden == 1;
  return widest_vector<T>(a.hidden,
                          {{a.rows, a.row_step}, {a.y, a.y_row_step}, {plain_addend ? a.addend : nullptr, a.addend_row_step}});
}

// ---- kernels

constexpr int kCombineThreads = 128;

/// The rows of a token: places in `list`, and what a place's score is read by.
template <class T>
struct TokenRows {
  const std::int32_t* list;
  std::int64_t count;
  const Wide<T>* scores;  // by place when `by_place`, else by row
  bool by_place;

  __device__ TokenRows(const Arguments<T>& a, std::int64_t t) : scores(a.scores), by_place(a.slot_row != nullptr) {
    if (by_place) {
      list = a.slot_row + t * a.k_count;
      count = a.k_count;
      if (scores) scores += t * a.k_count;
    } else {
      const std::int64_t first = min(max(std::int64_t{a.token_offsets[t]}, std::int64_t{0}), a.list_size);
      list = a.token_rows + first;
      count = min(max(std::int64_t{a.token_offsets[t + 1]}, first), a.list_size) - first;
    }
  }
};

/// A thread owns kVectors vectors of a token, `chunks` vectors apart: neighbouring threads read neighbouring memory. It loads
/// kRows rows at a time.
template <class T, int kWidth, int kRows, int kVectors>
__global__ void __launch_bounds__(kCombineThreads) combine_kernel(const __grid_constant__ Arguments<T> a, unsigned chunks) {
  using S = Wide<T>;
  // token = thread / chunks, where thread = blockIdx * threads + threadIdx may need more than 32 bits but its parts do not
  const unsigned thread = blockIdx.x % chunks * kCombineThreads + threadIdx.x;
  const std::int64_t t = std::int64_t{blockIdx.x / chunks} * kCombineThreads + thread / chunks;
  const std::int64_t column = std::int64_t{thread % chunks} * kWidth, apart = std::int64_t{chunks} * kWidth;
  if (t >= a.tokens) return;

  S sum[kVectors][kWidth];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const T* const addend = a.addend + t * a.addend_row_step + (column + v * apart) * a.addend_step;
    if (a.addend && a.addend_step == 1) {  // addend may be y itself: it is read here, by the thread that overwrites it
      Vector<T, kWidth> vector;
      vector.load(addend);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sum[v][i] = vector[i];
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sum[v][i] = a.addend ? widen(addend[i * a.addend_step]) : S(0);
    }
  }

  const TokenRows<T> rows(a, t);
  for (std::int64_t k = 0; k < rows.count; k += kRows) {
    int r[kRows];
    Vector<T, kWidth> row[kRows][kVectors];
    S score[kRows];
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      r[j] = k + j < rows.count ? rows.list[k + j] : -1;
      if (r[j] >= a.row_count) r[j] = -1;
    }
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      if (r[j] < 0) continue;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) row[j][v].load(a.rows + std::int64_t{r[j]} * a.row_step + column + v * apart);
      score[j] = rows.scores ? rows.scores[rows.by_place ? k + j : r[j]] : S(1);
    }
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      if (r[j] < 0) continue;
#pragma unroll
      for (int v = 0; v < kVectors; ++v)
#pragma unroll
        for (int i = 0; i < kWidth; ++i) sum[v][i] += score[j] * row[j][v][i];
    }
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    Vector<T, kWidth> y;
    for (int i = 0; i < kWidth; ++i) y.set(i, sum[v][i]);
    y.store(a.y + t * a.y_row_step + column + v * apart);
  }
}

// ---- launchers

template <class T, int kWidth, int kRows, int kVectors>
void launch_vectors(const Arguments<T>& a, cudaStream_t stream) {
  const auto chunks = static_cast<unsigned>(a.hidden / kWidth / kVectors);
  launch(Combine::kName, combine_kernel<T, kWidth, kRows, kVectors>, blocks(a.tokens * chunks, kCombineThreads),
         kCombineThreads, stream, 0, a, chunks);
}

template <class T, int kWidth>
void launch_width(const Arguments<T>& a, cudaStream_t stream) {
  const int vectors = a.hidden / kWidth, k = a.k_count;  // 0 where tokens have rows of different numbers
  if constexpr (kWidth * sizeof(T) == kVectorBytes) {
    if (k > 0 && k <= 2 && vectors % 8 == 0) return launch_vectors<T, kWidth, 2, 8>(a, stream);
    if (k > 0 && k <= 4 && vectors % 4 == 0) return launch_vectors<T, kWidth, 4, 4>(a, stream);
  }
  if constexpr (kWidth > 1)
    if (vectors % 2 == 0) return launch_vectors<T, kWidth, 8, 2>(a, stream);
  launch_vectors<T, kWidth, 8, 1>(a, stream);
}

template <class T>
void launch_combine(const Combine& op, cudaStream_t stream) {
  const Arguments<T> a(op);
  dispatch_vector_width<T>(vector_width(a), [&](auto width) { launch_width<T, decltype(width)::value>(a, stream); });
}

}  // namespace

std::size_t workspace_bytes(const Combine&) { return 0; }

std::string explain(const Combine& op) {
  return dispatch_device_float(op.rows.dtype, [&](auto tag) {
    const int width = vector_width(Arguments<typename decltype(tag)::type>(op));
    const std::string text = "cuda: gather and sum, " + std::to_string(width) + " columns a thread";
    const bool widest = width * static_cast<int>(size_of(op.rows.dtype)) == kVectorBytes;
    return widest ? text
                  : text + ": rows, addend and y are not all aligned to 16 bytes with H and strides that are multiples of it";
  });
}

void run(const Combine& op, const Execution& execution) {
  const DeviceGuard guard(op.y.device.index);
  dispatch_device_float(op.rows.dtype,
                        [&](auto tag) { launch_combine<typename decltype(tag)::type>(op, stream_of(execution.stream)); });
}

}  // namespace intarsia::cuda
