"""moe_forward: router, lists and experts as one operator, from x to y, and one autograd node.

One node, so that x has one gradient: the router's part is added to the experts' where they wrote it, with no pass over
(T, H) for their sum.

The router's gradients are as exact as its weight. Beside a w_router of x's dtype the logits that backward looks at and
their gradient have that dtype too; beside a float32 one they stay in float32. Only the family whose gradient is dense
over E (softmax) needs logits: kept where they have 16 bits (2TE bytes, for a pass over x) and z is kept too, else
computed again from x and w_router.
"""

import torch

from .define import asked_for, define, keep, kept, nothing, score_dtype, wanted
from .layer import FORWARD_NAMES, KEPT, OPTIONS, WEIGHTS, Preactivations, expert_gradients, fake_layer, run_layer
from .lists import fake_build_index, run_build_index
from .router import fake_logits, fake_route, logits_gradients, route_backward, router_logits, run_logits, run_route

_EXPERTS = FORWARD_NAMES[FORWARD_NAMES.index("w_up") :]  # weights to backend, as layer_forward takes them
_ROUTER = ("x", "w_router", "b_router")
NAMES = (
    *_ROUTER, "expert_bias", "token_mask", "k", "scores_kind", "groups", "top_groups", "renormalise", "scale",
    "input_dtype", "count_nan_tokens", "return_logits", *_EXPERTS,
)  # fmt: skip
_TENSORS = (*_ROUTER, "expert_bias", "token_mask", "w_up", "w_up_second", "w_down", "b_up", "b_down", "addend")
_LISTS = ("expert_offsets", "row_token", "row_slot", "slot_row")
_KEPT = (*KEPT, "w_router", "b_router", "ids", "raw_scores", "logits")
_OPTIONS = (*OPTIONS, "scores_kind", "renormalise", "scale", "input_dtype")


def _composed(logits_of, route_of, index_of, experts_of):
    """The operator of its four steps: their kernels, or their fakes."""

    def forward(x, w_router, b_router, expert_bias, token_mask, k, *rest):
        *choice, input_dtype, count_nan_tokens, return_logits = rest[:8]
        experts, (save_z, _, backend) = rest[8:], rest[-3:]
        logits = logits_of(x, w_router, b_router, input_dtype, backend)
        keeps_logits, rounded_logits = _keeps_logits(x, w_router, choice[0], save_z), None
        if keeps_logits and logits.dtype != x.dtype:
            rounded_logits = torch.empty_like(logits, dtype=x.dtype)
        scores, ids, raw_scores, nan_tokens = route_of(
            logits, expert_bias, token_mask, k, *choice, count_nan_tokens, backend, rounded_logits
        )
        if rounded_logits is None:
            rounded_logits = logits if keeps_logits and not return_logits else nothing(x)
        if not return_logits:  # they need not live beside the experts' memory
            logits = nothing(x)
        lists = index_of(ids, None, w_router.shape[0], backend)
        y, z = experts_of(x, *lists, None, None, scores, *experts)
        return y, z, logits, scores, ids, raw_scores, nan_tokens, rounded_logits, *lists

    return forward


def _backward_dtype(x, w_router):
    """Of the logits that backward looks at."""
    return x.dtype if w_router.dtype == x.dtype else score_dtype(x.dtype)


def _dlogits_dtype(x, w_router):
    """float16 has no room for small gradients: dlogits below 6e-5 would lose bits."""
    return score_dtype(x.dtype) if x.dtype == torch.float16 else _backward_dtype(x, w_router)


def _keeps_logits(x, w_router, scores_kind, save_z):
    return save_z and scores_kind == "softmax" and _backward_dtype(x, w_router).itemsize == 2


def _setup(ctx, inputs, output):
    values = dict(zip(NAMES, inputs, strict=True))
    _, z, logits, scores, ids, raw_scores, nan_tokens, rounded_logits, *lists = output
    without = () if values["return_logits"] else (logits,)
    ctx.mark_non_differentiable(z, *without, ids, raw_scores, nan_tokens, rounded_logits, *lists)
    ctx.set_materialize_grads(False)
    ctx.edges = [name for name in _TENSORS if values[name] is not None]  # in the order of ctx.next_functions
    ctx.z_state = Preactivations("moe", values["overwrite_z"])
    values |= zip(_LISTS, lists, strict=True)
    values["scores"], values["ids"], values["z"] = scores, ids, wanted(values["save_z"], z)
    values["raw_scores"] = wanted(values["scores_kind"] == "sigmoid_group", raw_scores)
    x, w_router = inputs[:2]
    keeps_logits = any(ctx.needs_input_grad[:3]) and _keeps_logits(x, w_router, values["scores_kind"], values["save_z"])
    returned = values["return_logits"] and logits.dtype == x.dtype
    values["logits"] = wanted(keeps_logits, logits if returned else rounded_logits)
    keep(ctx, values, _KEPT, _OPTIONS)


def _gradient(ctx, dy, _dz, dlogits, dscores, *_):
    if dy is not None:
        ctx.z_state.check()
    asked = asked_for(NAMES, ctx.needs_input_grad, ctx.edges, ctx.next_functions)
    values, gradients = kept(ctx, _KEPT), {}
    router = not asked.isdisjoint(_ROUTER)
    if dy is not None:
        gradients = expert_gradients(dy, values, asked | {"scores"} if router else asked, ctx.z_state)
        dscores = _sum(dscores, gradients.pop("scores", None))
        if "addend" in asked:
            gradients["addend"] = dy
    if router and dscores is not None:
        dlogits = _sum(dlogits, _dlogits(dscores, **values))
    if router and dlogits is not None:
        inputs, need = map(values.get, _ROUTER), tuple(name in asked for name in _ROUTER)
        found = logits_gradients(dlogits, *inputs, gradients.get("x"), need, values["backend"])
        gradients |= {name: g for name, g, flag in zip(_ROUTER, found, need, strict=True) if flag}
    return tuple(map(gradients.get, NAMES))


def _dlogits(
    dscores, *, x, w_router, b_router, input_dtype, logits, scores, ids, raw_scores, scores_kind, renormalise, scale,
    backend, **_,
):  # fmt: skip
    if scores_kind == "softmax" and logits is None:
        input_dtype = input_dtype or _backward_dtype(x, w_router) == x.dtype
        logits = router_logits(x, w_router, b_router, input_dtype, backend)
    return route_backward(
        dscores, scores, ids, raw_scores, logits, None, None, None, scores_kind, renormalise, scale, ids.shape[0],
        w_router.shape[0], _dlogits_dtype(x, w_router), backend,
    )  # fmt: skip


def _sum(a, b):
    if a is None or b is None:
        return b if a is None else a
    return a + b


moe_forward = define(
    "moe_forward(Tensor x, Tensor w_router, Tensor? b_router, Tensor? expert_bias, Tensor? token_mask, int k, "
    "str scores_kind, int groups, int top_groups, bool renormalise, float scale, bool input_dtype, "
    f"bool count_nan_tokens, bool return_logits, {WEIGHTS}, Tensor? addend, str activation, str score_on, "
    "bool save_z, bool overwrite_z, str backend) -> "
    "(Tensor y, Tensor z, Tensor logits, Tensor scores, Tensor ids, Tensor raw_scores, "
    "Tensor nan_tokens, Tensor rounded_logits, Tensor expert_offsets, Tensor row_token, Tensor row_slot, "
    "Tensor slot_row)",
    _composed(run_logits, run_route, run_build_index, run_layer),
    _composed(fake_logits, fake_route, fake_build_index, fake_layer),
    _setup,
    _gradient,
)
