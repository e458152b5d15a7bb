// Messages that are put together only when something is wrong.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace intarsia {

inline void append_word(std::string& text, std::string_view word) { text += word; }
inline void append_word(std::string& text, std::int64_t number) { text += std::to_string(number); }

/// Appends text, whole numbers, and what else has an append_word.
template <class... Words>
void append_words(std::string& text, const Words&... words) {
  (append_word(text, words), ...);
}

}  // namespace intarsia
