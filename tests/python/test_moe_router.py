"""intarsia.moe: how exact its router's gradients are, and what is kept for them."""

import pytest
import torch
from moe_layers import FAMILIES, Calls, assert_same, gradients, parts, problem, whole

import intarsia
from intarsia import _core, losses, ops

HALF = (torch.bfloat16, torch.float16)


def dlogits_dtype(router: torch.dtype) -> torch.dtype:
    """float16 has no room for small gradients."""
    return torch.float32 if router == torch.float16 else router


# ---- how exact they are


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("router", [torch.float32, None])
def test_logits_in_the_dtype_of_x(family, router):
    """They decide as those of the parts do, and with a router of that dtype their gradient is that of the parts; beside
    one in float32 it stays there, where the parts round it.
    """
    arguments, keywords, leaves = problem(60, 32, 16, dtype=torch.bfloat16, family=family, router=router)
    keywords["logits_dtype"] = "input"
    got, want = whole(*arguments, **keywords), parts(*arguments, **keywords)
    assert got[1].dtype == torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    got, want = gradients(got[0], leaves), gradients(want[0], leaves)
    if router is None:
        assert_same(got, want, leaves, torch.bfloat16)
    else:
        assert all((a - b).norm() <= 2**-6 * b.norm() for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", HALF)
def test_gradient_of_x_is_no_worse_than_that_of_the_parts(dtype):
    """Against float64: what is summed where it is written is rounded less often."""
    arguments, keywords, leaves = problem(200, 64, 32, 8, dtype=dtype, family="sigmoid")
    dy, errors = torch.randn(200, 64).to(dtype), []
    ids = whole(*arguments, **keywords)[2]
    double = [t.detach().double().requires_grad_() if isinstance(t, torch.Tensor) else t for t in arguments]
    wide = {n: t.detach().double() if isinstance(t, torch.Tensor) else t for n, t in keywords.items()}
    y, _, same, _ = parts(*double, reference_=True, **wide)
    clear = (ids == same).all(1)  # a choice may differ where rounding decides
    assert clear.float().mean() > 0.9
    (want,) = gradients(y, double[:1], dy.double())
    for layer in (whole, parts):
        (dx,) = gradients(layer(*arguments, **keywords)[0], [leaves["x"]], dy)
        errors.append((dx[clear].double() - want[clear]).norm())
    assert errors[0] <= 1.05 * errors[1]


@pytest.mark.parametrize("dtype", HALF)
def test_a_loss_of_the_logits_keeps_float32(dtype):
    """Its part of dlogits is added to the rounded one in float32."""
    arguments, keywords, leaves = problem(dtype=dtype)
    y, logits, _, _ = whole(*arguments, **keywords)
    with Calls() as calls:
        gradients(y.sum() + losses.z_loss(logits), leaves)
    seen = dict(calls.seen)
    assert seen["route_backward"]["dlogits"].dtype == dlogits_dtype(dtype)
    assert seen["router_logits_backward"]["dlogits"].dtype == torch.float32


# ---- what is kept for them


def held(function):
    """function() and the tensors that autograd keeps for its backward."""
    tensors = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: tensors.append(t) or t, lambda t: t):
        return function(), tensors


# dtype of x, of the router's weight, of the logits; save; whether softmax keeps its logits
CASES = [
    *((dtype, None, logits, "preactivation", True) for dtype in HALF for logits in ("float32", "input")),
    (torch.bfloat16, None, "float32", "input", False),
    (torch.bfloat16, torch.float32, "float32", "preactivation", False),
    (torch.bfloat16, torch.float32, "input", "preactivation", False),
    (torch.float32, None, "float32", "preactivation", False),
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "router", "logits_dtype", "save", "keeps"), CASES)
def test_only_softmax_needs_logits(family, dtype, router, logits_dtype, save, keeps):
    """Kept in the router's 16 bits, or computed again; their gradient in the dtype of the router's weight."""
    arguments, keywords, leaves = problem(family=family, dtype=dtype, router=router)
    y, tensors = held(lambda: intarsia.moe(*arguments, save=save, logits_dtype=logits_dtype, **keywords))
    with Calls() as calls:
        gradients(y, leaves)
    softmax = family == "softmax"
    assert [t.dtype for t in tensors if t.shape == (20, 6)] == [dtype] * (softmax and keeps)
    fields = dict(calls.seen)["moe_backward"]
    assert (fields["logits"] is not None) == (softmax and keeps)
    assert getattr(torch, fields["dlogits_dtype"]) == dlogits_dtype(arguments[1].dtype)


