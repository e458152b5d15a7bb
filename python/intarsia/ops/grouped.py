"""grouped_gemm: rows of expert e times the transpose of weight[e], and its gradients."""

import torch

from .._core import run
from .define import define, nothing, wanted

# The core reads these row buffers with unit stride along a row. Rows past the last offset belong to no expert: their
# results are zeros, so fresh memory never reaches the caller.


def _dense(rows):
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _forward(rows, expert_offsets, weight, transposed, backend):
    out = rows.new_zeros((rows.shape[0], weight.shape[2 if transposed else 1]))
    run(
        "down_forward", a=_dense(rows), expert_offsets=expert_offsets, w_down=weight, w_down_transposed=transposed,
        score_on="output", rows=out, backend=backend,
    )  # fmt: skip
    return out


def _forward_fake(rows, expert_offsets, weight, transposed, backend):
    return rows.new_empty((rows.shape[0], weight.shape[2 if transposed else 1]))


def _backward(dout, rows, expert_offsets, weight, transposed, need_rows, need_weight, backend):
    drows, dweight = nothing(rows), nothing(rows)
    if need_rows:
        drows = rows.new_zeros(rows.shape)
        run(
            "up_backward", dz=_dense(dout), expert_offsets=expert_offsets, w_up=weight, w_up_gate_block=0,
            w_up_transposed=transposed, dx_rows=drows, backend=backend,
        )  # fmt: skip
    if need_weight:
        dweight = torch.empty_like(weight)
        run(
            "down_weight_backward", dy=dout, a_scaled=_dense(rows), expert_offsets=expert_offsets, accumulate=False,
            grad_scale=1.0, dw_down=dweight, dw_down_transposed=transposed, backend=backend,
        )  # fmt: skip
    return drows, dweight


def _backward_fake(dout, rows, expert_offsets, weight, transposed, need_rows, need_weight, backend):
    return (
        rows.new_empty(rows.shape) if need_rows else nothing(rows),
        torch.empty_like(weight) if need_weight else nothing(rows),
    )


grouped_gemm_backward = define(
    "grouped_gemm_backward(Tensor dout, Tensor rows, Tensor expert_offsets, Tensor weight, bool transposed, bool "
    "need_rows, "
    "bool need_weight, str backend) -> (Tensor, Tensor)",
    _backward,
    _backward_fake,
)


def _setup(ctx, inputs, output):
    rows, expert_offsets, weight, ctx.transposed, ctx.backend = inputs
    ctx.save_for_backward(rows, expert_offsets, weight)


def _gradient(ctx, dout):
    need_rows, _, need_weight, *_ = ctx.needs_input_grad
    rows, expert_offsets, weight = ctx.saved_tensors
    drows, dweight = grouped_gemm_backward(
        dout, rows, expert_offsets, weight, ctx.transposed, need_rows, need_weight, ctx.backend
    )
    return wanted(need_rows, drows), None, wanted(need_weight, dweight), None, None


grouped_gemm = define(
    "grouped_gemm(Tensor rows, Tensor expert_offsets, Tensor weight, bool transposed, str backend) -> Tensor",
    _forward,
    _forward_fake,
    _setup,
    _gradient,
)
