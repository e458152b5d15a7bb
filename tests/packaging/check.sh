#!/usr/bin/env bash
# check.sh CHECK BUILD_DIRECTORY CXX CC: installs into a clean folder, then one of the checks below, all outside the source tree.
set -euo pipefail
check=$1 build=$2 cxx=$3 cc=$4
source=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
prefix=$work/prefix
cmake --install "$build" --prefix "$prefix" >"$work/install.log"
libdir=$(dirname "$(find "$prefix" -name 'libintarsia.so')")
export PKG_CONFIG_PATH=$libdir/pkgconfig
unset LD_LIBRARY_PATH

find_package() {
  cp -r "$source/examples/cpp" "$work/consumer"
  cmake -S "$work/consumer" -B "$work/consumer/build" -D CMAKE_PREFIX_PATH="$prefix" -D CMAKE_CXX_COMPILER="$cxx"
  cmake --build "$work/consumer/build"
  "$work/consumer/build/layer"
}

pkg_config() {
  # shellcheck disable=SC2046
  "$cxx" -std=c++20 -O1 "$source/examples/cpp/layer.cpp" $(pkg-config --cflags --libs intarsia) -Wl,-rpath,"$libdir" \
    -o "$work/layer"
  "$work/layer"
}

c_api() {
  # shellcheck disable=SC2046
  "$cc" -std=c11 -Wall -Wextra -Wpedantic -Werror "$source/tests/packaging/c_api_test.c" \
    $(pkg-config --cflags --libs intarsia) -lm -Wl,-rpath,"$libdir" -o "$work/c_api_test"
  "$work/c_api_test"
}

# Every symbol that a library defines for others is intarsia's own, and the SONAME carries the major version.
symbols() {
  local library defined foreign
  for library in "$libdir"/libintarsia*.so; do
    defined=$(nm --dynamic --defined-only --demangle "$library" | sed -E 's/^[0-9a-f]* +[A-Za-z] //')
    foreign=$(grep -vE '^((vtable|typeinfo|typeinfo name) for )?intarsia(::|_)' <<<"$defined" || true)
    if [[ -n "$defined" && -n "$foreign" ]]; then
      printf '%s exports what is not its own:\n%s\n' "$library" "$foreign" >&2
      return 1
    fi
    if [[ "$library" == */libintarsia.so ]]; then
      grep -q '^intarsia_run$' <<<"$defined"
      grep -q '^intarsia::run(intarsia::LayerForward const&' <<<"$defined"
    fi
  done
  [[ "$(readelf --dynamic "$libdir/libintarsia.so")" =~ SONAME.*libintarsia\.so\.[0-9]+\] ]]
}

# Without libintarsia_cpu.so, or without oneDNN on the machine, the CPU backend multiplies with plain loops, and says so.
plain_products() {
  rm -f "$libdir/libintarsia_cpu.so"
  [[ "$("$prefix/bin/intarsia-ops" doctor)" =~ 'plain blocked loops' ]]
  local operation
  for operation in layer_forward layer_backward router_logits; do
    "$prefix/bin/intarsia-ops" verify "$operation" --backend cpu
  done
}

command_line() {
  "$prefix/bin/intarsia-ops" doctor
}

"$check"
