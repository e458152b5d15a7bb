"""moe_forward: router, lists and experts as one operator, from x to y, and one autograd node.

One node, so that x has one gradient: the router's part is added to the experts' where they wrote it, with no pass over
(T, H) for their sum.

The router's gradients are as exact as its weight. Beside a w_router of x's dtype the logits that backward looks at and
their gradient have that dtype too; beside a float32 one they stay in float32. Only the family whose gradient is dense
over E (softmax) needs logits: kept where they have 16 bits (2TE bytes, for a pass over x) and z is kept too, else
computed again from x and w_router.
"""

import functools
from typing import NamedTuple

import torch

from .. import _core
from .define import asked_for, define, eager, score_dtype, wanted, words
from .layer import Preactivations, expert_gradients, z_width
from .router import logits_gradients, route_backward, router_logits, weight_gradient


class MoeOptions(NamedTuple):
    """What moe_forward takes beside tensors."""

    k: int
    scores_kind: str
    groups: int
    top_groups: int
    renormalise: bool
    scale: float
    input_dtype: bool  # logits have x's dtype
    count_nan_tokens: bool
    count_rows: bool
    returned: int  # of y, scores and logits the first so many go to the caller, and have a gradient
    gate_block: int
    transposed: bool
    activation: str
    score_on: str
    save_z: bool
    overwrite_z: bool
    backend: str


_ROUTER = ("x", "w_router", "b_router")
_EXPERTS = ("w_up", "w_up_second", "w_down", "b_up", "b_down")
TENSORS = (*_ROUTER, "expert_bias", "token_mask", *_EXPERTS, "addend")
_LEARNING = (*_ROUTER, *_EXPERTS)  # whose gradients moe_backward computes
_KEPT = (*_LEARNING, "z", "logits", "scores", "raw_scores", "lists")


# ---- which dtypes, from those of x and w_router


def _backward_dtype(x, w_router):
    """Of the logits that backward looks at."""
    return x if w_router == x else score_dtype(x)


def _dlogits_dtype(x, w_router):
    """float16 has no room for small gradients: dlogits below 6e-5 would lose bits."""
    return score_dtype(x) if x == torch.float16 else _backward_dtype(x, w_router)


def _logits_dtype(x, o):
    return x if o.input_dtype else score_dtype(x)


def _recomputed_dtype(x, w_router, o):
    return x if o.input_dtype else _backward_dtype(x, w_router)


def _words_of_dtypes(x, w_router, o):
    """For the core: of logits that are computed again, and of dlogits."""
    return _core.DTYPES[_recomputed_dtype(x, w_router, o)], _core.DTYPES[_dlogits_dtype(x, w_router)]


def _keeps_logits(x, w_router, o):
    return o.save_z and o.scores_kind == "softmax" and _backward_dtype(x, w_router).itemsize == 2


# ---- ids and lists, in one tensor: a call makes, keeps and frees one instead of five


def list_views(lists, slots: tuple[int, int]) -> tuple:
    """ids (T, K), expert_offsets (E+1), row_token (R), row_slot (R) and slot_row (T, K), for slots (T, K), R = T*K."""
    tokens, k = slots
    rows = tokens * k
    ids, row_token, row_slot, slot_row, expert_offsets = lists.split(
        (rows, rows, rows, rows, lists.shape[0] - 4 * rows)
    )
    return ids.view(tokens, k), expert_offsets, row_token, row_slot, slot_row.view(tokens, k)


# ---- forward


def _forward(*arguments):
    x, w_router, b_router, expert_bias, token_mask, w_up, w_up_second, w_down, b_up, b_down, addend, o = arguments
    outputs = _outputs(*arguments)
    y, scores, logits, lists, nan_tokens, expert_counts, z, raw_scores, kept_logits = outputs
    ids, *lists = list_views(lists, scores.shape)
    rounded_logits = kept_logits
    if o.input_dtype and kept_logits is not None:  # they need no rounding
        logits, rounded_logits = kept_logits, None
    _core.call(
        _core.raw_operators["moe_forward"].call,
        x, w_router, b_router, expert_bias, token_mask, w_up, w_up_second, o.gate_block, o.transposed, w_down,
        o.transposed, b_up, b_down, addend, o.scores_kind, o.groups, o.top_groups, o.renormalise, o.scale,
        _core.DTYPES[_logits_dtype(x.dtype, o)], o.activation, o.score_on, logits, rounded_logits, ids, scores,
        raw_scores, nan_tokens, *lists, expert_counts, z, y, o.backend,
    )  # fmt: skip
    return outputs


