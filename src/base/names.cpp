// One spelling per enumerator; the order of each table is the order of its enum.
#include <array>
#include <string>

#include "intarsia/config.h"
#include "intarsia/error.h"

namespace intarsia {
namespace {

template <class Enum>
struct Names;

#define INTARSIA_NAMES(Enum, label, ...)                                               \
  template <>                                                                          \
  struct Names<Enum> {                                                                 \
    static constexpr std::string_view kLabel = label;                                  \
    static constexpr auto kSpellings = std::to_array<std::string_view>({__VA_ARGS__}); \
  };

INTARSIA_NAMES(DType, "dtype", "float64", "float32", "bfloat16", "float16", "int64", "int32", "boolean")
INTARSIA_NAMES(Activation, "activation", "swiglu", "geglu", "geglu_tanh", "reglu", "clamped_swiglu", "silu", "gelu",
               "gelu_tanh", "relu", "relu2")
INTARSIA_NAMES(ScorePlacement, "score_on", "output", "inside", "input")
INTARSIA_NAMES(SaveMode, "save", "preactivation", "input")
INTARSIA_NAMES(RouterScores, "scores", "softmax", "softmax_renorm", "sigmoid_group", "sigmoid")
INTARSIA_NAMES(Rounding, "rounding", "up", "down", "nearest", "stochastic", "balanced")
INTARSIA_NAMES(BalanceNormalisation, "normalisation", "huggingface", "megatron")
INTARSIA_NAMES(Backend, "backend", "automatic", "reference", "cpu", "cuda")
#undef INTARSIA_NAMES

template <class Enum>
std::string_view spell(Enum value) {
  return Names<Enum>::kSpellings.at(static_cast<std::size_t>(value));
}

}  // namespace

template <class Enum>
Enum parse(std::string_view text) {
  const auto& spellings = Names<Enum>::kSpellings;
  for (std::size_t i = 0; i < spellings.size(); ++i)
    if (spellings[i] == text) return static_cast<Enum>(i);
  std::string message = std::string(Names<Enum>::kLabel) + ": expected one of";
  for (std::string_view s : spellings) message += " \"" + std::string(s) + "\"";
  throw InvalidArgument(message + ", got \"" + std::string(text) + "\"");
}

#define INTARSIA_ENUM(Enum)                                       \
  std::string_view to_string(Enum value) { return spell(value); } \
  template INTARSIA_EXPORT Enum parse<Enum>(std::string_view);
INTARSIA_ENUM(DType)
INTARSIA_ENUM(Activation)
INTARSIA_ENUM(ScorePlacement)
INTARSIA_ENUM(SaveMode)
INTARSIA_ENUM(RouterScores)
INTARSIA_ENUM(Rounding)
INTARSIA_ENUM(BalanceNormalisation)
INTARSIA_ENUM(Backend)
#undef INTARSIA_ENUM

}  // namespace intarsia
