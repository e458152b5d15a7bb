// Activations: values against their definitions, gradients against central differences, float against double, extreme inputs.
#include "base/activation.h"

#include <gtest/gtest.h>

#include <numbers>
#include <vector>

namespace intarsia {
namespace {

constexpr double kSamples[] = {-30, -8.5, -7.2, -6.9, -3, -1.1, -0.3, -1e-3, 1e-3, 0.2, 0.9, 2.5, 6.8, 7.3, 11, 40};

double sigma(double x) { return 0.5 * (1 + std::tanh(x / 2)); }  // another formula than the code's
double silu(double x) { return x * sigma(x); }
double gelu(double x) { return 0.5 * x * (1 + std::erf(x / std::numbers::sqrt2)); }
double gelu_tanh(double x) { return 0.5 * x * (1 + std::tanh(std::sqrt(2 / std::numbers::pi) * (x + 0.044715 * x * x * x))); }
double relu(double x) { return std::max(x, 0.0); }

double plain(Activation a, double x) {
  switch (a) {
    case Activation::silu: return silu(x);
    case Activation::gelu: return gelu(x);
    case Activation::gelu_tanh: return gelu_tanh(x);
    case Activation::relu: return relu(x);
    default: return relu(x) * relu(x);
  }
}

double gated(Activation a, double g, double u) {
  switch (a) {
    case Activation::swiglu: return silu(g) * u;
    case Activation::geglu: return gelu(g) * u;
    case Activation::geglu_tanh: return gelu_tanh(g) * u;
    case Activation::reglu: return relu(g) * u;
    default: {
      const double gate = std::min(g, 7.0), up = std::clamp(u, -7.0, 7.0);
      return (up + 1) * gate * sigma(1.702 * gate);
    }
  }
}

/// visit(functor, name) for every activation.
template <class Visit>
void for_each_activation(Visit visit) {
  for (int i = 0; i <= static_cast<int>(Activation::relu2); ++i) {
    const auto a = static_cast<Activation>(i);
    SCOPED_TRACE(to_string(a));
    dispatch_activation(a, [&](auto act) { visit(act, a); });
  }
}

TEST(Activations, GatedAsDeclared) {
  for_each_activation([](auto act, Activation a) {
    EXPECT_EQ(act.kGated, is_gated(a));
    EXPECT_EQ(gate_factor(a), act.kGated ? 2 : 1);
  });
}

TEST(Activations, Values) {
  for_each_activation([](auto act, Activation a) {
    for (const double x : kSamples) {
      if constexpr (act.kGated) {
        for (const double u : kSamples)
          EXPECT_NEAR(act.value(x, u), gated(a, x, u), 1e-14 * (1 + std::abs(x * u))) << x << ' ' << u;
      } else {
        EXPECT_NEAR(act.value(x), plain(a, x), 1e-14 * (1 + x * x)) << x;
      }
    }
  });
}

TEST(Activations, GradientsAreCentralDifferences) {
  constexpr double h = 1e-5, da = 0.7;
  for_each_activation([](auto act, Activation) {
    for (const double x : kSamples) {
      if constexpr (act.kGated) {
        for (const double u : kSamples) {
          double dg = NAN, du = NAN;
          act.gradient(x, u, da, dg, du);
          EXPECT_NEAR(dg, da * (act.value(x + h, u) - act.value(x - h, u)) / (2 * h), 1e-7 * (1 + std::abs(u)))
              << x << ' ' << u;
          EXPECT_NEAR(du, da * (act.value(x, u + h) - act.value(x, u - h)) / (2 * h), 1e-7 * (1 + std::abs(x)))
              << x << ' ' << u;
        }
      } else {
        EXPECT_NEAR(act.gradient(x, da), da * (act.value(x + h) - act.value(x - h)) / (2 * h), 1e-7 * (1 + std::abs(x))) << x;
      }
    }
  });
}

TEST(Activations, FloatFollowsDouble) {
  for_each_activation([](auto act, Activation) {
    for (const double x : kSamples) {
      const auto xf = static_cast<float>(x);
      if constexpr (act.kGated) {
        EXPECT_NEAR(act.value(xf, 1.5f), act.value(static_cast<double>(xf), 1.5), 2e-6 * (1 + std::abs(x)));
        float dg, du;
        double dg_double, du_double;
        act.gradient(xf, 1.5f, 1.0f, dg, du);
        act.gradient(static_cast<double>(xf), 1.5, 1.0, dg_double, du_double);
        EXPECT_NEAR(dg, dg_double, 4e-6);
        EXPECT_NEAR(du, du_double, 2e-6 * (1 + std::abs(x)));
      } else {
        EXPECT_NEAR(act.value(xf), act.value(static_cast<double>(xf)), 2e-6 * (1 + x * x));
        EXPECT_NEAR(act.gradient(xf, 1.0f), act.gradient(static_cast<double>(xf), 1.0), 4e-6 * (1 + std::abs(x)));
      }
    }
  });
}

TEST(Activations, FarInputsStayFinite) {
  for_each_activation([](auto act, Activation) {
    for (const float x : {-1e4f, -104.0f, -88.8f, 88.8f, 1e4f}) {
      if constexpr (act.kGated) {
        float dg, du;
        act.gradient(x, 2.0f, 1.0f, dg, du);
        EXPECT_TRUE(std::isfinite(act.value(x, 2.0f)) && std::isfinite(dg) && std::isfinite(du)) << x;
      } else {
        EXPECT_TRUE(std::isfinite(act.value(x)) && std::isfinite(act.gradient(x, 1.0f))) << x;
      }
    }
  });
}

TEST(Activations, NaNIsNotHidden) {
  for_each_activation([](auto act, Activation) {
    if constexpr (act.kGated) EXPECT_TRUE(std::isnan(act.value(double{NAN}, 1.0)));
    else EXPECT_TRUE(std::isnan(act.value(double{NAN})));
  });
}

}  // namespace
}  // namespace intarsia
