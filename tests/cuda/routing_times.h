// The large part of routing_check.cu: tensors past 2^31 elements, and the times of the routing kernels.
#pragma once

#include <algorithm>

#include "routing_harness.h"

namespace intarsia::check_routing {

/// A tensor on the device alone.
struct Large {
  DeviceBytes memory;
  TensorView view;
  Large(DType dtype, std::initializer_list<std::int64_t> shape)
      : memory(static_cast<std::size_t>(TensorView(nullptr, dtype, shape).numel()) * size_of(dtype)),
        view(memory.get(), dtype, shape, {DeviceType::cuda, 0}) {}
  std::byte* at(std::int64_t element) const { return memory.get() + static_cast<std::size_t>(element) * size_of(view.dtype); }
};

template <class T>
void upload(const Large& to, const std::vector<T>& from) {
  check(cudaMemcpy(to.memory.get(), from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
}

/// bf16 numbers that are not all alike, repeated over the tensor.
inline void fill_large(const Large& t, Random& random) {
  std::vector<bfloat16> block(static_cast<std::size_t>(std::min<std::int64_t>(t.view.numel(), 1 << 22)));
  for (auto& x : block) x = bfloat16(static_cast<float>(normal(random)));
  for (std::int64_t i = 0; i < t.view.numel(); i += static_cast<std::int64_t>(block.size()))
    check(
        cudaMemcpy(t.at(i), block.data(), std::min<std::size_t>(block.size(), static_cast<std::size_t>(t.view.numel() - i)) * 2,
                   cudaMemcpyHostToDevice),
        "cudaMemcpy");
}

/// combine and bias_backward where rows and y pass 2^31 elements; checked on samples.
inline void check_past_2_31(Random& random) {
  constexpr std::int64_t kTokens = 600000, kHidden = 4096;
  const Large rows(DType::bfloat16, {kTokens, kHidden}), y(DType::bfloat16, {kTokens, kHidden}),
      slot_row(DType::int32, {kTokens, 1});
  fill_large(rows, random);
  std::vector<std::int32_t> reversed(kTokens);
  for (std::int64_t t = 0; t < kTokens; ++t) reversed[static_cast<std::size_t>(t)] = static_cast<std::int32_t>(kTokens - 1 - t);
  upload(slot_row, reversed);
  y.memory.fill(0xff);
  run_on_device("combine past 2^31", Combine{.rows = rows.view, .slot_row = slot_row.view, .y = y.view}, 0xff);
  std::vector<bfloat16> got(kHidden), want(kHidden);
  for (const std::int64_t t :
       {std::int64_t{0}, std::int64_t{1}, std::int64_t{524287}, std::int64_t{524288}, kTokens - 1, below(random, kTokens)}) {
    ++checks;
    check(cudaMemcpy(got.data(), y.at(t * kHidden), kHidden * 2, cudaMemcpyDeviceToHost), "cudaMemcpy");
    check(cudaMemcpy(want.data(), rows.at((kTokens - 1 - t) * kHidden), kHidden * 2, cudaMemcpyDeviceToHost), "cudaMemcpy");
    if (std::memcmp(got.data(), want.data(), kHidden * 2) != 0) fail("combine past 2^31: row of token " + std::to_string(t));
  }
}

// ---- times

/// Median of 20 by events, in microseconds; the work must be warm.
template <class Work>
double median_us(const Work& work) {
  cudaStream_t stream;
  cudaEvent_t start, stop;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  check(cudaEventCreate(&start), "cudaEventCreate");
  check(cudaEventCreate(&stop), "cudaEventCreate");
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");  // uploads may still be on their way
  std::vector<float> times;
  for (int i = -3; i < 20; ++i) {
    work(stream);  // queued ahead, so that the measured one does not wait for the host
    check(cudaEventRecord(start, stream), "cudaEventRecord");
    work(stream);
    check(cudaEventRecord(stop, stream), "cudaEventRecord");
    check(cudaEventSynchronize(stop), "cudaEventSynchronize");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, start, stop), "cudaEventElapsedTime");
    if (i >= 0) times.push_back(ms * 1000);
  }
  check(cudaEventDestroy(start), "cudaEventDestroy");
  check(cudaEventDestroy(stop), "cudaEventDestroy");
  check(cudaStreamDestroy(stream), "cudaStreamDestroy");
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

/// An operation with its workspace.
template <class Op>
struct Prepared {
  Op op;
  DeviceBytes workspace;
  explicit Prepared(const Op& o) : op(o), workspace(cuda::workspace_bytes(o)) {}
  void operator()(cudaStream_t stream) const { cuda::run(op, Execution{stream, workspace.get(), 1}); }
};

inline void print_row(const std::string& what, double us, double bytes, double target_us) {
  std::printf("%-64s %9.1f us", what.c_str(), us);
  if (bytes > 0) std::printf("  %5.2f TB/s", bytes / us * 1e-6);
  if (target_us > 0) std::printf("  (target %.0f us: %s)", target_us, us <= target_us ? "met" : "missed");
  std::printf("\n");
  std::fflush(stdout);
}

inline void time_routing(Random& random, std::int64_t tokens, std::int64_t experts, std::int64_t k, double target_us) {
  const Large logits(DType::bfloat16, {tokens, experts}), ids(DType::int32, {tokens, k}), scores(DType::float32, {tokens, k}),
      nan(DType::int32, {1});
  fill_large(logits, random);
  nan.memory.fill(0);
  const Large offsets(DType::int32, {experts + 1}), row_token(DType::int32, {tokens * k}), row_slot(DType::int32, {tokens * k}),
      slot_row(DType::int32, {tokens, k});
  Route route{.logits = logits.view};
  route.scores_kind = RouterScores::softmax_renorm;
  route.ids = ids.view, route.scores = scores.view, route.nan_tokens = nan.view;
  const Prepared<Route> run_route(route);
  const Prepared<BuildIndex> run_index(BuildIndex{.ids = ids.view,
                                                  .expert_offsets = offsets.view,
                                                  .row_token = row_token.view,
                                                  .row_slot = row_slot.view,
                                                  .slot_row = slot_row.view});
  const std::string sizes = "T " + std::to_string(tokens) + " E " + std::to_string(experts) + " K " + std::to_string(k);
  print_row("route " + sizes, median_us(run_route), 0, 0);
  print_row("build_index " + sizes, median_us(run_index), 0, 0);
  print_row("route + build_index " + sizes, median_us([&](cudaStream_t s) { run_route(s), run_index(s); }), 0, target_us);

  const Large dscores(DType::float32, {tokens, k}), dlogits(DType::float32, {tokens, experts});
  dscores.memory.fill(0x3c);
  RouteBackward backward{.dscores = dscores.view, .scores = scores.view, .ids = ids.view};
  backward.scores_kind = RouterScores::softmax_renorm, backward.dlogits = dlogits.view;
  print_row("route_backward softmax_renorm " + sizes, median_us(Prepared<RouteBackward>(backward)), 0, 0);
  backward.scores_kind = RouterScores::softmax, backward.logits = logits.view;
  print_row("route_backward softmax " + sizes, median_us(Prepared<RouteBackward>(backward)), 0, 0);

  const Large loss(DType::float32, {1}), valid(DType::float32, {1}), fraction(DType::float32, {experts});
  print_row("load_balance_loss " + sizes,
            median_us(Prepared<LoadBalanceLoss>(LoadBalanceLoss{.logits = logits.view,
                                                                .ids = ids.view,
                                                                .loss = loss.view,
                                                                .expert_fraction = fraction.view,
                                                                .valid_tokens = valid.view})),
            0, 0);
  print_row("z_loss " + sizes,
            median_us(Prepared<ZLoss>(ZLoss{.logits = logits.view, .loss = loss.view, .valid_tokens = valid.view})), 0, 0);

  for (const Rounding rounding : {Rounding::nearest, Rounding::up, Rounding::balanced}) {
    const std::int64_t rows = std::min(tokens * k + experts * 127, tokens * experts);
    const Large token(DType::int32, {rows}), slot(DType::int32, {rows}), token_rows(DType::int32, {rows}),
        score(DType::float32, {rows}), token_offsets(DType::int32, {tokens + 1});
    RoundTokens round{.logits = logits.view, .experts_per_token = k, .rounding = rounding};
    round.expert_offsets = offsets.view, round.row_token = token.view, round.row_slot = slot.view;
    round.token_offsets = token_offsets.view, round.token_rows = token_rows.view, round.row_score = score.view;
    print_row("round_tokens " + std::string(to_string(rounding)) + " " + sizes, median_us(Prepared<RoundTokens>(round)), 0,
              experts == 128 ? 150 : 0);
  }
}

/// As the layer calls it: fp32 logits, softmax over all experts, with and without the logits in 16 bits.
inline void time_route(Random& random, std::int64_t tokens, std::int64_t experts, std::int64_t k) {
  const Large logits(DType::float32, {tokens, experts}), rounded(DType::bfloat16, {tokens, experts}),
      ids(DType::int32, {tokens, k}), scores(DType::float32, {tokens, k});
  std::vector<float> values(static_cast<std::size_t>(tokens * experts));
  for (float& x : values) x = static_cast<float>(normal(random));
  upload(logits, values);
  Route route{.logits = logits.view, .ids = ids.view, .scores = scores.view};
  const std::string sizes = "T " + std::to_string(tokens) + " E " + std::to_string(experts) + " K " + std::to_string(k);
  const double bytes = 4.0 * static_cast<double>(tokens * experts);
  print_row("route fp32 softmax " + sizes, median_us(Prepared<Route>(route)), bytes, 0);
  route.rounded_logits = rounded.view;
  print_row("route fp32 softmax, rounded_logits " + sizes, median_us(Prepared<Route>(route)), 1.5 * bytes, 0);

  const Large dscores(DType::float32, {tokens, k}), dlogits(DType::bfloat16, {tokens, experts});
  dscores.memory.fill(0x3c);
  RouteBackward backward{.dscores = dscores.view, .scores = scores.view, .ids = ids.view, .logits = rounded.view};
  backward.dlogits = dlogits.view;
  print_row("route_backward bf16 softmax " + sizes, median_us(Prepared<RouteBackward>(backward)), bytes, 0);
}

inline void time_combine(Random& random, std::int64_t tokens, std::int64_t k, std::int64_t hidden, bool scored, bool added) {
  const Large rows(DType::bfloat16, {tokens * k, hidden}), y(DType::bfloat16, {tokens, hidden}),
      scores(DType::float32, {tokens, k}), slot_row(DType::int32, {tokens, k}), addend(DType::bfloat16, {tokens, hidden});
  fill_large(rows, random);
  fill_large(addend, random);
  scores.memory.fill(0x3c);
  std::vector<std::int32_t> places(static_cast<std::size_t>(tokens * k));
  for (std::size_t i = 0; i < places.size(); ++i) places[i] = static_cast<std::int32_t>(i);
  std::shuffle(places.begin(), places.end(), random);
  upload(slot_row, places);
  Combine op{.rows = rows.view, .slot_row = slot_row.view};
  if (scored) op.scores = scores.view;
  if (added) op.addend = addend.view;
  op.y = y.view;
  const double bytes = 2.0 * static_cast<double>(tokens * hidden) * static_cast<double>(k + 1 + added);
  print_row("combine T " + std::to_string(tokens) + " K " + std::to_string(k) + " H " + std::to_string(hidden) +
                (scored ? " scored" : "") + (added ? " addend" : ""),
            median_us(Prepared<Combine>(op)), bytes, bytes / 4.1e6);
}

inline void time_products(Random& random, std::int64_t tokens, std::int64_t hidden, std::int64_t experts, DType wide) {
  const Large x(DType::bfloat16, {tokens, hidden}), w(DType::bfloat16, {experts, hidden}),
      dx(DType::bfloat16, {tokens, hidden}), dw(DType::bfloat16, {experts, hidden}), logits(wide, {tokens, experts});
  fill_large(x, random);
  fill_large(w, random);
  const std::string sizes = std::string(to_string(wide)) + " logits T " + std::to_string(tokens) + " H " +
                            std::to_string(hidden) + " E " + std::to_string(experts);
  const double flops = 2.0 * static_cast<double>(tokens) * static_cast<double>(hidden) * static_cast<double>(experts);
  const auto row = [&](const std::string& what, double us, double bytes) {
    print_row(what + " " + sizes, us, bytes, 0);
    std::printf("%64s %9.0f TFLOP/s\n", "", flops / us * 1e-6);
  };
  const double bytes = 2.0 * static_cast<double>(tokens * hidden);
  row("router_logits", median_us(Prepared<RouterLogits>(RouterLogits{.x = x.view, .w_router = w.view, .logits = logits.view})),
      bytes);
  row("router_logits_backward dx",
      median_us(Prepared<RouterLogitsBackward>(
          RouterLogitsBackward{.dlogits = logits.view, .x = x.view, .w_router = w.view, .dx = dx.view})),
      bytes);
  row("router_logits_backward dw",
      median_us(Prepared<RouterLogitsBackward>(
          RouterLogitsBackward{.dlogits = logits.view, .x = x.view, .w_router = w.view, .dw_router = dw.view})),
      bytes);
}

inline void time_bias(Random& random, std::int64_t rows, std::int64_t experts, std::int64_t columns) {
  const Large dz(DType::bfloat16, {rows, columns}), offsets(DType::int32, {experts + 1}),
      db(DType::float32, {experts, columns});
  fill_large(dz, random);
  std::vector<std::int32_t> starts;
  for (std::int64_t e = 0; e <= experts; ++e) starts.push_back(static_cast<std::int32_t>(rows * e / experts));
  upload(offsets, starts);
  BiasBackward op{.dz = dz.view, .expert_offsets = offsets.view};
  op.db_up = db.view;
  const double bytes = 2.0 * static_cast<double>(rows * columns);
  print_row("bias_backward R " + std::to_string(rows) + " E " + std::to_string(experts) + " 2I " + std::to_string(columns),
            median_us(Prepared<BiasBackward>(op)), bytes, 0);
}

inline void print_times(Random& random) {
  time_routing(random, 32768, 128, 8, 60);
  time_routing(random, 32768, 512, 10, 90);
  time_route(random, 65536, 8, 2);
  time_route(random, 32768, 64, 8);
  time_route(random, 32768, 128, 8);
  time_route(random, 32768, 256, 8);
  time_route(random, 32768, 512, 10);
  time_combine(random, 32768, 8, 4096, true, false);
  time_combine(random, 32768, 8, 4096, false, true);
  time_combine(random, 24576, 8, 1536, true, false);
  time_combine(random, 32768, 4, 2048, true, false);
  time_combine(random, 32768, 1, 4096, false, false);
  time_combine(random, 32768, 8, 2880, true, false);
  time_products(random, 40960, 768, 128, DType::float32);
  time_products(random, 32768, 4096, 128, DType::bfloat16);
  time_products(random, 32768, 4096, 128, DType::float32);
  time_products(random, 32768, 4096, 256, DType::float32);
  time_products(random, 32768, 2048, 512, DType::bfloat16);
  time_products(random, 32768, 2048, 512, DType::float32);
  time_bias(random, 262144, 128, 2048);
}

}  // namespace intarsia::check_routing
