// EMULATION=early, reversed: how the emulation orders copies and threads; see emulation.h.
#include <cstdlib>
#include <cstring>

#include "emulation.h"

namespace {

const bool set = [] {
  const char* text = std::getenv("EMULATION");
  if (text == nullptr) return false;
  if (std::strstr(text, "early") != nullptr) emulation::copies = emulation::Copies::early;
  if (std::strstr(text, "reversed") != nullptr) emulation::reversed = true;
  return true;
}();

}  // namespace
