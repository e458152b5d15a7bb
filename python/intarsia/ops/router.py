"""router_logits and route: from x to the chosen experts and their scores."""

import torch

from .._core import run
from .define import define, eager, score_dtype, wanted

# ---- router_logits: logits = x w_router^T + bias


def run_logits(x, w_router, bias, input_dtype, backend):
    logits = fake_logits(x, w_router, bias, input_dtype, backend)
    run("router_logits", x=x, w_router=w_router, bias=bias, logits=logits, backend=backend)
    return logits


def fake_logits(x, w_router, bias, input_dtype, backend):
    dtype = x.dtype if input_dtype else score_dtype(x.dtype)
    return x.new_empty((x.shape[0], w_router.shape[0]), dtype=dtype)


def _logits_backward(dlogits, x, w_router, bias, addend, need_x, need_w, need_bias, backend):
    dx = None if addend is None else addend.clone(memory_format=torch.contiguous_format)
    return _run_logits_backward(dlogits, x, w_router, bias, dx, (need_x, need_w, need_bias), backend)


def _logits_backward_fake(dlogits, x, w_router, bias, addend, need_x, need_w, need_bias, backend):
    return _gradient_buffers(x, w_router, bias, None, (need_x, need_w, need_bias))


def _run_logits_backward(dlogits, x, w_router, bias, dx, need, backend) -> tuple:
    """Adds to dx where it is there."""
    add_to_dx = dx is not None
    dx, dw_router, dbias = gradients = _gradient_buffers(x, w_router, bias, dx, need)
    run(
        "router_logits_backward", dlogits=dlogits, x=x, w_router=w_router, add_to_dx=add_to_dx, dx=dx,
        dw_router=dw_router, dbias=dbias, backend=backend,
    )  # fmt: skip
    return gradients


def weight_gradient(w_router) -> torch.Tensor:
    """Memory for it, in w_router's strides where its rows are dense, which is what the core writes."""
    dense = w_router.stride(-1) == 1
    return torch.empty_like(w_router, memory_format=torch.preserve_format if dense else torch.contiguous_format)


def _gradient_buffers(x, w_router, bias, dx, need) -> tuple:
    """None for a gradient that is not needed."""
    need_x, need_w, need_bias = need
    if dx is None and need_x:
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dw_router = weight_gradient(w_router) if need_w else None
    return dx, dw_router, torch.empty_like(bias) if need_bias else None


router_logits_backward = define(
    "router_logits_backward(Tensor dlogits, Tensor x, Tensor w_router, Tensor? bias, Tensor? addend, bool need_x, "
    "bool need_w, bool need_bias, str backend) -> (Tensor, Tensor, Tensor)",
    _logits_backward,
    _logits_backward_fake,
)


def logits_gradients(dlogits, x, w_router, bias, dx, need, backend) -> tuple:
    """Those of x, w_router and bias that are needed. `dx`, x's gradient so far and the caller's alone, may take x's in
    its place: no pass over (T, H) adds the two.
    """
    if dx is not None and eager():
        return _run_logits_backward(dlogits, x, w_router, bias, dx, need, backend)
    return router_logits_backward(dlogits, x, w_router, bias, dx, *need, backend)


def _logits_setup(ctx, inputs, output):
    x, w_router, bias, _, ctx.backend = inputs
    ctx.save_for_backward(x, w_router, bias)


def _logits_gradient(ctx, dlogits):
    need = ctx.needs_input_grad[:3]
    gradients = logits_gradients(dlogits, *ctx.saved_tensors, None, need, ctx.backend)
    return (*map(wanted, need, gradients), None, None)


router_logits = define(
    "router_logits(Tensor x, Tensor w_router, Tensor? bias, bool input_dtype, str backend) -> Tensor",
    run_logits,
    fake_logits,
    _logits_setup,
    _logits_gradient,
)

# ---- route: logits -> ids, scores


