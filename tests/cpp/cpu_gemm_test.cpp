// The CPU backend's product at every kind of strides, and the functions that its activations vectorise with.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "base/activation.h"
#include "base/half.h"
#include "cpu/activation_rows.h"
#include "cpu/cpu.h"
#include "cpu/gemm.h"
#include "cpu/row_io.h"
#include "cpu/vector_float.h"

namespace intarsia::cpu {
namespace {

std::mt19937& generator() {
  static std::mt19937 random(std::random_device{}());
  return random;
}

float normal() { return std::normal_distribution<float>()(generator()); }

/// Strides of a (rows, columns) matrix in memory of any kind: rows, columns, with gaps, doubled, expanded, backwards.
std::vector<Matrix> layouts(std::int64_t rows, std::int64_t columns) {
  return {{nullptr, columns, 1},  {nullptr, 1, rows}, {nullptr, 2 * columns + 3, 1}, {nullptr, 2 * columns, 2},
          {nullptr, 2, 2 * rows}, {nullptr, 0, 1},    {nullptr, -columns, 1}};
}

template <class T>
void check_gemm(DType dtype, std::int64_t m, std::int64_t n, std::int64_t k) {
  std::vector<T> memory(8 * (m * k + k * n) + 64);
  for (T& value : memory) value = T(normal());
  const std::vector<Matrix> all_a = layouts(m, k), all_b = layouts(k, n);
  for (std::size_t i = 0; i < all_a.size(); ++i) {
    Matrix a = all_a[i], b = all_b[(3 * i + 1) % all_b.size()];
    a.data = memory.data() + (a.row_step < 0 ? (m - 1) * k : 1);  // not aligned
    b.data = memory.data() + 3 * m * k + (b.row_step < 0 ? (k - 1) * n : 1);
    for (const bool accumulate : {false, true}) {
      const std::int64_t step = n + 3;
      std::vector<float> c(m * step), before;
      for (float& value : c) value = accumulate ? normal() : NAN;
      before = c;
      std::vector<std::byte> scratch(kGemmScratchBytes, std::byte{0xff});
      gemm(dtype, m, n, k, a, b, c.data(), step, accumulate, scratch.data());
      for (std::int64_t row = 0; row < m; ++row) {
        for (std::int64_t column = 0; column < n; ++column) {
          double sum = accumulate ? before[row * step + column] : 0, terms = std::abs(sum);
          for (std::int64_t p = 0; p < k; ++p) {
            const double term = double{static_cast<const T*>(a.data)[row * a.row_step + p * a.column_step]} *
                                double{static_cast<const T*>(b.data)[p * b.row_step + column * b.column_step]};
            sum += term;
            terms += std::abs(term);
          }
          ASSERT_LE(std::abs(c[row * step + column] - sum), 1e-6 * terms)
              << to_string(dtype) << " layout " << i << " at " << row << ", " << column << " of " << m << " " << n << " " << k;
        }
        const auto bytes = static_cast<std::size_t>(step - n) * sizeof(float);
        ASSERT_EQ(std::memcmp(&c[row * step + n], &before[row * step + n], bytes), 0) << "wrote beyond a row";
      }
    }
  }
}

TEST(CpuGemm, EveryLayout) {
  const std::int64_t sizes[][3] = {{1, 1, 1}, {16, 33, 7}, {3, 70, 130}, {130, 40, 517}, {17, 331, 33}};
  for (const auto& [m, n, k] : sizes) {
    check_gemm<float>(DType::float32, m, n, k);
    check_gemm<bfloat16>(DType::bfloat16, m, n, k);
    check_gemm<float16>(DType::float16, m, n, k);
  }
}

TEST(CpuGemm, SaysHowItComputes) {
  for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16}) {
    const std::string text = describe_gemm(dtype);
    EXPECT_TRUE(text.find("oneDNN") != std::string::npos || text.find("plain blocked loops") != std::string::npos) << text;
  }
}

TEST(CpuVectorFloat, ExpAndErfc) {
  const auto exp_of = [](double x) { return exp(VectorFloat(x)).value; };
  for (double x = -87; x < 88.7; x += 0.00371) ASSERT_NEAR(exp_of(x) / std::exp(double{static_cast<float>(x)}), 1, 1.5e-7) << x;
  EXPECT_EQ(exp_of(-INFINITY), 0);
  EXPECT_EQ(exp_of(INFINITY), INFINITY);
  EXPECT_EQ(exp_of(89.5), INFINITY);
  EXPECT_GT(exp_of(-100), 0);  // subnormal
  EXPECT_TRUE(std::isnan(exp_of(NAN)));
  for (double x = -6; x < 9; x += 0.00171)
    ASSERT_NEAR(erfc(VectorFloat(x)).value / std::erfc(double{static_cast<float>(x)}), 1, 1e-5) << x;
  EXPECT_TRUE(std::isnan(erfc(VectorFloat(NAN)).value));
}

TEST(CpuActivationRows, AgreeWithDouble) {
  for (int i = 0; i <= static_cast<int>(Activation::relu2); ++i) {
    const auto activation = static_cast<Activation>(i);
    for (const std::int64_t n : {1, 7, 16, 100}) {
      std::vector<float> gate(n), up(n), da(n), value(n), a(n), dgate(n), dup(n);
      for (std::int64_t j = 0; j < n; ++j) gate[j] = 3 * normal(), up[j] = 3 * normal(), da[j] = normal();
      activate(activation, gate.data(), up.data(), n, value.data());
      activate_backward(activation, gate.data(), up.data(), 0.5f, da.data(), n, a.data(), dgate.data(), dup.data());
      dispatch_activation(activation, [&](auto act) {
        for (std::int64_t j = 0; j < n; ++j) {
          const double g = gate[j], u = up[j], d = 0.5 * da[j];
          double expected, dg, du = 0;
          if constexpr (act.kGated) {
            expected = act.value(g, u);
            act.gradient(g, u, d, dg, du);
          } else {
            expected = act.value(g);
            dg = act.gradient(g, d);
          }
          const auto near = [&](double got, double want) {
            ASSERT_NEAR(got, want, 3e-5 * (1 + std::abs(want))) << to_string(activation) << " at " << g << ", " << u;
          };
          near(value[j], expected);
          near(a[j], expected);
          near(dgate[j], dg);
          if (act.kGated) near(dup[j], du);
        }
      });
    }
  }
}

TEST(CpuActivationRows, Dot) {
  for (const std::int64_t n : {0, 1, 31, 32, 33, 1000}) {
    std::vector<float> x(n), y(n);
    double sum = 0, terms = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      x[i] = normal(), y[i] = normal();
      sum += double{x[i]} * y[i];
      terms += std::abs(double{x[i]} * y[i]);
    }
    EXPECT_NEAR(dot(x.data(), y.data(), n), sum, 1e-6 * terms) << n;
  }
}

}  // namespace
}  // namespace intarsia::cpu
