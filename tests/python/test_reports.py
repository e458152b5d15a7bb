"""Reported faults that no other test shows, by their rows in docs/reports.md."""

import ctypes
import mmap

import pytest
import torch
import torch.nn.functional as F
from layers import Spec, check_layer, draw_inputs, expected, results

import intarsia


def weights(e, h, i, dtype=torch.float32):
    return (torch.randn(e, 2 * i, h, dtype=dtype) / h**0.5).requires_grad_(), (
        torch.randn(e, h, i, dtype=dtype) / i**0.5
    ).requires_grad_()


def per_expert(rows, counts, w_up, w_down):
    """Loop over experts of sorted rows."""
    out = []
    for e, part in enumerate(rows.split(counts)):
        gate, up = (part @ w_up[e].T).chunk(2, -1)
        out.append(F.silu(gate) * up @ w_down[e].T)
    return torch.cat(out)


COUNTS = {
    37: ([128, 130, 65], [1, 127, 129], [63, 0, 65]),
    15: (list(range(1, 128)),),
    86: ([1000, 1, 1, 1],),
    11: ([4, 4, 0], [0, 4, 4], [4, 0, 4], [0, 64, 0, 0]),
    39: ([63, 1, 17, 40],),
}


@pytest.mark.parametrize(
    "counts", [c for some in COUNTS.values() for c in some], ids=lambda c: f"{c[0]}-{len(c)}-{sum(c)}"
)
def test_counts(counts):
    """Every expert on its own, forward and backward, poisoned. reports.md 4, 11, 15, 37, 39, 86"""
    e, h, i = len(counts), 16, 12
    w_up, w_down = weights(e, h, i)
    rows = torch.randn(sum(counts), h, requires_grad=True)
    offsets = torch.tensor([0, *counts]).cumsum(0)
    dy = torch.randn(sum(counts), h)
    torch.use_deterministic_algorithms(True)  # fresh memory is NaN
    try:
        y = intarsia.grouped_mlp(rows, offsets, w_up, w_down)
        got = [y, *torch.autograd.grad(y, (rows, w_up, w_down), dy)]
    finally:
        torch.use_deterministic_algorithms(False)
    doubles = [t.detach().double().requires_grad_() for t in (rows, w_up, w_down)]
    want = per_expert(doubles[0], counts, *doubles[1:])
    want = [want, *torch.autograd.grad(want, doubles, dy.double())]
    for name, a, b in zip(("y", "drows", "dw_up", "dw_down"), got, want, strict=True):
        of = lambda t, e: t.split(counts)[e] if name in ("y", "drows") else t[e]  # noqa: B023, E731
        for expert in range(e):
            torch.testing.assert_close(of(a, expert).double(), of(b, expert), rtol=1e-4, atol=1e-4)


def test_three_steps_with_slack_and_poisoned_memory():
    """Slots without a row present, freed memory full of NaN between steps: as a run without them. reports.md 7"""

    def train(slack):
        torch.manual_seed(1)
        w_up, w_down = weights(4, 16, 8)
        optimizer = torch.optim.SGD([w_up, w_down], lr=0.1)
        gradients = []
        for _ in range(3):
            x, ids, s = torch.randn(30, 16), torch.randint(0, 4, (30, 2)), torch.rand(30, 2)
            if slack:  # one more slot per token that is "not here"
                ids, s = (
                    torch.cat([ids, torch.full((30, 1), 4)], 1),
                    torch.cat([s, torch.full((30, 1), float("nan"))], 1),
                )
            optimizer.zero_grad()
            intarsia.moe_mlp(x, ids, s, w_up, w_down).square().sum().backward()
            gradients += [w_up.grad.clone(), w_down.grad.clone()]
            optimizer.step()
            for n in (64, 480, 960, 2000, 7680):
                torch.full((n,), float("nan"))
        return gradients

    for a, b in zip(train(False), train(True), strict=True):
        assert a.isfinite().all()
        assert torch.equal(a, b)


def test_other_tokens_rows_never_reach_a_token():
    """Token 0 keeps its bits when slots of other tokens go elsewhere or nowhere. reports.md 6"""
    inputs = draw_inputs(Spec(tokens=40, experts=6, k=3))
    args = [inputs[n] for n in ("scores", "w_up", "w_down")]
    first = intarsia.moe_mlp(inputs["x"], inputs["ids"], *args)[0]
    for value in (-1, 6, 2):
        ids = inputs["ids"].clone()
        ids[1:] = value
        assert torch.equal(first, intarsia.moe_mlp(inputs["x"], ids, *args)[0])


