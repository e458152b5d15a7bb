"""The layer as functions. T tokens, H hidden size, I expert width, E experts, K experts per token, R rows; G = 2 for
gated activations (z = [gate, up]), 1 for plain ones. Same arguments, same bits: forward and backward, whatever the
number of threads.

Under torch.autocast x, weights, biases and addend are cast to its dtype, and the output has it; else the output has
x's dtype. float64 runs on the reference backend (plain loops): for checks, not for speed.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from . import _arguments as check
from . import ops
from .ops.define import score_dtype
from .ops.layer import GATED

__all__ = [
    "IndexLists", "Layout", "build_index", "grouped_gemm", "grouped_mlp", "moe_mlp", "round_tokens", "route",
    "router_logits",
]  # fmt: skip

ACTIVATIONS = (*GATED, "silu", "gelu", "gelu_tanh", "relu", "relu2")
SCORE_PLACEMENTS = ("output", "inside", "input")
SAVE_MODES = ("preactivation", "input")
ROUTER_SCORES = ("softmax", "softmax_renorm", "sigmoid_group", "sigmoid")
ROUNDINGS = ("up", "down", "nearest", "stochastic", "balanced")
LOGITS_DTYPES = ("float32", "input")

Layout = str | tuple[str, int]


class IndexLists(NamedTuple):
    """The whole dispatch (design: section 2), int32. From build_index with slot_row; from round_tokens with the last
    three.
    """

    expert_offsets: Tensor  # (E+1) first row of each expert
    row_token: Tensor  # (R) token of each row, expert by expert, ascending inside an expert; -1 past the last row
    row_slot: Tensor  # (R) flat slot of each row
    slot_row: Tensor | None = None  # (T, K) row of each slot, -1 for none
    token_offsets: Tensor | None = None  # (T+1) first entry of each token in token_rows
    token_rows: Tensor | None = None  # (R)
    row_score: Tensor | None = None  # (R) float32, differentiable

    def counts(self) -> Tensor:
        """Rows of each expert, (E) int32, on the device."""
        return self.expert_offsets.diff()


# ---- the router


def router_logits(
    x: Tensor,
    w_router: Tensor,
    bias: Tensor | None = None,
    *,
    logits_dtype: str = "float32",
    backend: str | None = None,
) -> Tensor:
    """x w_router^T + bias, accumulated in float32: (T, H), (E, H), (E) -> (T, E).

    `logits_dtype` "float32" keeps all bits (float64 for float64 x); "input" rounds once to x's dtype, as Hugging
    Face's routers do: that choice decides ids. w_router and bias: x's dtype or float32. Differentiable. Raises
    InvalidArgument.
    """
    name = "router_logits"
    check.tensor(name, "x", x, "(T, H)")
    check.tensor(name, "w_router", w_router, "(E, H)")
    check.tensor(name, "bias", bias, "(E)", optional=True)
    check.activations(name, "x", x)
    check.choice(name, "logits_dtype", logits_dtype, LOGITS_DTYPES)
    check.same_device(name, x, w_router=w_router, bias=bias)
    x, w_router, bias = router_dtypes(name, x, w_router, bias)
    return ops.router_logits(x, w_router, bias, logits_dtype == "input", backend or "automatic")


def router_dtypes(function: str, x: Tensor, w_router: Tensor, bias: Tensor | None) -> tuple:
    """Autocast touches x alone: the router's parameters stay in float32 if they are."""
    (x,) = check.autocast(x)
    if w_router.dtype not in (x.dtype, torch.float32) and check.autocast_is_on(x):
        w_router, bias = w_router.to(x.dtype), None if bias is None else bias.to(x.dtype)
    check.same_dtype(function, x, or_float32=True, w_router=w_router, bias=bias)
    return x, w_router, bias


