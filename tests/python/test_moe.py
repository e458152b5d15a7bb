"""intarsia.moe: the whole layer as one node, against its parts and against the specification (its router's gradients
also in test_moe_router.py).
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layers import draw_inputs, specs
from moe_layers import (
    FAMILIES,
    Calls,
    arguments_of,
    assert_same,
    gradients,
    gradients_of,
    parts,
    problem,
    router_sizes,
    whole,
)
from torch.utils._python_dispatch import TorchDispatchMode

import intarsia
from intarsia import losses, reference
from intarsia.errors import InvalidArgument

# ---- the whole is its parts


@given(
    specs(max_tokens=80, max_size=40, max_experts=12),
    st.sampled_from(FAMILIES),
    st.sampled_from([torch.float32, None]),
    st.booleans(),
    st.booleans(),
)
def test_moe_is_its_parts(spec, family, router, aux, scores_too):
    """Every family, layout, activation, bias, mask and mode; the logits in a loss and the scores elsewhere, or not.
    Beside a router of 16 bits dlogits are rounded to them, beside one in float32 nothing is.
    """
    arguments, keywords, leaves = arguments_of(spec, family, draw_inputs(spec), router)
    g = torch.Generator().manual_seed(spec.seed)
    dy, ds = (torch.randn(spec.tokens, n, generator=g) for n in (spec.hidden, spec.k))
    results = []
    for layer in (whole, parts):
        y, logits, ids, scores = layer(*arguments, save=spec.save, **keywords)
        loss = (y * dy).sum()
        loss = loss + losses.load_balance_loss(logits, ids, scores=family) if aux else loss
        loss = loss + (scores * ds).sum() if scores_too else loss
        results.append((y, logits, ids, scores, gradients(loss, leaves, retain_graph=True)))
    (*got, got_gradients), (*want, want_gradients) = results
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    x, w_router, *_ = arguments
    dlogits, dscores = gradients(loss, (logits, scores))
    sizes = router_sizes(x, w_router, family, logits, dlogits, ids, dscores)
    assert_same(got_gradients, want_gradients, leaves, spec.dtype, sizes)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("score_on", ["output", "inside"])
def test_moe_is_the_specification(family, score_on):
    """y and every gradient in float64, losses included."""
    arguments, keywords, leaves = problem(dtype=torch.float64, family=family, score_on=score_on, mask=True)
    if "expert_bias" in keywords:
        keywords["expert_bias"] = keywords["expert_bias"].double()
    dy, found = torch.randn(20, 12, dtype=torch.float64), []
    for layer, package, more in ((whole, losses, {}), (parts, reference, {"reference_": True})):
        y, logits, ids, scores = layer(*arguments, **keywords, **more)
        balance = package.load_balance_loss(logits, ids, scores=family)
        loss = (y * dy).sum() + balance + package.z_loss(logits) + scores.square().sum()
        found.append((y, *gradients(loss, leaves)))
    for name, a, b in zip(("y", *leaves), *found, strict=True):
        torch.testing.assert_close(a, b, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("family", FAMILIES)
def test_gradcheck(family):
    arguments, keywords, leaves = problem(5, 3, 4, 4, dtype=torch.float64, family=family)
    k, names = arguments[2], list(leaves)

    def f(*values):
        a = dict(zip(names, values, strict=True))
        return whole(a.pop("x"), a.pop("w_router"), k, a.pop("w_up"), a.pop("w_down"), **(keywords | a))[::3]

    assert torch.autograd.gradcheck(f, tuple(leaves.values()))


@pytest.mark.parametrize("tokens", [0, 1, 20])
@pytest.mark.parametrize("returned", ["lists", True])
def test_lists_are_those_of_build_index(tokens, returned):
    """Of tokens that are masked too; they lie in one tensor with ids."""
    arguments, keywords, _ = problem(tokens=tokens, mask=True)
    _, routing = intarsia.moe(*arguments, return_routing=returned, **keywords)
    want = intarsia.build_index(routing.ids, 6)
    assert routing.ids.shape == (tokens, 2)
    for got, expected in zip(routing.lists[:4], want[:4], strict=True):
        assert torch.equal(got, expected)
        assert got.is_contiguous()
        assert got.untyped_storage().data_ptr() == routing.ids.untyped_storage().data_ptr()


@pytest.mark.parametrize("tokens", [0, 1])
def test_no_token_and_one_token(tokens):
    for family in FAMILIES:
        arguments, keywords, leaves = problem(tokens=tokens, family=family)
        got, want = (gradients(layer(*arguments, **keywords)[0], leaves) for layer in (whole, parts))
        assert_same(got, want, leaves, torch.float32)
        assert tokens or all((g == 0).all() for g in got)


@pytest.mark.parametrize("tokens", [0, 1, 20])
@pytest.mark.parametrize("returned", [False, "lists", True])
def test_counts_are_the_rows_of_each_expert(tokens, returned):
    arguments, keywords, _ = problem(tokens=tokens, mask=True)
    counts = torch.full((6,), -1, dtype=torch.int32)
    intarsia.moe(*arguments, return_routing=returned, counts=counts, **keywords)
    _, routing = intarsia.moe(*arguments, return_routing=True, **keywords)
    assert torch.equal(counts, torch.bincount(routing.ids[routing.ids >= 0], minlength=6).int())


@pytest.mark.parametrize("wrong", [torch.zeros(5, dtype=torch.int32), torch.zeros(6, dtype=torch.int64)])
def test_counts_of_another_shape_or_dtype_are_refused(wrong):
    arguments, keywords, _ = problem(tokens=3)
    with pytest.raises(InvalidArgument, match=r"moe: counts: expected \(6,\) int32"):
        intarsia.moe(*arguments, counts=wrong, **keywords)


def test_nan_tokens_are_counted_and_reach_nobody():
    (x, *rest), keywords, leaves = problem(family="softmax_renorm")
    keywords["addend"], count = None, torch.ones(1, dtype=torch.int32)
    x = x.detach().index_fill(0, torch.tensor([3, 7]), float("nan"))
    y = intarsia.moe(x, *rest, nan_tokens=count, **keywords)
    assert count.item() == 3
    assert (y[[3, 7]] == 0).all()
    for name in ("w_up", "w_down", "b_up", "b_down"):
        assert gradients(y, [leaves[name]], retain_graph=True)[0].isfinite().all(), name


# ---- one node, and what it computes


def test_one_node_and_one_gradient_of_x():
    """The router's part goes into the experts' dx, a tensor that nobody else has."""
    arguments, keywords, leaves = problem()
    with Calls() as calls:
        y, logits, _, scores = whole(*arguments, **keywords)
    assert calls.names() == ["moe_forward"]
    assert y.grad_fn is logits.grad_fn is scores.grad_fn
    edges = [node for node, _ in y.grad_fn.next_functions if node is not None]
    assert {getattr(node, "variable", None) is not None for node in edges} == {True}
    with Calls() as calls:
        dx = gradients(y, leaves)[list(leaves).index("x")]
    assert calls.names() == ["moe_backward"]
    ((_, fields),) = calls.seen
    assert dx.data_ptr() == gradients_of(fields)["dx"].data_ptr()


def test_steps_add_to_one_dx_too():
    """With a gradient of the logits from elsewhere the steps run one by one."""
    arguments, keywords, leaves = problem()
    y, logits, *_ = whole(*arguments, **keywords)
    loss = y.sum() + losses.z_loss(logits)
    with Calls() as calls:
        dx = gradients(loss, leaves)[list(leaves).index("x")]
    names = ["z_loss_backward", "layer_backward", "router_logits", "route_backward", "router_logits_backward"]
    assert calls.names() == names
    experts, router = calls.seen[1][1], calls.seen[-1][1]
    assert router["add_to_dx"]
    assert dx.data_ptr() == router["dx"].data_ptr() == experts["dx"].data_ptr()


NAMES = {
    "x": "dx", "w_router": "dw_router", "b_router": "db_router", "w_up": "dw_up", "w_down": "dw_down", "b_up": "db_up",
    "b_down": "db_down",
}  # fmt: skip


@pytest.mark.parametrize("how", ["asked", "frozen"])
@pytest.mark.parametrize("leaf", [*NAMES, "addend"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_alone(leaf, how, dtype):
    """The bits of all gradients together, and no work for the others: asked for alone, or the others frozen."""
    arguments, keywords, leaves = problem(dtype=dtype)
    want = dict(zip(leaves, gradients(intarsia.moe(*arguments, **keywords), leaves), strict=True))
    if how == "frozen":
        for name, value in leaves.items():
            value.requires_grad_(name == leaf)
    y = intarsia.moe(*arguments, **keywords)
    with Calls() as calls:
        (got,) = gradients(y, [leaves[leaf]])
    assert torch.equal(got, want[leaf])
    computed = [set(gradients_of(fields)) for _, fields in calls.seen]
    assert computed == ([] if leaf == "addend" else [{NAMES[leaf]}])


def test_logits_alone_need_no_experts():
    """A loss on the logits, or the scores, without y."""
    arguments, keywords, leaves = problem()
    router = [leaves[n] for n in ("x", "w_router", "b_router")]
    for output in (1, 3):
        with Calls() as calls:
            got = gradients(whole(*arguments, **keywords)[output].square().sum(), router)
        assert "layer_backward" not in calls.names()
        want = gradients(parts(*arguments, **keywords)[output].square().sum(), router)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


# ---- z is overwritten once


@pytest.mark.parametrize("save", ["preactivation", "input"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_retain_graph_leaves_z_alone(save, dtype):
    arguments, keywords, leaves = problem(dtype=dtype)
    y = intarsia.moe(*arguments, save=save, **keywords)
    runs = [gradients(y, leaves, retain_graph=keep) for keep in (True, True, False)]
    for again in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], again, strict=True))


def test_second_backward_is_an_error_in_words():
    arguments, keywords, leaves = problem()
    y = intarsia.moe(*arguments, **keywords)
    gradients(y, leaves)
    with pytest.raises(intarsia.Error, match=r"moe: a second backward.*retain_graph=True"):
        gradients(y, leaves)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_save_modes_give_the_same_bits(dtype):
    """Of logits too, kept or computed again."""
    arguments, keywords, leaves = problem(100, 40, dtype=dtype)
    kept, again = (gradients(intarsia.moe(*arguments, save=s, **keywords), leaves) for s in ("preactivation", "input"))
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


def test_backward_in_two_passes_equals_one():
    """Inputs first, then weights, as zero-bubble pipelines do."""
    arguments, keywords, leaves = problem()
    joint = dict(zip(leaves, gradients(intarsia.moe(*arguments, **keywords), leaves), strict=True))
    y = intarsia.moe(*arguments, **keywords)
    (dx,) = gradients(y, [leaves["x"]], retain_graph=True)
    weights = {n: t for n, t in leaves.items() if n != "x"}
    apart = dict(zip(weights, gradients(y, weights), strict=True)) | {"x": dx}
    assert all(torch.equal(joint[n], apart[n]) for n in joint)


def test_second_derivatives_are_refused():
    arguments, keywords, leaves = problem()
    (dx,) = gradients(intarsia.moe(*arguments, **keywords), [leaves["x"]], create_graph=True)
    with pytest.raises(intarsia.Unsupported, match="second derivatives are not implemented"):
        dx.square().sum().backward()


# ---- torch's own habits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("router", [torch.float32, None])
def test_autocast(dtype, router):
    """As the parts; a router in float32 stays there."""
    arguments, keywords, leaves = problem(family="softmax_renorm")
    if router is None:
        with torch.no_grad():
            for name in ("w_router", "b_router"):
                leaves[name].data = leaves[name].to(dtype)
    with torch.autocast("cpu", dtype=dtype):
        got, want = whole(*arguments, **keywords), parts(*arguments, **keywords)
    assert got[0].dtype == dtype
    assert got[1].dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    y, logits, *_ = want
    (dlogits,) = gradients(y, [logits], retain_graph=True)
    got, want = gradients(got[0], leaves), gradients(want[0], leaves)
    assert all(g.dtype == t.dtype for g, t in zip(got, leaves.values(), strict=True))
    sizes = router_sizes(leaves["x"], leaves["w_router"], "softmax_renorm", logits, dlogits, None, None)
    assert_same(got, want, leaves, dtype, sizes)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("dtype", "logits_dtype"), [(torch.float32, "float32"), (torch.bfloat16, "float32"), (torch.bfloat16, "input")]
)
def test_compiled_with_losses(family, dtype, logits_dtype):
    """One graph for every number of tokens, the same bits as eager."""
    torch._dynamo.reset()

    def f(arguments, keywords):
        y, routing = intarsia.moe(*arguments, return_routing=True, **keywords)
        return y.square().sum() + losses.load_balance_loss(routing.logits, routing.ids) + routing.scores.sum()

    function = torch.compile(f, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (7, 20):
        arguments, keywords, leaves = problem(tokens=tokens, family=family, mask=True, dtype=dtype)
        keywords["logits_dtype"] = logits_dtype
        got, want = (gradients(g(arguments, keywords), leaves) for g in (function, f))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


class Watcher(TorchDispatchMode):
    """Sees every operator that reaches the dispatcher."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def test_the_operator_is_there_for_whoever_looks_on():
    """Under a dispatch mode calls go through torch.ops.intarsia, forward and backward, with the same bits."""
    arguments, keywords, leaves = problem()
    want = gradients(intarsia.moe(*arguments, **keywords), leaves)
    with Watcher() as watcher:
        got = gradients(intarsia.moe(*arguments, **keywords), leaves)
    names = ("moe_forward", "layer_backward", "route_backward", "router_logits_backward")
    assert {f"intarsia.{name}.default" for name in names} <= set(watcher.seen)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": torch.randn(20, 3, 4)}, ("x", "(T, H)")),
        ({"x": torch.zeros(20, 12, dtype=torch.int32)}, ("x", "float32", "int32")),
        ({"w_router": torch.randn(6, 13)}, ("w_router", "12", "13")),
        ({"w_router": torch.randn(5, 12)}, ("5", "6")),
        ({"w_router": torch.randn(6, 12).half()}, ("w_router", "float16", "float32")),
        ({"b_router": torch.randn(6, 1)}, ("b_router", "(E)")),
        ({"b_router": torch.randn(5)}, ("5", "6")),
        ({"k": 7}, ("k", "6", "7")),
        ({"k": 2.0}, ("k", "integer", "2.0")),
        ({"scores": "top"}, ("scores", "softmax_renorm", "top")),
        ({"logits_dtype": "half"}, ("logits_dtype", "input", "half")),
        ({"expert_bias": torch.randn(6), "scores": "softmax"}, ("expert_bias", "sigmoid_group")),
        ({"groups": 4, "scores": "sigmoid_group"}, ("groups", "4", "6")),
        ({"token_mask": torch.ones(20)}, ("token_mask", "bool", "float32")),
        ({"token_mask": torch.ones(20, dtype=torch.bool, device="meta")}, ("token_mask", "meta", "cpu")),
        ({"token_mask": torch.ones(3, dtype=torch.bool)}, ("token_mask", "3", "20")),
        ({"w_up": torch.randn(6, 16, 12).double()}, ("w_up", "float32", "float64")),
        ({"w_down": torch.randn(6, 12)}, ("w_down", "(E, H, I)")),
        ({"addend": torch.randn(19, 12)}, ("addend", "20", "19")),
        ({"activation": "swish"}, ("activation", "swiglu", "swish")),
        ({"score_on": "input"}, ("b_up", "input")),
        ({"save": "all"}, ("save", "preactivation", "all")),
        ({"backend": "gpu"}, ("backend", "automatic", "gpu")),
        ({"backend": "cpu\n"}, ("expected",)),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(changes, words):
    (x, w_router, k, w_up, w_down), keywords, _ = problem()
    a = {"x": x, "w_router": w_router, "k": k, "w_up": w_up, "w_down": w_down} | keywords | changes
    with pytest.raises(intarsia.Error) as info:
        intarsia.moe(*[a.pop(n) for n in ("x", "w_router", "k", "w_up", "w_down")], **a)
    assert isinstance(info.value, ValueError | NotImplementedError)
    for word in words:
        assert word in str(info.value), f"{word!r} is not in: {info.value}"


