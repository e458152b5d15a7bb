// The scalar that the activations of base/activation.h see in GPU epilogues: float with the special-function unit's exp2 and
// reciprocal (relative error about 2^-22, far below the rounding of what is stored) and no slow paths for denormals.
#pragma once

#include "base/activation.h"

namespace intarsia::cuda {

struct FastFloat {
  float v;

  FastFloat() = default;
  __device__ constexpr FastFloat(float value) : v(value) {}
  __device__ constexpr explicit FastFloat(double value) : v(static_cast<float>(value)) {}
  __device__ constexpr explicit FastFloat(int value) : v(static_cast<float>(value)) {}

  friend __device__ FastFloat operator+(FastFloat a, FastFloat b) { return a.v + b.v; }
  friend __device__ FastFloat operator-(FastFloat a, FastFloat b) { return a.v - b.v; }
  friend __device__ FastFloat operator-(FastFloat a) { return -a.v; }
  friend __device__ FastFloat operator*(FastFloat a, FastFloat b) { return a.v * b.v; }
  friend __device__ FastFloat operator/(FastFloat a, FastFloat b) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(b.v));
    return a.v * r;
  }
  friend __device__ bool operator<(FastFloat a, FastFloat b) { return a.v < b.v; }
  friend __device__ bool operator>(FastFloat a, FastFloat b) { return a.v > b.v; }

  friend __device__ FastFloat exp(FastFloat x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x.v * 1.4426950408889634f));
    return r;
  }
  /// Abramowitz and Stegun 7.1.26: absolute error below 1.5e-7, and no branch, which would serialise wgmma around it.
  friend __device__ FastFloat erfc(FastFloat x) {
    const FastFloat a = fabsf(x.v), t = FastFloat(1.0f) / (FastFloat(1.0f) + FastFloat(0.3275911f) * a);
    const FastFloat p =
        t * (FastFloat(0.254829592f) +
             t * (FastFloat(-0.284496736f) +
                  t * (FastFloat(1.421413741f) + t * (FastFloat(-1.453152027f) + t * FastFloat(1.061405429f)))));
    const FastFloat y = p * exp(-(a * a));
    return x.v < 0.0f ? FastFloat(2.0f) - y : y;
  }
  friend __device__ FastFloat
  tanh(FastFloat x) {  // 1 - 2 / (1 + e^2x): accurate in absolute terms, which is what gelu_tanh needs
    return FastFloat(1.0f) - FastFloat(2.0f) / (FastFloat(1.0f) + exp(x + x));
  }
};

/// The activation chosen at run time, for kernels that are not worth one instance each. `Activation` must be of the right kind.
struct AnyGated {
  static constexpr bool kGated = true;
  Activation kind;

  template <class S>
  __device__ S value(S g, S u) const {
    switch (kind) {
      case Activation::geglu: return Geglu::value(g, u);
      case Activation::geglu_tanh: return GegluTanh::value(g, u);
      case Activation::reglu: return Reglu::value(g, u);
      case Activation::clamped_swiglu: return ClampedSwiglu::value(g, u);
      default: return Swiglu::value(g, u);
    }
  }
  template <class S>
  __device__ void gradient(S g, S u, S da, S& dg, S& du) const {
    switch (kind) {
      case Activation::geglu: return Geglu::gradient(g, u, da, dg, du);
      case Activation::geglu_tanh: return GegluTanh::gradient(g, u, da, dg, du);
      case Activation::reglu: return Reglu::gradient(g, u, da, dg, du);
      case Activation::clamped_swiglu: return ClampedSwiglu::gradient(g, u, da, dg, du);
      default: return Swiglu::gradient(g, u, da, dg, du);
    }
  }
};

struct AnyPlain {
  static constexpr bool kGated = false;
  Activation kind;

  template <class S>
  __device__ S value(S x) const {
    switch (kind) {
      case Activation::gelu: return Gelu::value(x);
      case Activation::gelu_tanh: return GeluTanh::value(x);
      case Activation::relu: return Relu::value(x);
      case Activation::relu2: return Relu2::value(x);
      default: return Silu::value(x);
    }
  }
  template <class S>
  __device__ S gradient(S x, S da) const {
    switch (kind) {
      case Activation::gelu: return Gelu::gradient(x, da);
      case Activation::gelu_tanh: return GeluTanh::gradient(x, da);
      case Activation::relu: return Relu::gradient(x, da);
      case Activation::relu2: return Relu2::gradient(x, da);
      default: return Silu::gradient(x, da);
    }
  }
};

}  // namespace intarsia::cuda
