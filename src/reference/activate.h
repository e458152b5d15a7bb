// The activation of one row, z = [gate, up] or [x].
#pragma once

#include "base/activation.h"
#include "reference/element.h"

namespace intarsia::reference {

/// act(z)
inline Vector activate(Activation activation, const Vector& z) {
  return dispatch_activation(activation, [&](auto act) {
    const std::size_t width = z.size() / (act.kGated ? 2 : 1);
    Vector a(width);
    for (std::size_t i = 0; i < width; ++i) {
      if constexpr (act.kGated) a[i] = act.value(z[i], z[width + i]);
      else a[i] = act.value(z[i]);
    }
    return a;
  });
}

/// act'(z) da
inline Vector activate_backward(Activation activation, const Vector& z, const Vector& da) {
  return dispatch_activation(activation, [&](auto act) {
    const std::size_t width = da.size();
    Vector dz(z.size());
    for (std::size_t i = 0; i < width; ++i) {
      if constexpr (act.kGated) act.gradient(z[i], z[width + i], da[i], dz[i], dz[width + i]);
      else dz[i] = act.gradient(z[i], da[i]);
    }
    return dz;
  });
}

}  // namespace intarsia::reference
