"""router_logits, route, and both as one operator that keeps no logits for backward."""

import torch

from .._core import run
from .define import define, nothing, score_dtype, wanted

# ---- router_logits: logits = x w_router^T + bias


def _logits(x, w_router, bias, input_dtype, backend):
    logits = _logits_fake(x, w_router, bias, input_dtype, backend)
    run("router_logits", x=x, w_router=w_router, bias=bias, logits=logits, backend=backend)
    return logits


def _logits_fake(x, w_router, bias, input_dtype, backend):
    dtype = x.dtype if input_dtype else score_dtype(x.dtype)
    return x.new_empty((x.shape[0], w_router.shape[0]), dtype=dtype)


def _logits_backward(dlogits, x, w_router, bias, need_x, need_w, need_bias, backend):
    outputs = _logits_backward_fake(dlogits, x, w_router, bias, need_x, need_w, need_bias, backend)
    dx, dw, db = (wanted(flag, t) for flag, t in zip((need_x, need_w, need_bias), outputs, strict=True))
    run(
        "router_logits_backward",
        dlogits=dlogits,
        x=x,
        w_router=w_router,
        add_to_dx=False,
        dx=dx,
        dw_router=dw,
        dbias=db,
        backend=backend,
    )
    return outputs


def _logits_backward_fake(dlogits, x, w_router, bias, need_x, need_w, need_bias, backend):
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if need_x else nothing(x)
    dw = torch.empty_like(w_router) if need_w else nothing(x)
    return dx, dw, torch.empty_like(bias) if need_bias else nothing(x)


router_logits_backward = define(
    "router_logits_backward(Tensor dlogits, Tensor x, Tensor w_router, Tensor? bias, bool need_x, bool need_w, "
    "bool need_bias, "
    "str backend) -> (Tensor, Tensor, Tensor)",
    _logits_backward,
    _logits_backward_fake,
)


def _logits_setup(ctx, inputs, output):
    x, w_router, bias, _, ctx.backend = inputs
    ctx.save_for_backward(x, w_router, bias)


def _logits_gradients(ctx, dlogits, tensors):
    x, w_router, bias = tensors
    need = ctx.needs_input_grad[:3]
    gradients = router_logits_backward(dlogits, x, w_router, bias, *need, ctx.backend)
    return tuple(wanted(flag, g) for flag, g in zip(need, gradients, strict=True))


router_logits = define(
    "router_logits(Tensor x, Tensor w_router, Tensor? bias, bool input_dtype, str backend) -> Tensor",
    _logits,
    _logits_fake,
    _logits_setup,
    lambda ctx, dlogits: (*_logits_gradients(ctx, dlogits, ctx.saved_tensors), None, None),
)

# ---- route: logits -> ids, scores


def _route(logits, expert_bias, token_mask, k, scores_kind, groups, top_groups, renormalise, scale, backend):
    scores, ids, raw_scores, nan_tokens = _route_fake(
        logits, expert_bias, token_mask, k, scores_kind, groups, top_groups, renormalise, scale, backend
    )
    run(
        "route", logits=logits, expert_bias=expert_bias, token_mask=token_mask, scores_kind=scores_kind, groups=groups,
        top_groups=top_groups, renormalise=renormalise, scale=scale, ids=ids, scores=scores,
        raw_scores=wanted(scores_kind == "sigmoid_group", raw_scores), nan_tokens=nan_tokens.zero_(), backend=backend,
    )  # fmt: skip
    return scores, ids, raw_scores, nan_tokens


def _route_fake(logits, expert_bias, token_mask, k, scores_kind, groups, top_groups, renormalise, scale, backend):
    shape, dtype = (logits.shape[0], k), score_dtype(logits.dtype)
    return (
        logits.new_empty(shape, dtype=dtype),
        logits.new_empty(shape, dtype=torch.int32),
        logits.new_empty(shape if scores_kind == "sigmoid_group" else (0, k), dtype=dtype),
        logits.new_empty((1,), dtype=torch.int32),
    )


def _route_backward(
    dscores,
    scores,
    ids,
    raw_scores,
    logits,
    expert_offsets,
    token_offsets,
    token_rows,
    scores_kind,
    renormalise,
    scale,
    tokens,
    experts,
    dtype,
    backend,
):
    dlogits = scores.new_empty((tokens, experts), dtype=dtype)
    run(
        "route_backward", dscores=dscores.contiguous(), scores=scores, ids=ids, raw_scores=raw_scores, logits=logits,
        expert_offsets=expert_offsets, token_offsets=token_offsets, token_rows=token_rows, scores_kind=scores_kind,
        renormalise=renormalise, scale=scale, dlogits=dlogits, backend=backend,
    )  # fmt: skip
    return dlogits


