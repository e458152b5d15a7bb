"""The layer as functions. T tokens, H hidden size, I expert width, E experts, K experts per token, R rows; G = 2 for
gated activations (z = [gate, up]), 1 for plain ones. Same arguments, same bits: forward and backward, whatever the
number of threads.

Under torch.autocast x, weights, biases and addend are cast to its dtype, and the output has it; else the output has
x's dtype. float64 runs on the reference backend (plain loops): for checks, not for speed.
"""

import torch
from torch import Tensor

from . import _arguments as check
from . import ops
from .errors import InvalidArgument
from .ops.define import nothing, score_dtype
from .ops.layer import GATED
from .ops.moe import MoeOptions, list_views
from .routing import (
    LOGITS_DTYPES,
    ROUTER_SCORES,
    IndexLists,
    Routing,
    build_index,
    check_k,
    choice_tensors,
    round_tokens,
    route,
    router_logits,
    router_tensors,
)

__all__ = [
    "IndexLists", "Layout", "Routing", "build_index", "grouped_gemm", "grouped_mlp", "moe", "moe_mlp", "round_tokens",
    "route", "router_logits",
]  # fmt: skip

ACTIVATIONS = (*GATED, "silu", "gelu", "gelu_tanh", "relu", "relu2")
SCORE_PLACEMENTS = ("output", "inside", "input")
SAVE_MODES = ("preactivation", "input")

Layout = str | tuple[str, int]


# ---- the layer


def moe(
    x: Tensor,
    w_router: Tensor,
    k: int,
    w_up: Tensor | tuple[Tensor, Tensor],
    w_down: Tensor,
    *,
    b_router: Tensor | None = None,
    scores: str = "softmax",
    expert_bias: Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    renormalise: bool = True,
    scale: float = 1.0,
    logits_dtype: str = "float32",
    token_mask: Tensor | None = None,
    nan_tokens: Tensor | None = None,
    counts: Tensor | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    activation: str = "swiglu",
    layout: Layout = "concatenated",
    transposed: bool = False,
    score_on: str = "output",
    save: str = "preactivation",
    addend: Tensor | None = None,
    backend: str | None = None,
    return_routing: bool | str = False,
) -> Tensor | tuple[Tensor, Routing]:
    """The whole layer, router included, as one autograd node: y (T, H), or (y, Routing) when `return_routing`, "lists"
    for one without logits (empty), which then give their memory to the experts.

    What router_logits, route, build_index and moe_mlp give one after another, with their arguments and errors, in
    less time: x gets one gradient, into which both parts are summed where it is written. MoE is its module. `counts`
    (E) int32 is set to the rows of each expert.

    Gradients: x, w_router, b_router, w_up, w_down, b_up, b_down, addend, from y and from the Routing's logits and
    scores; second derivatives are refused. Raises InvalidArgument, Unsupported.
    """
    w_up, second = check.pair("moe", w_up, activation in GATED, layout)
    tensors = (x, w_router, b_router, expert_bias, token_mask, w_up, second, w_down, b_up, b_down, addend)
    try:
        if check.must_look():
            tensors = _moe_tensors(*tensors, transposed)
        elif expert_bias is not None or token_mask is not None:
            tensors = (*tensors[:3], *choice_tensors("moe", x.dtype, expert_bias, token_mask), *tensors[5:])
        check_k("moe", k, w_router.shape[0])
        if counts is not None:
            check.counts("moe", counts, x, w_router.shape[0])
        save_z = save == "preactivation" and check.requires_gradient(*tensors[:-1])
        options = _moe_options(
            k, scores, groups, top_groups, renormalise, float(scale), logits_dtype, nan_tokens is not None,
            counts is not None, 1 + bool(return_routing) + (return_routing is True), layout, transposed, activation,
            score_on, save, save_z, backend,
        )  # fmt: skip
        y, chosen, logits, lists, found, rows, _, _, _ = ops.moe_forward(*tensors, options)
    except Exception:
        try:
            _moe_tensors(*tensors, transposed)
        except InvalidArgument as error:  # the same in the caller's words
            raise error from None
        raise
    if y.is_meta:
        _moe_tensors(*tensors, transposed)  # nothing has looked at the others' devices
    if nan_tokens is not None:
        nan_tokens.add_(found)
    if counts is not None:
        counts.copy_(rows)
    if not return_routing:
        return y
    ids, *lists = list_views(lists, chosen.shape)
    return y, Routing(nothing(x) if logits is None else logits, ids, chosen, IndexLists(*lists))