def test_sixteen_thousand_odd_tokens():
    """T = 16333, K = 1. reports.md 33"""
    counts_in = torch.randint(0, 3, (16333, 1))
    w_up, w_down = weights(3, 16, 8)
    x = torch.randn(16333, 16)
    y = intarsia.moe_mlp(x, counts_in, torch.ones(16333, 1), w_up, w_down)
    order = counts_in.flatten().sort(stable=True).indices
    want = per_expert(x[order], torch.bincount(counts_in.flatten()).tolist(), w_up, w_down)
    torch.testing.assert_close(y[order], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_qwen3_sizes_at_small_batches(dtype):
    """H = 2048, I = 768, E = 128, K = 8; the experts share one weight, so the answer is one MLP. reports.md 35"""
    w_up, w_down = (w.detach() for w in weights(1, 2048, 768, dtype))
    for tokens in (1, 2, 3, 17, 100, 300):
        x = torch.randn(tokens, 2048, dtype=dtype)
        ids, s = intarsia.route(torch.randn(tokens, 128), 8, scores="softmax_renorm")
        y = intarsia.moe_mlp(x, ids, s, w_up.expand(128, -1, -1), w_down.expand(128, -1, -1))
        want = per_expert(x.double(), [tokens], w_up.double(), w_down.double())
        assert (y.double() - want).norm() <= (1e-5 if dtype == torch.float32 else 1e-2) * want.norm()


def at_the_end_of_a_page(tensor):
    """The same tensor in memory that ends where an unreadable page begins: one element too far is a crash."""
    page, size = mmap.PAGESIZE, tensor.numel() * tensor.element_size()
    length = -(-size // page) * page
    area = mmap.mmap(-1, length + page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    assert ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(address + length), page, 0) == 0
    view = torch.frombuffer(area, dtype=tensor.dtype, count=tensor.numel(), offset=length - size).view(tensor.shape)
    return view.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nothing_is_read_past_its_end(dtype):
    """Every input at the end of its memory, sizes that divide nothing. reports.md 44, 45"""
    for spec in (
        Spec(
            tokens=33, hidden=17, width=11, experts=5, k=2, dtype=dtype, b_up=True, b_down=True, addend=True, mask=True
        ),
        Spec(tokens=3, hidden=5, width=3, experts=1, k=1, dtype=dtype),
    ):
        inputs = draw_inputs(spec)
        guarded = {n: at_the_end_of_a_page(v) if isinstance(v, torch.Tensor) else v for n, v in inputs.items()}
        got, want = results(intarsia.moe_mlp, guarded), results(intarsia.moe_mlp, inputs)
        assert all(torch.equal(got[n], want[n]) for n in want)
    rows, offsets = (
        at_the_end_of_a_page(torch.randn(7, 5)),
        at_the_end_of_a_page(torch.tensor([0, 7], dtype=torch.int32)),
    )
    intarsia.grouped_gemm(rows, offsets, at_the_end_of_a_page(torch.randn(1, 3, 5)))


def test_bias_of_the_down_projection_is_weighted_by_the_score():
    """b_down = 1, scores summing to 1: y shifts by exactly 1. reports.md 52"""
    x, (w_up, w_down) = torch.zeros(20, 8), weights(4, 8, 6)
    ids = torch.rand(20, 4).argsort(1)[:, :2]
    s = torch.tensor([0.25, 0.75]).expand(20, 2)
    assert (intarsia.moe_mlp(x, ids, s, w_up, w_down, b_down=torch.ones(4, 8)) == 1).all()


def test_gradient_along_a_random_direction():
    """dx alone, by a finite difference in float64 against the float32 gradient. reports.md 51"""
    inputs = draw_inputs(Spec(tokens=60, hidden=48, width=32, experts=8, k=2))
    dx = results(intarsia.moe_mlp, inputs)["dx"].double()
    direction, step = torch.randn(60, 48, dtype=torch.float64), 1e-5
    spec = Spec(tokens=60, hidden=48, width=32, experts=8, k=2)

    def value(sign):
        moved = inputs | {"x": (inputs["x"].detach().double() + sign * step * direction).requires_grad_()}
        return (expected(spec, moved)["y"] * inputs["dy"].double()).sum()

    difference = (value(1) - value(-1)) / (2 * step)
    assert abs((dx * direction).sum() - difference) <= 1e-4 * (dx.norm() * direction.norm())


def test_dx_of_many_wide_rows():
    """T = 8192, H = 2048, E = 16, K = 4 in float32 at 1e-5. reports.md 62"""
    t, h, i, e, k = 8192, 2048, 2, 16, 4
    w_up, w_down = weights(e, h, i)
    ids = torch.rand(t, e).argsort(1)[:, :k]
    s, dy = torch.rand(t, k), torch.randn(t, h)
    x = torch.randn(t, h, requires_grad=True)
    (dx,) = torch.autograd.grad(intarsia.moe_mlp(x, ids, s, w_up, w_down), x, dy)
    sample = torch.randint(0, t, (200,))
    xs = x.detach()[sample].double().requires_grad_()
    y = 0
    for slot in range(k):
        chosen = ids[sample, slot]
        gate, up = torch.einsum("th,tfh->tf", xs, w_up.detach()[chosen].double()).chunk(2, -1)
        y = y + s[sample, slot, None].double() * torch.einsum(
            "ti,thi->th", F.silu(gate) * up, w_down.detach()[chosen].double()
        )
    (want,) = torch.autograd.grad(y, xs, dy[sample].double())
    assert (dx[sample].double() - want).norm() <= 1e-5 * want.norm()


@pytest.mark.parametrize("k", [1, 2, 8])
def test_gradient_norm(k):
    """Equal to the specification's at K = 1, 2, 8. reports.md 63"""
    spec = Spec(tokens=50, hidden=24, width=16, experts=8, k=k)
    inputs = draw_inputs(spec)
    norms = [
        torch.stack([t.double().norm() for n, t in r.items() if n != "y"]).norm()
        for r in (results(intarsia.moe_mlp, inputs), expected(spec, inputs))
    ]  # fmt: skip
    torch.testing.assert_close(*norms, rtol=1e-5, atol=0)


def test_five_tokens_on_one_of_four_experts():
    """reports.md 84"""
    check_layer(Spec(tokens=5, experts=4, k=1, routing="one expert"))
