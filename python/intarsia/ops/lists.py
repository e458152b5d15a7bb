"""build_index and round_tokens: the index lists."""

import torch

from .._core import run
from .define import define, score_dtype
from .router import route_backward


def run_build_index(ids, token_mask, experts, backend):
    expert_offsets, row_token, row_slot, slot_row = lists = fake_build_index(ids, token_mask, experts, backend)
    run(
        "build_index", ids=ids, token_mask=token_mask, expert_offsets=expert_offsets, row_token=row_token,
        row_slot=row_slot, slot_row=slot_row, backend=backend,
    )  # fmt: skip
    return lists


def fake_build_index(ids, token_mask, experts, backend):
    expert_offsets = ids.new_empty((experts + 1,), dtype=torch.int32)
    row_token = ids.new_empty((ids.shape[0] * ids.shape[1],), dtype=torch.int32)
    return expert_offsets, row_token, torch.empty_like(row_token), ids.new_empty(ids.shape, dtype=torch.int32)


build_index = define(
    "build_index(Tensor ids, Tensor? token_mask, int experts, str backend) -> "
    "(Tensor expert_offsets, Tensor row_token, Tensor row_slot, Tensor slot_row)",
    run_build_index,
    fake_build_index,
)


def _round_tokens(logits, token_mask, k, tile, rounding, seed, backend):
    lists = _round_tokens_fake(logits, token_mask, k, tile, rounding, seed, backend)
    names = ("row_score", "expert_offsets", "row_token", "row_slot", "token_offsets", "token_rows")
    run(
        "round_tokens", logits=logits, token_mask=token_mask, experts_per_token=k, tile=tile, rounding=rounding,
        seed=seed, **dict(zip(names, lists, strict=True)), backend=backend,
    )  # fmt: skip
    return lists


def _round_tokens_fake(logits, token_mask, k, tile, rounding, seed, backend):
    tokens, experts = logits.shape
    rows = torch.sym_min(tokens * k + experts * (tile - 1), tokens * experts)
    integers = [logits.new_empty((n,), dtype=torch.int32) for n in (experts + 1, rows, rows, tokens + 1, rows)]
    return logits.new_empty((rows,), dtype=score_dtype(logits.dtype)), *integers


def _round_setup(ctx, inputs, output):
    logits, *_, ctx.backend = inputs
    row_score, expert_offsets, row_token, row_slot, token_offsets, token_rows = output
    ctx.mark_non_differentiable(expert_offsets, row_token, row_slot, token_offsets, token_rows)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, expert_offsets, token_offsets, token_rows, row_score)


def _round_gradient(ctx, dscores, *_):
    if dscores is None:
        return (None,) * 7
    logits, expert_offsets, token_offsets, token_rows, row_score = ctx.saved_tensors
    dlogits = route_backward(
        dscores, row_score, None, None, logits, expert_offsets, token_offsets, token_rows, "softmax", False, 1.0,
        *logits.shape, logits.dtype, ctx.backend,
    )  # fmt: skip
    return (dlogits, *(None,) * 6)


round_tokens = define(
    "round_tokens(Tensor logits, Tensor? token_mask, int k, int tile, str rounding, SymInt seed, str backend) -> "
    "(Tensor row_score, Tensor expert_offsets, Tensor row_token, Tensor row_slot, Tensor token_offsets, Tensor "
    "token_rows)",
    _round_tokens,
    _round_tokens_fake,
    _round_setup,
    _round_gradient,
)