def _moe_tensors(
    x, w_router, b_router, expert_bias, token_mask, w_up, second, w_down, b_up, b_down, addend, transposed
) -> tuple:
    """The tensors as the operator takes them, checked."""
    name = "moe"
    x, w_router, b_router = router_tensors(name, x, w_router, b_router, "b_router")
    expert_bias, token_mask = choice_tensors(name, x.dtype, expert_bias, token_mask)
    check.same_device(name, x, expert_bias=expert_bias, token_mask=token_mask)
    x, *experts, addend = _expert_tensors(name, x, w_up, second, w_down, b_up, b_down, addend, transposed)
    return x, w_router, b_router, expert_bias, token_mask, *experts, addend


@check.once
def _moe_options(
    k, scores, groups, top_groups, renormalise, scale, logits_dtype, count_nan_tokens, count_rows, returned,
    layout, transposed, activation, score_on, save, save_z, backend,
) -> MoeOptions:  # fmt: skip
    name = "moe"
    check.choice(name, "logits_dtype", logits_dtype, LOGITS_DTYPES)
    check.choice(name, "scores", scores, ROUTER_SCORES)
    gate_block = _expert_options(name, activation, layout, score_on, save)
    return MoeOptions(
        int(k), scores, groups, top_groups, bool(renormalise), scale, logits_dtype == "input", count_nan_tokens,
        count_rows, returned, gate_block, bool(transposed), activation, score_on, save_z, True, backend or "automatic",
    )  # fmt: skip


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
        name, x, lists, scores, w_up, w_down, b_up, b_down, addend, activation, layout, transposed, score_on, save,
        backend,
    )  # fmt: skip


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
    function, x, lists, scores, w_up, w_down, b_up, b_down, addend, activation, layout, transposed, score_on, save,
    backend,
):  # fmt: skip
    check.same_device(function, x, scores=scores, expert_offsets=lists.expert_offsets)
    gate_block = _expert_options(function, activation, layout, score_on, save)
    w_up, second = check.pair(function, w_up, activation in GATED, layout)
    x, w_up, second, w_down, b_up, b_down, addend = _expert_tensors(
        function, x, w_up, second, w_down, b_up, b_down, addend, transposed
    )
    if scores is not None:
        scores = scores.to(score_dtype(x.dtype)).contiguous()
    save_z = save == "preactivation" and check.requires_gradient(x, scores, w_up, second, w_down, b_up, b_down)
    y, _ = ops.layer_forward(
        x, *lists[:6], scores, w_up, second, gate_block, transposed, w_down, transposed, b_up, b_down, addend,
        activation, score_on, save_z, True, backend or "automatic",
    )  # fmt: skip
    return y


def _expert_options(function: str, activation, layout, score_on, save) -> int:
    """gate_block of the layout, all of them checked."""
    check.choice(function, "activation", activation, ACTIVATIONS)
    check.choice(function, "score_on", score_on, SCORE_PLACEMENTS)
    check.choice(function, "save", save, SAVE_MODES)
    return check.gate_block(function, layout)


def _expert_tensors(function, x, w_up, second, w_down, b_up, b_down, addend, transposed) -> tuple:
    """x, then weights, biases and addend in the order of the operators; checked, in autocast's dtype."""
    check.activations(function, "x", x)
    check.tensor(function, "w_up", w_up, "(E, H, G*I)" if transposed else "(E, G*I, H)")
    check.tensor(function, "w_up[1]", second, "(E, H, I)" if transposed else "(E, I, H)", optional=True)
    check.tensor(function, "w_down", w_down, "(E, I, H)" if transposed else "(E, H, I)")
    check.tensor(function, "addend", addend, "(T, H)", optional=True)
    tensors = {"w_up": w_up, "w_up[1]": second, "w_down": w_down, "addend": addend, "b_up": b_up, "b_down": b_down}
    check.same_device(function, x, **tensors)
    x, w_up, second, w_down, addend, b_up, b_down = check.autocast(x, *tensors.values())
    check.same_dtype(function, x, **{"w_up": w_up, "w_up[1]": second, "w_down": w_down, "addend": addend})
    check.same_dtype(function, x, or_float32=True, b_up=b_up, b_down=b_down)
    return x, w_up, second, w_down, b_up, b_down, addend
