// EMULATION=early_copies,early_reads,reversed,hopper (any of them): how the emulation orders copies, reads and threads, and on
// which device; see emulation.h.
#include <cstdlib>
#include <cstring>

#include "emulation.h"

namespace {

const bool set = [] {
  const char* text = std::getenv("EMULATION");
  if (text == nullptr) return false;
  const auto has = [&](const char* word) { return std::strstr(text, word) != nullptr; };
  if (has("early_copies")) emulation::copies = emulation::When::early;
  if (has("early_reads")) emulation::reads = emulation::When::early;
  emulation::reversed = has("reversed");
  emulation::hopper = has("hopper");
  return true;
}();

}  // namespace