_IN = (
    "Tensor x, Tensor w_router, Tensor? b_router, Tensor? expert_bias, Tensor? token_mask, Tensor w_up, "
    "Tensor? w_up_second, Tensor w_down, Tensor? b_up, Tensor? b_down, Tensor? addend"
)
_OUT = (
    "(Tensor y, Tensor scores, Tensor logits, Tensor lists, Tensor nan_tokens, Tensor expert_counts, Tensor z, "
    "Tensor raw_scores, Tensor kept_logits)"
)
_native_forward = _core.native(f"moe_forward.native({_IN}, str words) -> {_OUT}")


def _forward_natively(*arguments):
    """The same by the shim, which makes the outputs too."""
    *tensors, o = arguments
    if tensors[0].is_meta:
        return _forward(*arguments)
    return _core.call(_native_forward, *tensors, words(*o))


def _outputs(*arguments) -> tuple:
    """None for an output that nobody asked for."""
    x, w_router, *_, w_down, _, _, _, o = arguments
    tokens, experts, k = x.shape[0], w_router.shape[0], o.k
    keeps = _keeps_logits(x.dtype, w_router.dtype, o) and not (o.returned == 3 and o.input_dtype)
    scores = x.new_empty((tokens, k), dtype=score_dtype(x.dtype))
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        scores,
        x.new_empty((tokens, experts), dtype=_logits_dtype(x.dtype, o)) if o.returned == 3 else None,
        x.new_empty((4 * tokens * k + experts + 1,), dtype=torch.int32),
        x.new_zeros((1,), dtype=torch.int32) if o.count_nan_tokens else None,
        x.new_empty((experts,), dtype=torch.int32) if o.count_rows else None,
        x.new_empty((tokens * k, z_width(o.activation, w_down, o.transposed))) if o.save_z else None,
        torch.empty_like(scores) if o.scores_kind == "sigmoid_group" else None,
        x.new_empty((tokens, experts)) if keeps else None,
    )


# ---- autograd


def _setup(ctx, inputs, output):
    x, w_router, b_router, _, _, *experts, _, o = inputs
    _, scores, logits, lists, _, _, z, raw_scores, kept_logits = output
    ctx.set_materialize_grads(False)
    ctx.options, ctx.z_state = o, Preactivations("moe", o.overwrite_z)
    keeps_logits = _keeps_logits(x.dtype, w_router.dtype, o) and any(ctx.needs_input_grad[:3])
    ctx.save_for_backward(
        x, w_router, b_router, *experts, wanted(o.save_z, z),
        wanted(keeps_logits, logits if o.returned == 3 and o.input_dtype else kept_logits),
        scores, wanted(o.scores_kind == "sigmoid_group", raw_scores), lists,
    )  # fmt: skip


def _gradient(ctx, dy, dscores=None, dlogits=None, *_):
    if dy is not None:
        ctx.z_state.check()
    is_eager = eager()
    asked = asked_for(ctx, TENSORS, is_eager)
    of_y_alone = dlogits is None and dscores is None and dy is not None
    gradients = {}
    if of_y_alone and is_eager:
        if not asked.isdisjoint(_LEARNING):
            gradients = _backward(dy, ctx.saved_tensors, ctx.options, asked, ctx.z_state)
    else:
        gradients = _backward_in_steps(dy, dlogits, dscores, ctx.saved_tensors, ctx.options, asked, ctx.z_state)
    if "addend" in asked:
        gradients["addend"] = dy
    return (*map(gradients.get, TENSORS), None)


def _backward(dy, saved, o: MoeOptions, asked: frozenset[str], z_state: Preactivations) -> dict:
    """The gradients that are asked for, by name, in one call of the core."""
    w_up_second, z = saved[4], saved[8]
    if w_up_second is not None and ("w_up" in asked or "w_up_second" in asked):  # the two are one to the core
        asked = asked | {"w_up", "w_up_second"}
    overwrite_z = z_state.spend(z)
    compute = _gradients if _native_backward is None or dy.is_meta else _native_gradients
    gradients = compute(dy, saved, o, asked, overwrite_z)
    if overwrite_z:
        torch.autograd.graph.increment_version(z)
    return dict(zip(_LEARNING, gradients, strict=True))


def _gradient_memory(name: str, t: torch.Tensor) -> torch.Tensor:
    if name == "w_router":
        return weight_gradient(t)
    return torch.empty_like(t, memory_format=torch.contiguous_format if name == "x" else torch.preserve_format)


