"""moe_mlp, grouped_mlp and grouped_gemm against the specification, over everything they take."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layers import (
    GATED,
    PLAIN,
    ROUTINGS,
    Spec,
    assert_close,
    check_layer,
    draw_inputs,
    expected,
    magnitudes,
    results,
    specs,
)

import intarsia
from intarsia import reference


@given(specs(), st.sampled_from([1, 2]))
def test_moe_mlp(spec, threads):
    """y, dx, dw_up, dw_down, dscores, db_up, db_down, daddend. reports.md 39, 51, 62, 63, 104"""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check_layer(spec)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("activation", GATED + PLAIN)
@pytest.mark.parametrize("score_on", ["output", "inside", "input"])
def test_every_activation_and_score_placement(activation, score_on):
    check_layer(Spec(activation=activation, score_on=score_on, b_down=True, b_up=score_on != "input", addend=True))


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_routing_and_dtype(routing, dtype):
    """Empty experts, all tokens on one, nobody routed at all. reports.md 4, 11, 40, 84, 104"""
    check_layer(Spec(tokens=70, hidden=24, width=20, experts=9, k=3, routing=routing, dtype=dtype))


@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("k", [1, 4])
def test_no_token_and_one_token(tokens, k):
    """reports.md 16"""
    check_layer(Spec(tokens=tokens, k=k, b_up=True, b_down=True, addend=True, mask=True))


@pytest.mark.parametrize("layout", ["concatenated", "interleaved", "pair", ("blocks", 2), ("blocks", 4)])
@pytest.mark.parametrize("transposed", [False, True])
def test_layout_is_declared_and_never_guessed(layout, transposed):
    """2I == H and I == H, where a shape says nothing. reports.md 49, 109"""
    check_layer(Spec(hidden=16, width=8, layout=layout, transposed=transposed, b_up=True))
    check_layer(Spec(hidden=8, width=8, layout=layout, transposed=transposed, b_up=True))


@given(specs(max_tokens=60, max_size=40, max_experts=10))
def test_grouped_mlp_never_reads_slack_rows(spec):
    """Rows past the last offset are NaN and change nothing. reports.md 5, 6, 14, 53"""
    counts = torch.randint(0, 9, (spec.experts,), generator=torch.Generator().manual_seed(spec.seed))
    if spec.routing == "one expert":
        counts[1:] = 0
    used, slack = int(counts.sum()), 7
    spec = Spec(**(vars(spec) | {"tokens": used, "k": 1, "addend": False, "mask": False}))
    inputs = draw_inputs(spec)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    inputs["ids"] = torch.repeat_interleave(torch.arange(spec.experts), counts).unsqueeze(1)

    def grouped(x, ids, scores, w_up, w_down, *, addend, token_mask, **keywords):
        tail = torch.full((slack, spec.hidden), float("nan"), dtype=x.dtype)
        rows = grouped.rows = torch.cat([x, tail])
        s = torch.cat([scores.squeeze(1), torch.full((slack,), float("nan"))])
        out = intarsia.grouped_mlp(rows, offsets, w_up, w_down, row_scores=s, **keywords)
        assert (out[used:] == 0).all()
        return out[:used]

    got = results(grouped, inputs, save=spec.save, **spec.keywords)
    assert_close(got, expected(spec, inputs), magnitudes(spec, inputs), spec.dtype, spec)


def test_gradient_of_slack_rows_is_zero():
    rows = torch.randn(10, 6, requires_grad=True)
    weights = torch.randn(3, 8, 6), torch.randn(3, 6, 4)
    y = intarsia.grouped_mlp(rows, torch.tensor([0, 2, 2, 7]), *weights)
    (drows,) = torch.autograd.grad(y, rows, torch.full_like(y, float("nan")).index_fill(0, torch.arange(7), 1.0))
    assert (drows[7:] == 0).all()
    assert drows[:7].isfinite().all()


def test_grouped_mlp_without_scores_is_with_ones():
    rows, offsets = torch.randn(9, 6), torch.tensor([0, 4, 4, 9])
    weights = torch.randn(3, 8, 6), torch.randn(3, 6, 4)
    assert torch.equal(
        intarsia.grouped_mlp(rows, offsets, *weights),
        intarsia.grouped_mlp(rows, offsets, *weights, row_scores=torch.ones(9)),
    )


@given(st.lists(st.integers(0, 12), min_size=1, max_size=8), st.integers(1, 40), st.integers(1, 40), st.booleans(),
       st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))  # fmt: skip
def test_grouped_gemm(counts, n, m, transposed, dtype):
    """Forward, dgrad and wgrad; the tail is NaN. reports.md 4, 5, 9, 14"""
    e, used = len(counts), sum(counts)
    offsets = torch.tensor([0, *counts]).cumsum(0)
    rows = torch.randn(used + 3, m).to(dtype)
    rows[used:] = float("nan")
    rows.requires_grad_()
    weight = torch.randn(e, *((m, n) if transposed else (n, m))).to(dtype).requires_grad_()
    dout = torch.randn(used + 3, n).to(dtype)
    out = intarsia.grouped_gemm(rows, offsets, weight, transposed=transposed)
    got = dict(zip(("drows", "dweight"), torch.autograd.grad(out, (rows, weight), dout), strict=True)) | {
        "out": out.detach()
    }

    def dense(rows, weight, dout):
        weight = weight.transpose(1, 2) if transposed else weight  # (E, N, M)
        of = torch.repeat_interleave(torch.arange(e), torch.tensor(counts))
        out, drows, dweight = (
            torch.zeros(used + 3, n).double(),
            torch.zeros(used + 3, m).double(),
            torch.zeros_like(weight),
        )
        for i in range(e):
            mine = (of == i).nonzero().squeeze(1)
            out[mine], drows[mine] = rows[mine] @ weight[i].T, dout[mine] @ weight[i]
            dweight[i] = dout[mine].T @ rows[mine]
        return {"out": out, "drows": drows, "dweight": dweight.transpose(1, 2) if transposed else dweight}

    operands = [t.detach().double() for t in (rows, weight, dout)]
    assert_close(got, dense(*operands), dense(*(t.abs() for t in operands)), dtype)


def lists_as_pairs(lists, tokens):
    """(T, E) mask and score of the rows of CSR lists, in float64."""
    e = lists.expert_offsets.shape[0] - 1
    total = int(lists.expert_offsets[-1])
    expert = torch.repeat_interleave(torch.arange(e), lists.counts().long())
    token = lists.row_token[:total].long()
    return token, expert


@pytest.mark.parametrize("rounding", ["up", "down", "nearest", "stochastic", "balanced"])
@pytest.mark.parametrize("score_on", ["output", "inside", "input"])
def test_token_rounding_through_the_whole_layer(rounding, score_on):
    """y and the gradients, down to the logits, of the specification run over the rounded pairs."""
    t, h, i, e, k = 37, 12, 10, 5, 2
    g = torch.Generator().manual_seed(int(torch.randint(2**31, ())))
    shapes = {"x": (t, h), "logits": (t, e), "w_up": (e, 2 * i, h), "w_down": (e, h, i), "b_down": (e, h)}
    tensors = {n: torch.randn(*s, generator=g).requires_grad_() for n, s in shapes.items()}
    v = tensors
    lists = intarsia.round_tokens(v["logits"], k, tile=8, rounding=rounding, seed=3)
    y = intarsia.moe_mlp(v["x"], lists, None, v["w_up"], v["w_down"], b_down=v["b_down"], score_on=score_on)
    dy = torch.randn(t, h, generator=g)
    got = torch.autograd.grad(y, list(v.values()), dy)

    token, expert = lists_as_pairs(lists, t)
    chosen = torch.zeros(t, e, dtype=torch.bool)
    chosen[token, expert] = True
    d = {n: x.detach().double().requires_grad_() for n, x in tensors.items()}
    ids = torch.where(chosen, torch.arange(e), -1)
    ref = reference.moe_mlp(
        d["x"], ids, d["logits"].softmax(1), d["w_up"], d["w_down"], b_down=d["b_down"], score_on=score_on
    )
    torch.testing.assert_close(y.double(), ref, rtol=1e-5, atol=1e-5)
    for name, a, b in zip(v, got, torch.autograd.grad(ref, list(d.values()), dy.double()), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4, msg=lambda m, name=name: f"d{name}: {m}")


def test_lists_of_build_index_in_place_of_ids():
    inputs = draw_inputs(Spec(tokens=30, routing="sentinels"))
    args = [inputs[n] for n in ("scores", "w_up", "w_down")]
    lists = intarsia.build_index(inputs["ids"], 4)
    assert torch.equal(intarsia.moe_mlp(inputs["x"], lists, *args), intarsia.moe_mlp(inputs["x"], inputs["ids"], *args))


def test_inputs_of_any_stride():
    """Views at odd offsets, sliced, transposed, expanded. reports.md 32"""
    spec = Spec(tokens=20, hidden=10, width=6, experts=4, k=2, b_up=True, b_down=True)
    plain = draw_inputs(spec)
    want = results(intarsia.moe_mlp, plain)

    def odd(t):  # same values, one element into a larger buffer, with a gap after every row
        buffer = torch.full((*t.shape[:-1], t.shape[-1] + 3), float("nan"), dtype=t.dtype)
        view = buffer[..., 1:-2]
        return view.copy_(t.detach()).requires_grad_(t.requires_grad) if t.is_floating_point() else t

    strided = {n: odd(v) if isinstance(v, torch.Tensor) and v.is_floating_point() else v for n, v in plain.items()}
    turned = torch.empty(4, 10, 12).transpose(1, 2).copy_(plain["w_up"].detach()).requires_grad_()
    strided["ids"] = torch.cat([plain["ids"], plain["ids"]], 1)[:, :2]
    for changes in ({}, {"w_up": turned}):
        got = results(intarsia.moe_mlp, strided | changes)
        for name in want:
            torch.testing.assert_close(got[name], want[name], msg=lambda m, name=name: f"{name}: {m}")
    broadcast = plain["x"].detach()[:1].expand(20, 10)
    assert torch.equal(
        intarsia.moe_mlp(broadcast, plain["ids"], plain["scores"], plain["w_up"], plain["w_down"]),
        intarsia.moe_mlp(broadcast.contiguous(), plain["ids"], plain["scores"], plain["w_up"], plain["w_down"]),
    )


def test_output_gradient_of_stride_zero():
    spec = Spec(tokens=15)
    a, b = draw_inputs(spec), draw_inputs(spec)
    intarsia.moe_mlp(a["x"], a["ids"], a["scores"], a["w_up"], a["w_down"]).sum().backward()
    y = intarsia.moe_mlp(b["x"], b["ids"], b["scores"], b["w_up"], b["w_down"])
    y.backward(torch.ones_like(y))
    for name in ("x", "scores", "w_up", "w_down"):
        assert torch.equal(a[name].grad, b[name].grad), name