def route(
    logits: Tensor,
    k: int,
    *,
    scores: str = "softmax",
    expert_bias: Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    renormalise: bool = True,
    scale: float = 1.0,
    token_mask: Tensor | None = None,
    nan_tokens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Chooses k experts per token: logits (T, E) -> ids (T, k) int32, scores (T, k) float32, best first, ties to the
    lowest id.

    scores: "softmax" (OLMoE, Qwen2-MoE), "softmax_renorm" (Mixtral, Qwen3-MoE, gpt-oss, Granite), "sigmoid_group"
    (DeepSeek-V3, GLM-4.5, Kimi: `expert_bias` (E) for the choice only, `top_groups` of `groups` by their best two,
    scores over their sum when `renormalise`, times `scale`), "sigmoid" (Llama 4). A token with a NaN logit, or False
    in token_mask (T), gets ids -1 and scores 0; NaN tokens are added to `nan_tokens` (1) int32. Differentiable in
    logits. Raises InvalidArgument.
    """
    name = "route"
    check.tensor(name, "logits", logits, "(T, E)")
    check.tensor(name, "expert_bias", expert_bias, "(E)", optional=True)
    check.tensor(name, "token_mask", token_mask, "(T)", optional=True)
    check.activations(name, "logits", logits)
    check.choice(name, "scores", scores, ROUTER_SCORES)
    check_k(name, k, logits.shape[1])
    expert_bias, token_mask = check.contiguous(expert_bias, token_mask)
    if expert_bias is not None:
        expert_bias = expert_bias.to(score_dtype(logits.dtype))
    chosen, ids, _, found = ops.route(
        logits,
        expert_bias,
        token_mask,
        k,
        scores,
        groups,
        top_groups,
        renormalise,
        float(scale),
        backend or "automatic",
    )
    if nan_tokens is not None:
        nan_tokens.add_(found)
    return ids, chosen


def check_k(function: str, k, experts: int, name: str = "k") -> None:
    """k experts of so many."""
    if not isinstance(k, int) or not 1 <= k <= experts:
        check.fail(function, name, f"expected an integer from 1 to the number of experts, {experts}; got {k!r}")


# ---- the lists


def build_index(
    ids: Tensor, num_experts: int, *, token_mask: Tensor | None = None, backend: str | None = None
) -> IndexLists:
    """The index lists of ids (T, K), int32 or int64: stable, nothing copied to the host.

    An id < 0 or >= num_experts means "not here" and gets no row; a masked token (False) gets none. Raises
    InvalidArgument.
    """
    name = "build_index"
    check.tensor(name, "ids", ids, "(T, K)")
    check.tensor(name, "token_mask", token_mask, "(T)", optional=True)
    if ids.dtype not in (torch.int32, torch.int64):
        check.fail(name, "ids", f"expected int32 or int64, got {ids.dtype}")
    ids, token_mask = check.contiguous(ids, token_mask)
    return IndexLists(*ops.build_index(ids, token_mask, num_experts, backend or "automatic"))


def round_tokens(
    logits: Tensor,
    k: int,
    *,
    tile: int = 128,
    rounding: str = "nearest",
    seed: int | None = None,
    token_mask: Tensor | None = None,
    backend: str | None = None,
) -> IndexLists:
    """Token rounding (SonicMoE, section 5): every expert's row count a multiple of `tile`, for training.

    logits (T, E). Each token's top-k of the softmax, then per expert: its lowest rows dropped or the likeliest other
    tokens added. Scores are the softmax probabilities, never renormalised; row_score is differentiable in logits.
    rounding: "up", "down", "nearest", "stochastic" (`seed`; drawn from torch's CPU generator when None), "balanced".
    moe_mlp takes the result in place of ids, with scores None. Raises InvalidArgument.
    """
    name = "round_tokens"
    check.tensor(name, "logits", logits, "(T, E)")
    check.tensor(name, "token_mask", token_mask, "(T)", optional=True)
    check.activations(name, "logits", logits)
    check.choice(name, "rounding", rounding, ROUNDINGS)
    check_k(name, k, logits.shape[1])
    if tile < 1:
        check.fail(name, "tile", f"expected at least 1, got {tile}")
    if seed is None:
        seed = int(torch.randint(2**63 - 1, ())) if rounding == "stochastic" else 0
    (token_mask,) = check.contiguous(token_mask)
    row_score, offsets, row_token, row_slot, token_offsets, token_rows = ops.round_tokens(
        logits, token_mask, k, tile, rounding, seed, backend or "automatic"
    )
    return IndexLists(offsets, row_token, row_slot, None, token_offsets, token_rows, row_score)


# ---- the experts


def moe_mlp(
    x: Tensor,
    ids: Tensor | IndexLists,
    scores: Tensor | None,
    w_up: Tensor | tuple[Tensor, Tensor],
    w_down: Tensor,
    *,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    activation: str = "swiglu",
    layout: Layout = "concatenated",
    transposed: bool = False,
    score_on: str = "output",
    save: str = "preactivation",
    addend: Tensor | None = None,
    token_mask: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """y[t] = addend[t] + sum_k scores[t, k] * expert_{ids[t, k]}(x[t]), expert(x) = act(x w_up^T + b_up) w_down^T +
    b_down.

    x, y, addend (T, H); ids (T, K) int32 or int64 (< 0 or >= E: not here, contributes nothing); scores (T, K). Or ids
    is an IndexLists: of build_index with scores (T, K), of round_tokens with scores None (its row_score) or (R).
    w_up (E, G*I, H), or the pair (gate, up) of (E, I, H); w_down (E, H, I); with `transposed` both are (E, in, out).
    layout of w_up's rows: "concatenated" [gate; up], "interleaved", ("blocks", n); declared, never guessed. b_up (E,
    G*I) in the same order, b_down (E, H). activation: swiglu, geglu, geglu_tanh, reglu, clamped_swiglu, silu, gelu,
    gelu_tanh, relu, relu2. score_on: "output"; "inside" (on the down projection's input); "input" (act(s * z), Llama
    4; b_up refused). save: "preactivation" keeps z (R, G*I) for backward, "input" recomputes it. Backward overwrites
    z with its gradient unless it is called with retain_graph=True. token_mask (T) bool: False tokens are not routed
    (give it to build_index with IndexLists).

    Gradients: x, scores, w_up, w_down, biases, addend; second derivatives are refused. Raises InvalidArgument,
    Unsupported.
    """
    name = "moe_mlp"
    check.tensor(name, "x", x, "(T, H)")
    check.tensor(name, "addend", addend, "(T, H)", optional=True)
    if isinstance(ids, IndexLists):
        if token_mask is not None:
            check.fail(name, "token_mask", "expected None beside IndexLists; give it to build_index or round_tokens")
        lists, scores = ids, ids.row_score if scores is None else scores
    else:
        check.tensor(name, "ids", ids, "(T, K)")
        check.tensor(name, "scores", scores, "(T, K)")
        check.same_device(name, x, ids=ids, token_mask=token_mask)
        if ids.shape != scores.shape:
            check.fail(name, "scores", f"expected the shape of ids, {tuple(ids.shape)}, got {tuple(scores.shape)}")
        experts = (w_up[0] if isinstance(w_up, tuple | list) else w_up).shape[0]
        lists = build_index(ids, experts, token_mask=token_mask, backend=backend)
    if scores is None:
        check.fail(name, "scores", "expected (T, K) beside the lists of build_index, got None")
    return _experts(
        name,
        x,
        lists,
        scores,
        w_up,
        w_down,
        b_up,
        b_down,
        addend,
        activation,
        layout,
        transposed,
        score_on,
        save,
        backend,
    )


def grouped_mlp(
    rows: Tensor,
    expert_offsets: Tensor,
    w_up: Tensor | tuple[Tensor, Tensor],
    w_down: Tensor,
    *,
    row_scores: Tensor | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    activation: str = "swiglu",
    layout: Layout = "concatenated",
    transposed: bool = False,
    score_on: str = "output",
    save: str = "preactivation",
    backend: str | None = None,
) -> Tensor:
    """The experts on rows (R, H) that are already sorted by expert: row r of expert e, expert_offsets[e] <= r <
    expert_offsets[e+1].

    expert_offsets (E+1) integers; row_scores (R) multiply the results (1 when None). Rows at or past
    expert_offsets[E] are slack: never read, zero in the result and in the gradients. The rest as in moe_mlp.
    """
    check.tensor("grouped_mlp", "rows", rows, "(R, H)")
    check.tensor("grouped_mlp", "row_scores", row_scores, "(R)", optional=True)
    lists = IndexLists(_offsets("grouped_mlp", expert_offsets), None, None)
    return _experts(
        "grouped_mlp", rows, lists, row_scores, w_up, w_down, b_up, b_down, None, activation, layout, transposed,
        score_on, save, backend,
    )  # fmt: skip


def grouped_gemm(
    rows: Tensor, expert_offsets: Tensor, weight: Tensor, *, transposed: bool = False, backend: str | None = None
) -> Tensor:
    """out[r] = rows[r] weight[e]^T for the rows of each expert: (R, M), (E+1), (E, N, M) -> (R, N); weight (E, M, N)
    if transposed.

    Slack rows (at or past expert_offsets[E]) are never read and zero in the result. Differentiable in rows and weight.
    """
    name = "grouped_gemm"
    check.tensor(name, "rows", rows, "(R, M)")
    check.tensor(name, "weight", weight, "(E, N, M)")
    check.activations(name, "rows", rows)
    check.same_device(name, rows, expert_offsets=expert_offsets, weight=weight)
    rows, weight = check.autocast(rows, weight)
    check.same_dtype(name, rows, weight=weight)
    return ops.grouped_gemm(rows, _offsets(name, expert_offsets), weight, transposed, backend or "automatic")


def _offsets(function: str, expert_offsets: Tensor) -> Tensor:
    check.tensor(function, "expert_offsets", expert_offsets, "(E+1)")
    if expert_offsets.dtype not in (torch.int32, torch.int64):
        check.fail(function, "expert_offsets", f"expected int32 or int64, got {expert_offsets.dtype}")
    return expert_offsets.to(torch.int32).contiguous()


def _experts(
    function,
    x,
    lists,
    scores,
    w_up,
    w_down,
    b_up,
    b_down,
    addend,
    activation,
    layout,
    transposed,
    score_on,
    save,
    backend,
):
    check.activations(function, "x", x)
    check.choice(function, "activation", activation, ACTIVATIONS)
    check.choice(function, "score_on", score_on, SCORE_PLACEMENTS)
    check.choice(function, "save", save, SAVE_MODES)
    gate_block = check.gate_block(function, layout)
    w_up, second = check.pair(function, w_up, activation in GATED, layout)
    check.tensor(function, "w_up", w_up, "(E, H, G*I)" if transposed else "(E, G*I, H)")
    check.tensor(function, "w_up[1]", second, "(E, H, I)" if transposed else "(E, I, H)", optional=True)
    check.tensor(function, "w_down", w_down, "(E, I, H)" if transposed else "(E, H, I)")
    check.same_device(
        function,
        x,
        scores=scores,
        w_up=w_up,
        w_down=w_down,
        b_up=b_up,
        b_down=b_down,
        addend=addend,
        expert_offsets=lists.expert_offsets,
    )
    x, w_up, second, w_down, b_up, b_down, addend = check.autocast(x, w_up, second, w_down, b_up, b_down, addend)
    check.same_dtype(
        function, x, w_up=w_up, w_down=w_down, addend=addend, **({} if second is None else {"w_up[1]": second})
    )
    check.same_dtype(function, x, or_float32=True, b_up=b_up, b_down=b_down)
    if scores is not None:
        scores = scores.to(score_dtype(x.dtype)).contiguous()
    save_z = save == "preactivation" and check.requires_gradient(x, scores, w_up, second, w_down, b_up, b_down)
    y, _ = ops.layer_forward(
        x, *lists[:6], scores, w_up, second, gate_block, transposed, w_down, transposed, b_up, b_down, addend,
        activation, score_on, save_z, True, backend or "automatic",
    )  # fmt: skip
    return y