def run_route(
    logits, expert_bias, token_mask, k, scores_kind, groups, top_groups, renormalise, scale, count_nan_tokens, backend
):
    scores, ids, raw_scores, nan_tokens = fake_route(
        logits, expert_bias, token_mask, k, scores_kind, groups, top_groups, renormalise, scale, count_nan_tokens,
        backend,
    )  # fmt: skip
    run(
        "route", logits=logits, expert_bias=expert_bias, token_mask=token_mask, scores_kind=scores_kind, groups=groups,
        top_groups=top_groups, renormalise=renormalise, scale=scale, ids=ids, scores=scores,
        raw_scores=wanted(scores_kind == "sigmoid_group", raw_scores),
        nan_tokens=nan_tokens.zero_() if count_nan_tokens else None, backend=backend,
    )  # fmt: skip
    return scores, ids, raw_scores, nan_tokens


def fake_route(
    logits, expert_bias, token_mask, k, scores_kind, groups, top_groups, renormalise, scale, count_nan_tokens, backend
):
    shape, dtype = (logits.shape[0], k), score_dtype(logits.dtype)
    return (
        logits.new_empty(shape, dtype=dtype),
        logits.new_empty(shape, dtype=torch.int32),
        logits.new_empty(shape if scores_kind == "sigmoid_group" else (0, k), dtype=dtype),
        logits.new_empty((1 if count_nan_tokens else 0,), dtype=torch.int32),
    )


def _route_backward(
    dscores, scores, ids, raw_scores, logits, expert_offsets, token_offsets, token_rows, scores_kind, renormalise,
    scale, tokens, experts, dtype, backend,
):  # fmt: skip
    dlogits = scores.new_empty((tokens, experts), dtype=dtype)
    run(
        "route_backward", dscores=dscores.contiguous(), scores=scores, ids=ids, raw_scores=raw_scores, logits=logits,
        expert_offsets=expert_offsets, token_offsets=token_offsets, token_rows=token_rows, scores_kind=scores_kind,
        renormalise=renormalise, scale=scale, dlogits=dlogits, backend=backend,
    )  # fmt: skip
    return dlogits


def _route_backward_fake(_, scores, *rest):
    tokens, experts, dtype, _ = rest[-4:]
    return scores.new_empty((tokens, experts), dtype=dtype)


route_backward = define(
    "route_backward(Tensor dscores, Tensor scores, Tensor? ids, Tensor? raw_scores, Tensor? logits, "
    "Tensor? expert_offsets, Tensor? token_offsets, Tensor? token_rows, str scores_kind, bool renormalise, "
    "float scale, SymInt tokens, SymInt experts, ScalarType dtype, str backend) -> Tensor",
    _route_backward,
    _route_backward_fake,
)


def _route_setup(ctx, inputs, output):
    logits = inputs[0]
    _, _, _, _, ctx.kind, _, _, ctx.renormalise, ctx.scale, _, ctx.backend = inputs
    scores, ids, raw_scores, nan_tokens = output
    ctx.experts, ctx.dtype = logits.shape[1], logits.dtype
    ctx.mark_non_differentiable(ids, raw_scores, nan_tokens)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(
        ids, scores, raw_scores if ctx.kind == "sigmoid_group" else None, logits if ctx.kind == "softmax" else None
    )


def _route_gradient(ctx, dscores, *_):
    if dscores is None:
        return (None,) * 11
    ids, scores, raw_scores, logits = ctx.saved_tensors
    dlogits = route_backward(
        dscores, scores, ids, raw_scores, logits, None, None, None, ctx.kind, ctx.renormalise, ctx.scale, ids.shape[0],
        ctx.experts, ctx.dtype, ctx.backend,
    )  # fmt: skip
    return (dlogits, *(None,) * 10)


route = define(
    "route(Tensor logits, Tensor? expert_bias, Tensor? token_mask, int k, str scores_kind, int groups, int top_groups, "
    "bool renormalise, float scale, bool count_nan_tokens, str backend) -> "
    "(Tensor scores, Tensor ids, Tensor raw_scores, Tensor nan_tokens)",
    run_route,
    fake_route,
    _route_setup,
    _route_gradient,
)