def _route_backward_fake(
    dscores,
    scores,
    ids,
    raw_scores,
    logits,
    expert_offsets,
    token_offsets,
    token_rows,
    scores_kind,
    renormalise,
    scale,
    tokens,
    experts,
    dtype,
    backend,
):
    return scores.new_empty((tokens, experts), dtype=dtype)


route_backward = define(
    "route_backward(Tensor dscores, Tensor scores, Tensor? ids, Tensor? raw_scores, Tensor? logits, Tensor? "
    "expert_offsets, "
    "Tensor? token_offsets, Tensor? token_rows, str scores_kind, bool renormalise, float scale, SymInt tokens, "
    "SymInt experts, "
    "ScalarType dtype, str backend) -> Tensor",
    _route_backward,
    _route_backward_fake,
)


def _route_setup(ctx, inputs, output):
    logits = inputs[0]
    _, _, _, _, ctx.kind, _, _, ctx.renormalise, ctx.scale, ctx.backend = inputs
    scores, ids, raw_scores, nan_tokens = output
    ctx.experts, ctx.dtype = logits.shape[1], logits.dtype
    ctx.mark_non_differentiable(ids, raw_scores, nan_tokens)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(
        ids, scores, raw_scores if ctx.kind == "sigmoid_group" else None, logits if ctx.kind == "softmax" else None
    )


def _route_gradient(ctx, dscores, *_):
    if dscores is None:
        return (None,) * 10
    ids, scores, raw_scores, logits = ctx.saved_tensors
    dlogits = route_backward(
        dscores, scores, ids, raw_scores, logits, None, None, None, ctx.kind, ctx.renormalise, ctx.scale, ids.shape[0],
        ctx.experts, ctx.dtype, ctx.backend,
    )  # fmt: skip
    return (dlogits, *(None,) * 9)


route = define(
    "route(Tensor logits, Tensor? expert_bias, Tensor? token_mask, int k, str scores_kind, int groups, int top_groups, "
    "bool renormalise, float scale, str backend) -> (Tensor scores, Tensor ids, Tensor raw_scores, Tensor nan_tokens)",
    _route,
    _route_fake,
    _route_setup,
    _route_gradient,
)

# ---- router: both. Backward needs x and w_router anyway and recomputes the logits where the family's gradient is
# dense over E.


def _router(
    x,
    w_router,
    bias,
    expert_bias,
    token_mask,
    k,
    scores_kind,
    groups,
    top_groups,
    renormalise,
    scale,
    input_dtype,
    backend,
):
    logits = _logits(x, w_router, bias, input_dtype, backend)
    return logits, *_route(
        logits, expert_bias, token_mask, k, scores_kind, groups, top_groups, renormalise, scale, backend
    )


def _router_fake(
    x,
    w_router,
    bias,
    expert_bias,
    token_mask,
    k,
    scores_kind,
    groups,
    top_groups,
    renormalise,
    scale,
    input_dtype,
    backend,
):
    logits = _logits_fake(x, w_router, bias, input_dtype, backend)
    return logits, *_route_fake(
        logits, expert_bias, token_mask, k, scores_kind, groups, top_groups, renormalise, scale, backend
    )


def _router_setup(ctx, inputs, output):
    x, w_router, bias = inputs[:3]
    _, _, _, _, _, _, ctx.kind, _, _, ctx.renormalise, ctx.scale, ctx.input_dtype, ctx.backend = inputs
    logits, scores, ids, raw_scores, nan_tokens = output
    ctx.dtype = logits.dtype
    ctx.mark_non_differentiable(ids, raw_scores, nan_tokens)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, w_router, bias, ids, scores, raw_scores if ctx.kind == "sigmoid_group" else None)


def _router_gradient(ctx, dlogits, dscores, *_):
    *inputs, ids, scores, raw_scores = ctx.saved_tensors
    if dscores is not None:
        logits = router_logits(*inputs, ctx.input_dtype, ctx.backend) if ctx.kind == "softmax" else None
        from_scores = route_backward(
            dscores, scores, ids, raw_scores, logits, None, None, None, ctx.kind, ctx.renormalise, ctx.scale,
            ids.shape[0], inputs[1].shape[0], score_dtype(ctx.dtype), ctx.backend,
        )  # fmt: skip
        dlogits = from_scores if dlogits is None else from_scores + dlogits
    if dlogits is None:
        return (None,) * 13
    return (*_logits_gradients(ctx, dlogits, inputs), *(None,) * 10)


router = define(
    "router(Tensor x, Tensor w_router, Tensor? bias, Tensor? expert_bias, Tensor? token_mask, int k, str "
    "scores_kind, int groups, "
    "int top_groups, bool renormalise, float scale, bool input_dtype, str backend) -> "
    "(Tensor logits, Tensor scores, Tensor ids, Tensor raw_scores, Tensor nan_tokens)",
    _router,
    _router_fake,
    _router_setup,
    _router_gradient,
)
