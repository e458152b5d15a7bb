// The activations, one functor each, templated on the scalar; the same source runs on CPU and GPU and is tested in double.
// Gated: value(g, u) and gradient(g, u, da, dg, du). Plain: value(x) and gradient(x, da) -> dx.
// S is float, double, or a class with exp, erfc and tanh of its own beside it (src/cpu/vector_float.h).
#pragma once

#include <cmath>

#include "base/host_device.h"
#include "intarsia/config.h"
#include "intarsia/error.h"

namespace intarsia {

template <class S>
INTARSIA_HOST_DEVICE S sigmoid(S x) {
  using std::exp;
  return S(1) / (S(1) + exp(-x));  // exp overflows to inf for very negative x: 1 / inf = 0, as it should be
}

// ---- plain

struct Silu {
  static constexpr bool kGated = false;
  template <class S>
  INTARSIA_HOST_DEVICE static S value(S x) {
    return x * sigmoid(x);
  }
  template <class S>
  INTARSIA_HOST_DEVICE static S gradient(S x, S da) {
    const S s = sigmoid(x);
    return da * (s + x * s * (S(1) - s));
  }
};

struct Gelu {  // x * Phi(x)
  static constexpr bool kGated = false;
  template <class S>
  INTARSIA_HOST_DEVICE static S value(S x) {
    using std::erfc;
    return x * S(0.5) * erfc(-x * S(0.70710678118654752440));
  }
  template <class S>
  INTARSIA_HOST_DEVICE static S gradient(S x, S da) {
    using std::erfc, std::exp;
    const S cdf = S(0.5) * erfc(-x * S(0.70710678118654752440));
    return da * (cdf + x * exp(-S(0.5) * x * x) * S(0.39894228040143267794));
  }
};

struct GeluTanh {
  static constexpr bool kGated = false;
  template <class S>
  INTARSIA_HOST_DEVICE static S value(S x) {
    using std::tanh;
    return S(0.5) * x * (S(1) + tanh(S(0.79788456080286535588) * (x + S(0.044715) * x * x * x)));
  }
  template <class S>
  INTARSIA_HOST_DEVICE static S gradient(S x, S da) {
    using std::tanh;
    const S t = tanh(S(0.79788456080286535588) * (x + S(0.044715) * x * x * x));
    const S inner = S(0.79788456080286535588) * (S(1) + S(3) * S(0.044715) * x * x);
    return da * (S(0.5) * (S(1) + t) + S(0.5) * x * (S(1) - t * t) * inner);
  }
};

struct Relu {
  static constexpr bool kGated = false;
  template <class S>
  INTARSIA_HOST_DEVICE static S value(S x) {
    return x < S(0) ? S(0) : x;  // NaN stays NaN
  }
  template <class S>
  INTARSIA_HOST_DEVICE static S gradient(S x, S da) {
    return x > S(0) ? da : S(0);
  }
};

struct Relu2 {  // relu squared
  static constexpr bool kGated = false;
  template <class S>
  INTARSIA_HOST_DEVICE static S value(S x) {
    return x < S(0) ? S(0) : x * x;
  }
  template <class S>
  INTARSIA_HOST_DEVICE static S gradient(S x, S da) {
    return x > S(0) ? S(2) * x * da : S(0);
  }
};

// ---- gated

/// plain(gate) * up
template <class Plain>
struct GatedBy {
  static constexpr bool kGated = true;
  template <class S>
  INTARSIA_HOST_DEVICE static S value(S g, S u) {
    return Plain::value(g) * u;
  }
  template <class S>
  INTARSIA_HOST_DEVICE static void gradient(S g, S u, S da, S& dg, S& du) {
    dg = Plain::gradient(g, da * u);
    du = da * Plain::value(g);
  }
};

using Swiglu = GatedBy<Silu>;
using Geglu = GatedBy<Gelu>;
using GegluTanh = GatedBy<GeluTanh>;
using Reglu = GatedBy<Relu>;

struct ClampedSwiglu {  // gpt-oss
  static constexpr bool kGated = true;
  template <class S>
  INTARSIA_HOST_DEVICE static S value(S g, S u) {
    const S gc = g > S(7) ? S(7) : g;
    const S uc = u > S(7) ? S(7) : (u < S(-7) ? S(-7) : u);
    return (uc + S(1)) * gc * sigmoid(S(1.702) * gc);
  }
  template <class S>
  INTARSIA_HOST_DEVICE static void gradient(S g, S u, S da, S& dg, S& du) {
    const S gc = g > S(7) ? S(7) : g;
    const S uc = u > S(7) ? S(7) : (u < S(-7) ? S(-7) : u);
    const S s = sigmoid(S(1.702) * gc);
    dg = g > S(7) ? S(0) : da * (uc + S(1)) * (s + S(1.702) * gc * s * (S(1) - s));
    du = (u > S(7) || u < S(-7)) ? S(0) : da * gc * s;
  }
};

/// body(functor) for the activation chosen at run time.
template <class Body>
decltype(auto) dispatch_activation(Activation activation, Body&& body) {
  switch (activation) {
    case Activation::swiglu: return body(Swiglu{});
    case Activation::geglu: return body(Geglu{});
    case Activation::geglu_tanh: return body(GegluTanh{});
    case Activation::reglu: return body(Reglu{});
    case Activation::clamped_swiglu: return body(ClampedSwiglu{});
    case Activation::silu: return body(Silu{});
    case Activation::gelu: return body(Gelu{});
    case Activation::gelu_tanh: return body(GeluTanh{});
    case Activation::relu: return body(Relu{});
    case Activation::relu2: return body(Relu2{});
  }
  throw Unsupported("unknown activation");
}

}  // namespace intarsia