def _gradients(dy, saved, o: MoeOptions, asked: frozenset[str], overwrite_z: bool) -> list:
    """None for one that is not asked for."""
    x, w_router, b_router, w_up, w_up_second, w_down, b_up, b_down, z, logits, scores, raw_scores, lists = saved
    ids, *lists = list_views(lists, scores.shape)
    gradients = [_gradient_memory(n, t) if n in asked else None for n, t in zip(_LEARNING, saved, strict=False)]
    *of_router, dw_up, dw_up_second, dw_down, db_up, db_down = gradients
    _core.call(
        _core.raw_operators["moe_backward"].call,
        dy, x, w_router, b_router, logits, ids, scores, raw_scores, *lists, w_up, w_up_second, o.gate_block,
        o.transposed, w_down, o.transposed, b_up, b_down, o.scores_kind, o.renormalise, o.scale,
        *_words_of_dtypes(x.dtype, w_router.dtype, o), o.activation, o.score_on, overwrite_z, z, *of_router, dw_up,
        dw_up_second, o.gate_block, o.transposed, dw_down, o.transposed, db_up, db_down, o.backend,
    )  # fmt: skip
    return gradients


_native_backward = _core.native(
    "moe_backward.native(Tensor dy, Tensor x, Tensor w_router, Tensor? b_router, Tensor w_up, Tensor? w_up_second, "
    "Tensor w_down, Tensor? b_up, Tensor? b_down, Tensor(a!)? z, Tensor? logits, Tensor scores, Tensor? raw_scores, "
    "Tensor lists, str words) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_BITS = dict.fromkeys(TENSORS, 0) | {name: 1 << i for i, name in enumerate(_LEARNING)}


def _native_gradients(dy, saved, o: MoeOptions, asked: frozenset[str], overwrite_z: bool) -> tuple:
    """The same by the shim, which makes them too."""
    x, w_router, *_ = saved
    return _core.call(_native_backward, dy, *saved, _backward_words(o, asked, overwrite_z, x.dtype, w_router.dtype))


@functools.lru_cache(maxsize=1024, typed=True)
def _backward_words(o: MoeOptions, asked: frozenset[str], overwrite_z: bool, x: torch.dtype, w_router: torch.dtype):
    return words(*o, *_words_of_dtypes(x, w_router, o), overwrite_z, sum(_BITS[name] for name in asked))


def _backward_in_steps(
    dy, dlogits, dscores, saved, o: MoeOptions, asked: frozenset[str], z_state: Preactivations
) -> dict:
    """The same through the operators of the steps: where somebody looks on, or logits and scores have gradients of
    their own, which are added between the steps.
    """
    values, gradients, router = dict(zip(_KEPT, saved, strict=True)), {}, not asked.isdisjoint(_ROUTER)
    names = ("ids", "expert_offsets", "row_token", "row_slot", "slot_row")
    values |= zip(names, list_views(values.pop("lists"), values["scores"].shape), strict=True)
    if dy is not None:
        gradients = expert_gradients(dy, values | _layer_options(o), asked | {"scores"} if router else asked, z_state)
        dscores = _sum(dscores, gradients.pop("scores", None))
    if router and dscores is not None:
        dlogits = _sum(dlogits, _dlogits(dscores, o, **values))
    if router and dlogits is not None:
        inputs, need = map(values.get, _ROUTER), tuple(name in asked for name in _ROUTER)
        found = logits_gradients(dlogits, *inputs, gradients.get("x"), need, o.backend)
        gradients |= {name: g for name, g, flag in zip(_ROUTER, found, need, strict=True) if flag}
    return gradients


def _layer_options(o: MoeOptions) -> dict:
    """In the words of layer_backward."""
    return {
        "w_up_gate_block": o.gate_block, "w_up_transposed": o.transposed, "w_down_transposed": o.transposed,
        "activation": o.activation, "score_on": o.score_on, "backend": o.backend, "token_offsets": None,
        "token_rows": None,
    }  # fmt: skip


def _dlogits(dscores, o: MoeOptions, *, x, w_router, b_router, logits, scores, ids, raw_scores, **_):
    if o.scores_kind == "softmax" and logits is None:
        input_dtype = _recomputed_dtype(x.dtype, w_router.dtype, o) == x.dtype
        logits = router_logits(x, w_router, b_router, input_dtype, o.backend)
    return route_backward(
        dscores, scores, ids, raw_scores, logits, None, None, None, o.scores_kind, o.renormalise, o.scale,
        ids.shape[0], w_router.shape[0], _dlogits_dtype(x.dtype, w_router.dtype), o.backend,
    )  # fmt: skip


def _sum(a, b):
    if a is None or b is None:
        return b if a is None else a
    return a + b


moe_forward = define(
    f"moe_forward({_IN}, int k, str scores_kind, int groups, int top_groups, bool renormalise, float scale, "
    "bool input_dtype, bool count_nan_tokens, bool count_rows, int returned, int gate_block, bool transposed, "
    f"str activation, str score_on, bool save_z, bool overwrite_z, str backend) -> {_OUT}",
    _forward,
    _outputs,
    _setup,
    _gradient,
    MoeOptions,
    lambda o: o.returned,
    _native_forward and _forward_natively,
)