@pytest.mark.parametrize("learns", ["x", "w_router", "b_router", "w_up", "w_down", "addend"])
def test_logits_are_kept_for_the_router_alone(learns):
    """Not where no gradient can reach it."""
    arguments, keywords, leaves = problem(dtype=torch.bfloat16)
    for name, value in leaves.items():
        value.requires_grad_(name == learns)
    _, tensors = held(lambda: intarsia.moe(*arguments, **keywords))
    assert any(t.shape == (20, 6) for t in tensors) == (learns in ("x", "w_router", "b_router"))


@pytest.mark.parametrize("logits_dtype", ["float32", "input"])
def test_lists_alone_leave_the_logits_out(logits_dtype):
    """return_routing="lists": the same y, gradients and lists, and no logits beside them."""
    arguments, keywords, leaves = problem(dtype=torch.bfloat16)
    y, routing = intarsia.moe(*arguments, return_routing="lists", logits_dtype=logits_dtype, **keywords)
    want, full = intarsia.moe(*arguments, return_routing=True, logits_dtype=logits_dtype, **keywords)
    assert routing.logits.numel() == 0
    assert full.logits.shape == (20, 6)
    assert torch.equal(y, want)
    assert torch.equal(routing.ids, full.ids)
    assert all(torch.equal(a, b) for a, b in zip(gradients(y, leaves), gradients(want, leaves), strict=True))


# ---- gradients in memory


def padded(t):
    """The same values with room behind each row."""
    return torch.nn.functional.pad(t, (0, 3))[..., : t.shape[-1]]


def turned(t):
    """The same values, the last two axes the other way round in memory."""
    return t.mT.contiguous().mT


@pytest.mark.skipif(_core.binding()[0] != "shim", reason="needs the shim")
@pytest.mark.parametrize("strides", [torch.Tensor.contiguous, padded, turned])
@pytest.mark.parametrize("asked", [[0], [1, 3], [2], [0, 1, 2, 3]])
def test_gradients_are_made_alike(strides, asked, monkeypatch):
    """By the shim, and by Python for the C interface, of weights of any strides: the same tensors with the same strides
    and bits.
    """
    shapes = (9, 16), (6, 16), (6, 24, 16), (6, 16, 12)  # x, w_router, w_up, w_down
    leaves = [strides(torch.randn(shape)).requires_grad_() for shape in shapes]
    x, w_router, w_up, w_down = leaves
    y, dy = intarsia.moe(x, w_router, 2, w_up, w_down, scores="softmax"), torch.randn(9, 16)
    wanted = [leaves[i] for i in asked]
    got = torch.autograd.grad(y, wanted, dy, retain_graph=True)
    monkeypatch.setattr(ops.moe, "_native_backward", None)
    want = torch.autograd.grad(y, wanted, dy)
    for a, b in zip(got, want, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        assert torch.equal(a, b)


@pytest.mark.parametrize("strides", [padded, turned])
def test_router_weight_of_any_strides(strides):
    x, w = torch.randn(9, 16), strides(torch.randn(6, 16)).requires_grad_()
    dlogits = torch.randn(9, 6)
    (got,) = torch.autograd.grad(intarsia.router_logits(x, w), w, dlogits)
    assert torch.allclose(got, dlogits.mT @ x, atol=1e-5)
