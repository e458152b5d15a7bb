"""The router and the index lists as functions. T tokens, H hidden size, E experts, K experts per token, R rows."""

from typing import NamedTuple

import torch
from torch import Tensor

from . import _arguments as check
from . import ops
from .ops.define import score_dtype

__all__ = ["IndexLists", "Routing", "build_index", "round_tokens", "route", "router_logits"]

ROUTER_SCORES = ("softmax", "softmax_renorm", "sigmoid_group", "sigmoid")
ROUNDINGS = ("up", "down", "nearest", "stochastic", "balanced")
LOGITS_DTYPES = ("float32", "input")


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


class Routing(NamedTuple):
    """What the router decided in one call, for losses and monitoring. ids and lists are views of one tensor."""

    logits: Tensor  # (T, E), differentiable
    ids: Tensor  # (T, K) int32, best first; -1: token not routed
    scores: Tensor  # (T, K), differentiable
    lists: IndexLists


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
    check.choice("router_logits", "logits_dtype", logits_dtype, LOGITS_DTYPES)
    x, w_router, bias = router_tensors("router_logits", x, w_router, bias, "bias")
    return ops.router_logits(x, w_router, bias, logits_dtype == "input", backend or "automatic")


def router_tensors(function: str, x: Tensor, w_router: Tensor, bias: Tensor | None, bias_name: str) -> tuple:
    """x, w_router and bias, checked and as the operator takes them. Autocast touches x alone: the router's parameters
    stay in float32 if they are.
    """
    check.tensor(function, "x", x, "(T, H)")
    check.tensor(function, "w_router", w_router, "(E, H)")
    check.tensor(function, bias_name, bias, "(E)", optional=True)
    check.activations(function, "x", x)
    parameters = {"w_router": w_router, bias_name: bias}
    check.same_device(function, x, **parameters)
    (x,) = check.autocast(x)
    if w_router.dtype not in (x.dtype, torch.float32) and check.autocast_is_on(x):
        parameters = {name: None if value is None else value.to(x.dtype) for name, value in parameters.items()}
    check.same_dtype(function, x, or_float32=True, **parameters)
    return x, *parameters.values()


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
    check.activations(name, "logits", logits)
    check.choice(name, "scores", scores, ROUTER_SCORES)
    check_k(name, k, logits.shape[1])
    expert_bias, token_mask = choice_tensors(name, logits.dtype, expert_bias, token_mask)
    chosen, ids, _, found = ops.route(
        logits, expert_bias, token_mask, k, scores, groups, top_groups, renormalise, float(scale),
        nan_tokens is not None, backend or "automatic",
    )  # fmt: skip
    if nan_tokens is not None:
        nan_tokens.add_(found)
    return ids, chosen


def choice_tensors(function: str, dtype: torch.dtype, expert_bias: Tensor | None, token_mask: Tensor | None) -> tuple:
    """expert_bias and token_mask, checked and as the operator takes them beside logits of `dtype`."""
    check.tensor(function, "expert_bias", expert_bias, "(E)", optional=True)
    check.tensor(function, "token_mask", token_mask, "(T)", optional=True)
    if expert_bias is not None:
        expert_bias = expert_bias.to(score_dtype(dtype))
    return check.contiguous(expert_bias, token_mask)


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