def test_a_scale_in_a_tensor_is_read_at_every_call():
    arguments, keywords, _ = problem(family="sigmoid_group")
    keywords["scale"] = torch.tensor(2.0)
    y = intarsia.moe(*arguments, **keywords)
    keywords["scale"].fill_(4.0)
    assert not torch.equal(y, intarsia.moe(*arguments, **keywords))


# ---- the module


def test_the_module_is_the_function():
    """The same operations and the same bits, in any leading shape, with a shared expert and a residual."""
    layer = intarsia.MoE(12, 8, 6, 2, scores="sigmoid_group", bias=True, router_bias=True, shared_width=4)
    x, mask = torch.randn(4, 5, 12, requires_grad=True), torch.rand(4, 5) < 0.8
    with Calls() as calls:
        y = layer(x, token_mask=mask, addend=x)
    assert calls.names()[-1:] == ["moe_forward"]
    flat = x.flatten(0, 1)
    want, routing = intarsia.moe(
        flat, layer.w_router, 2, layer.w_up, layer.w_down, b_router=layer.b_router, scores="sigmoid_group",
        expert_bias=layer.expert_bias, b_up=layer.b_up, b_down=layer.b_down, token_mask=mask.flatten(),
        addend=flat + layer.shared(flat), return_routing=True,
    )  # fmt: skip
    assert torch.equal(y, want.view_as(y))
    assert torch.equal(layer.last_counts, routing.lists.counts())
    leaves = {"x": x} | dict(layer.named_parameters())
    assert_same(gradients(y, leaves), gradients(want.view_as(y), leaves), leaves, x.dtype)
