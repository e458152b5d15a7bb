"""load_balance_loss and z_loss."""

from .._core import run
from .define import define, score_dtype


def _statistics(logits, *sizes):
    return tuple(logits.new_empty((n,), dtype=score_dtype(logits.dtype)) for n in sizes)


# ---- load_balance_loss


def _balance(logits, ids, token_mask, scores_kind, normalisation, backend):
    loss, expert_fraction, valid_tokens = _statistics(logits, 1, logits.shape[1], 1)
    run(
        "load_balance_loss", logits=logits, ids=ids, token_mask=token_mask, scores_kind=scores_kind,
        normalisation=normalisation, loss=loss, expert_fraction=expert_fraction, valid_tokens=valid_tokens,
        backend=backend,
    )  # fmt: skip
    return loss, expert_fraction, valid_tokens


def _balance_fake(logits, ids, token_mask, scores_kind, normalisation, backend):
    return _statistics(logits, 1, logits.shape[1], 1)


def _balance_backward(dloss, logits, token_mask, expert_fraction, valid_tokens, k, scores_kind, normalisation, backend):
    dlogits = logits.new_empty(logits.shape)
    run(
        "load_balance_loss_backward", dloss=dloss, logits=logits, token_mask=token_mask,
        expert_fraction=expert_fraction, valid_tokens=valid_tokens, experts_per_token=k, scores_kind=scores_kind,
        normalisation=normalisation, dlogits=dlogits, backend=backend,
    )  # fmt: skip
    return dlogits


load_balance_loss_backward = define(
    "load_balance_loss_backward(Tensor dloss, Tensor logits, Tensor? token_mask, Tensor expert_fraction, Tensor "
    "valid_tokens, "
    "int k, str scores_kind, str normalisation, str backend) -> Tensor",
    _balance_backward,
    lambda dloss, logits, *_: logits.new_empty(logits.shape),
)


def _balance_setup(ctx, inputs, output):
    logits, ids, token_mask, ctx.kind, ctx.normalisation, ctx.backend = inputs
    _, expert_fraction, valid_tokens = output
    ctx.k = ids.shape[1]
    ctx.mark_non_differentiable(expert_fraction, valid_tokens)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, token_mask, expert_fraction, valid_tokens)


def _balance_gradient(ctx, dloss, *_):
    if dloss is None:
        return (None,) * 6
    dlogits = load_balance_loss_backward(dloss, *ctx.saved_tensors, ctx.k, ctx.kind, ctx.normalisation, ctx.backend)
    return (dlogits, *(None,) * 5)


load_balance_loss = define(
    "load_balance_loss(Tensor logits, Tensor ids, Tensor? token_mask, str scores_kind, str normalisation, str "
    "backend) -> "
    "(Tensor loss, Tensor expert_fraction, Tensor valid_tokens)",
    _balance,
    _balance_fake,
    _balance_setup,
    _balance_gradient,
)

# ---- z_loss


def _z_loss(logits, token_mask, backend):
    loss, valid_tokens = _statistics(logits, 1, 1)
    run("z_loss", logits=logits, token_mask=token_mask, loss=loss, valid_tokens=valid_tokens, backend=backend)
    return loss, valid_tokens


def _z_loss_backward(dloss, logits, token_mask, valid_tokens, backend):
    dlogits = logits.new_empty(logits.shape)
    run(
        "z_loss_backward", dloss=dloss, logits=logits, token_mask=token_mask, valid_tokens=valid_tokens,
        dlogits=dlogits, backend=backend,
    )  # fmt: skip
    return dlogits


z_loss_backward = define(
    "z_loss_backward(Tensor dloss, Tensor logits, Tensor? token_mask, Tensor valid_tokens, str backend) -> Tensor",
    _z_loss_backward,
    lambda dloss, logits, *_: logits.new_empty(logits.shape),
)


def _z_loss_setup(ctx, inputs, output):
    logits, token_mask, ctx.backend = inputs
    _, valid_tokens = output
    ctx.mark_non_differentiable(valid_tokens)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, token_mask, valid_tokens)


def _z_loss_gradient(ctx, dloss, _):
    if dloss is None:
        return (None,) * 3
    return z_loss_backward(dloss, *ctx.saved_tensors, ctx.backend), None, None


z_loss = define(
    "z_loss(Tensor logits, Tensor? token_mask, str backend) -> (Tensor loss, Tensor valid_tokens)",
    _z_loss,
    lambda logits, *_: _statistics(logits, 1, 1),
    _z_loss_setup,
    _z_loss_gradient,
)
