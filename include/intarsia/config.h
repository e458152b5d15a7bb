// What a layer can be: activations, score placements, router families, weight layouts, memory modes, backends.
// Every enumerator has one spelling, the same here, in the torch ops, in Python and on the command line (names.h of src/base).
#pragma once

#include <cstdint>
#include <string_view>

#include "intarsia/export.h"
#include "intarsia/types.h"

namespace intarsia {

/// a = act(z). Gated activations read z = [gate, up] and give one value per pair; plain ones read z = [x].
///   swiglu          silu(gate) * up
///   geglu           gelu(gate) * up, with erf         geglu_tanh   the same with the tanh approximation
///   reglu           relu(gate) * up
///   clamped_swiglu  gpt-oss: g = min(gate, 7), u = clamp(up, -7, 7): (u + 1) * g * sigmoid(1.702 g)
///   silu, gelu, gelu_tanh, relu, relu2 (relu squared): plain
enum class Activation : std::uint8_t { swiglu, geglu, geglu_tanh, reglu, clamped_swiglu, silu, gelu, gelu_tanh, relu, relu2 };

constexpr bool is_gated(Activation a) { return a <= Activation::clamped_swiglu; }
/// Width of z over the width of a: 2 for a gated activation, 1 for a plain one.
constexpr std::int64_t gate_factor(Activation a) { return is_gated(a) ? 2 : 1; }

/// Where the routing score s of a row acts.
///   output  y += s * (a w_down^T + b_down)            (almost every model)
///   inside  the same sum, with s * a as the stored operand of the down projection
///   input   a = act(s * z), y += a w_down^T + b_down  (Llama 4; b_up is refused)
enum class ScorePlacement : std::uint8_t { output, inside, input };

/// What forward keeps for backward beside x, the index lists and the scores.
///   preactivation  z (R, 2I): backward recomputes only the activation
///   input          nothing: backward recomputes z too (one more product of nine)
enum class SaveMode : std::uint8_t { preactivation, input };

/// Router families (docs/tour.md has the models of each).
///   softmax_renorm  A: top-k of softmax, renormalised over the chosen (= softmax over the chosen logits)
///   softmax         B: top-k of softmax, not renormalised
///   sigmoid_group   C: sigmoid, a correction bias for the choice only, group-limited, unbiased scores renormalised and scaled
///   sigmoid         D: top-k of the logits, sigmoid of the chosen
enum class RouterScores : std::uint8_t { softmax, softmax_renorm, sigmoid_group, sigmoid };

/// Token rounding (SonicMoE, section 5): how an expert's row count becomes a multiple of the tile.
///   up, down; nearest (tie: down); stochastic (up with probability frac(count / tile), counter-based, seeded);
///   balanced (experts in order, the direction that keeps |running sum of (rounded - count)| smallest; tie: down)
enum class Rounding : std::uint8_t { up, down, nearest, stochastic, balanced };

/// load_balance_loss = c * sum_e f_e P_e, f_e = chosen slots / T, P_e = mean probability.
///   huggingface  c = E: K at perfect balance       megatron  c = E / K: 1 at perfect balance
enum class BalanceNormalisation : std::uint8_t { huggingface, megatron };

/// Who computes. `automatic` takes the fast backend of the tensors' device, and `reference` for float64.
enum class Backend : std::uint8_t { automatic, reference, cpu, cuda };

/// Expert weights of one projection, in the caller's own memory layout; never copied, never guessed from a shape.
/// `weight` is (E, out, in), or (E, in, out) when `transposed`; any strides.
/// For w_up of a gated layer `out` is 2I rows: `gate_block` gate rows, then as many up rows, and so on:
/// 0 means one block, [gate; up] (Hugging Face), 1 means alternating rows (gpt-oss, SonicMoE), n must divide I.
/// Or gate and up are two tensors: `weight` holds the gate, `second` the up rows, each (E, I, in) with equal strides not
/// required. The same struct describes a weight gradient, which is written in the same layout.
struct Weights {
  TensorView weight = {};
  TensorView second = {};
  std::int64_t gate_block = 0;
  bool transposed = false;

  bool defined() const { return weight.defined(); }
};

INTARSIA_EXPORT std::string_view to_string(DType);
INTARSIA_EXPORT std::string_view to_string(Activation);
INTARSIA_EXPORT std::string_view to_string(ScorePlacement);
INTARSIA_EXPORT std::string_view to_string(SaveMode);
INTARSIA_EXPORT std::string_view to_string(RouterScores);
INTARSIA_EXPORT std::string_view to_string(Rounding);
INTARSIA_EXPORT std::string_view to_string(BalanceNormalisation);
INTARSIA_EXPORT std::string_view to_string(Backend);

/// The enumerator spelled `text`; throws InvalidArgument that lists the spellings.
template <class Enum>
Enum parse(std::string_view text);

extern template INTARSIA_EXPORT DType parse<DType>(std::string_view);
extern template INTARSIA_EXPORT Activation parse<Activation>(std::string_view);
extern template INTARSIA_EXPORT ScorePlacement parse<ScorePlacement>(std::string_view);
extern template INTARSIA_EXPORT SaveMode parse<SaveMode>(std::string_view);
extern template INTARSIA_EXPORT RouterScores parse<RouterScores>(std::string_view);
extern template INTARSIA_EXPORT Rounding parse<Rounding>(std::string_view);
extern template INTARSIA_EXPORT BalanceNormalisation parse<BalanceNormalisation>(std::string_view);
extern template INTARSIA_EXPORT Backend parse<Backend>(std::string_view);

}  // namespace intarsia
