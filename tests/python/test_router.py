"""The router: logits, the four families, their gradients, ties, NaN, masks, losses, the bias update."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import intarsia
from intarsia import losses, reference

FAMILIES = ("softmax", "softmax_renorm", "sigmoid_group", "sigmoid")


def route_both(logits, k, **options):
    """(ids, scores) of the package and of the specification in float64, and dlogits of both for one random dscores."""
    a, b = logits.detach().requires_grad_(), logits.detach().double().requires_grad_()
    ids, scores = intarsia.route(a, k, **options)
    if options.get("expert_bias") is not None:
        options = options | {"expert_bias": options["expert_bias"].double()}
    ref_ids, ref_scores = reference.route(b, k, **options)
    dscores = torch.randn(scores.shape)
    (da,) = torch.autograd.grad(scores, a, dscores)
    (db,) = torch.autograd.grad(ref_scores, b, dscores.double())
    return (ids, scores, da), (ref_ids, ref_scores, db)


def agree(got, ref, tolerance=2e-6):
    ids, scores, dlogits = got
    assert torch.equal(ids.long(), ref[0])
    torch.testing.assert_close(scores.double(), ref[1], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(dlogits.double(), ref[2], rtol=tolerance, atol=tolerance)


@given(st.sampled_from(FAMILIES), st.integers(0, 120), st.integers(1, 40), st.data())
def test_route(family, tokens, experts, data):
    """ids, scores and dlogits of every family, renormalised or not. reports.md 68, 69"""
    k = data.draw(st.integers(1, experts))
    options = {"scores": family}
    if family == "sigmoid_group":
        groups = data.draw(st.sampled_from([n for n in range(1, experts + 1) if experts % n == 0]))
        least = -(-k // (experts // groups))
        options |= {
            "groups": groups, "top_groups": data.draw(st.integers(least, groups)),
            "scale": data.draw(st.sampled_from([1.0, 2.5])), "renormalise": data.draw(st.booleans()),
            "expert_bias": torch.randn(experts) * 0.1,
        }  # fmt: skip
    if data.draw(st.booleans()):
        options["token_mask"] = torch.rand(tokens) < 0.7
    logits = torch.randn(tokens, experts)
    if family == "sigmoid_group":  # ranked by a rounded sum: float32 and float64 agree where no two are close
        rank = logits.double().sigmoid() + options["expert_bias"]
        worth = rank.unflatten(1, (options["groups"], -1)).sort(descending=True).values[..., :2].sum(-1)
        assume(all((t.sort().values.diff() > 1e-6).all() for t in (rank, worth)))
    agree(*route_both(logits, k, **options))


@pytest.mark.parametrize(
    "experts", [1, 2, 3, 5, 16, 60, 96, 127, 128, 129, 160, 255, 256, 384, 512, 1023, 1024, 1025, 2048]
)
def test_any_number_of_experts_and_tokens(experts):
    """Ids, weights, counts and offsets over E and T that no block size divides. reports.md 25, 27, 28, 29"""
    for tokens in (1, 15, 16, 17, 31, 33, 300):
        k = min(8, experts)
        for family in ("softmax", "softmax_renorm", "sigmoid"):
            got, ref = route_both(torch.randn(tokens, experts), k, scores=family)
            agree(got, ref)
        lists = intarsia.build_index(got[0], experts)
        assert torch.equal(lists.counts().long(), torch.bincount(ref[0].flatten(), minlength=experts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("family", FAMILIES)
def test_ties_go_to_the_lowest_id(family, dtype):
    """reports.md 71, 72"""
    logits = torch.tensor([[1.0, 2, 2, 0, 2], [0, 0, 0, 0, 0], [3, 1, 3, 1, 3]], dtype=dtype)
    ids, _ = intarsia.route(logits, 3, scores=family)
    assert ids.tolist() == [[1, 2, 4], [0, 1, 2], [0, 2, 4]]


def test_logits_are_compared_with_all_their_bits():
    """1e-4 and 1e-7 apart: neither rounded nor nudged. reports.md 71, 72"""
    for gap in (1e-4, 1.2e-7):
        base = torch.rand(200, 1) + 0.5
        logits = base + gap * torch.rand(200, 16).argsort(1)
        ids, _ = intarsia.route(logits, 4)
        assert torch.equal(ids.long(), logits.sort(descending=True, stable=True).indices[:, :4])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_logits_stay_in_their_token(family, bad):
    """A NaN token gets ids -1 and scores 0, is counted, reaches no expert and no gradient. reports.md 73"""
    logits = torch.randn(40, 8)
    clean_ids, clean_scores = intarsia.route(logits, 2, scores=family)
    logits[7, 3], logits[19] = bad, float("nan")
    logits.requires_grad_()
    count = torch.zeros(1, dtype=torch.int32)
    ids, scores = intarsia.route(logits, 2, scores=family, nan_tokens=count)
    others = torch.ones(40, dtype=torch.bool).index_fill(0, torch.tensor([7, 19]), False)
    assert count.item() == 2
    assert (ids[~others] == -1).all()
    assert (scores[~others] == 0).all()
    assert torch.equal(ids[others], clean_ids[others])
    assert torch.equal(scores[others], clean_scores[others])
    x, w_up, w_down = torch.randn(40, 6), torch.randn(8, 10, 6).requires_grad_(), torch.randn(8, 6, 5).requires_grad_()
    y = intarsia.moe_mlp(x, ids, scores, w_up, w_down)
    dlogits, dw_up, dw_down = torch.autograd.grad(y.square().sum(), (logits, w_up, w_down))
    assert (y[~others] == 0).all()
    assert (dlogits[~others] == 0).all()
    assert all(t.isfinite().all() for t in (dlogits, dw_up, dw_down))


@pytest.mark.parametrize("family", ["softmax_renorm", "sigmoid_group"])
def test_renormalising_never_divides_by_zero(family):
    """All logits -60 or -1000: finite scores and gradients, summing to 1 where the sum can be formed. reports.md 75,
    79
    """
    for value in (-60.0, -1000.0):
        logits = torch.full((3, 8), value, requires_grad=True)
        _, scores = intarsia.route(logits, 2, scores=family)
        (dlogits,) = torch.autograd.grad(scores, logits, torch.randn(3, 2))
        assert scores.isfinite().all()
        assert dlogits.isfinite().all()
        if value == -60.0 or family == "softmax_renorm":
            torch.testing.assert_close(scores.sum(1), torch.ones(3))


def test_mask_takes_tokens_out():
    """Masked tokens give y = 0 and dx = 0 and are not counted. reports.md 85"""
    x = torch.randn(30, 8, requires_grad=True)
    mask = torch.rand(30) < 0.5
    layer = intarsia.MoE(8, 6, experts=4, experts_per_token=2)
    y = layer(x, token_mask=mask)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert (y[~mask] == 0).all()
    assert (dx[~mask] == 0).all()
    assert layer.last_counts.sum() == 2 * mask.sum()


@given(
    st.integers(0, 60),
    st.integers(1, 70),
    st.integers(1, 20),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from(["float32", "input"]),
)
def test_router_logits(tokens, hidden, experts, bias, dtype, logits_dtype):
    """Logits and their three gradients; float32 accumulation, one rounding."""
    unit = 2e-6 if logits_dtype == "float32" or dtype == torch.float32 else 2**-7
    x = torch.randn(tokens, hidden).to(dtype).requires_grad_()
    w = torch.randn(experts, hidden).to(dtype).requires_grad_()
    b = torch.randn(experts).to(dtype).requires_grad_() if bias else None
    logits = intarsia.router_logits(x, w, b, logits_dtype=logits_dtype)
    assert logits.dtype == (dtype if logits_dtype == "input" else torch.float32)
    leaves = [t for t in (x, w, b) if t is not None]
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    ref = reference.router_logits(*doubles)
    scale = reference.router_logits(*(t.abs() for t in doubles)).norm()
    assert (logits.double() - ref).norm() <= unit * scale
    d = torch.randn_like(logits)
    for t, got, want in zip(
        leaves, torch.autograd.grad(logits, leaves, d), torch.autograd.grad(ref, doubles, d.double()), strict=True
    ):
        assert got.dtype == t.dtype
        torch.testing.assert_close(
            got.double(),
            want,
            rtol=2**-7 if dtype != torch.float32 else 1e-4,
            atol=2e-2 if dtype != torch.float32 else 1e-4,
        )


# ---- losses


@given(st.integers(0, 80), st.integers(1, 30), st.data())
def test_losses(tokens, experts, data):
    """Values and gradients in every normalisation and family, with masks and NaN tokens. reports.md 78"""
    k = data.draw(st.integers(1, experts))
    logits = torch.randn(tokens, experts) * 2
    if tokens and data.draw(st.booleans()):
        logits[0] = float("nan")
    mask = torch.rand(tokens) < 0.7 if data.draw(st.booleans()) else None
    family = data.draw(st.sampled_from(FAMILIES))
    normalisation = data.draw(st.sampled_from(["huggingface", "megatron"]))
    ids, _ = intarsia.route(logits, k, scores=family, token_mask=mask)
    a, b = logits.clone().requires_grad_(), logits.double().requires_grad_()
    options = {"normalisation": normalisation, "scores": family, "token_mask": mask}
    got = losses.load_balance_loss(a, ids, **options), losses.z_loss(a, token_mask=mask)
    ref = reference.load_balance_loss(b, ids, **options), reference.z_loss(b, token_mask=mask)
    # Terms of a gradient are at most this large, 10 for a logsumexp's, and may cancel.
    terms = 3 * max(experts, 10) / max(1, tokens if mask is None else int(mask.sum()))
    for u, v in zip(got, ref, strict=True):
        torch.testing.assert_close(u.double(), v, rtol=2e-6, atol=2e-6)
        (du,), (dv,) = torch.autograd.grad(3 * u, a), torch.autograd.grad(3 * v, b)
        torch.testing.assert_close(du.double(), dv.nan_to_num(), rtol=1e-5, atol=1e-6 * max(1, terms))


@pytest.mark.parametrize("k", [1, 2, 8])
def test_balance_loss_at_perfect_balance(k):
    """K for Hugging Face's normalisation, 1 for Megatron's; finite gradients there. reports.md 77, 80"""
    experts = 16
    ids = torch.arange(experts * k).reshape(experts, k) % experts
    logits = torch.zeros(experts, experts, requires_grad=True)
    for normalisation, value in (("huggingface", float(k)), ("megatron", 1.0)):
        loss = losses.load_balance_loss(logits, ids, normalisation=normalisation)
        torch.testing.assert_close(loss, torch.tensor(value))
        assert torch.autograd.grad(loss, logits)[0].isfinite().all()


def test_balance_loss_takes_one_softmax():
    """One-hot routing to one expert is near E, uniform is the minimum, and gradients differ. reports.md 76"""
    experts = 8
    hot = torch.full((50, experts), -20.0).index_fill(1, torch.tensor([3]), 20.0).requires_grad_()
    even = torch.zeros(50, experts, requires_grad=True)
    ids = torch.full((50, 1), 3)
    worst, other = losses.load_balance_loss(hot, ids), losses.load_balance_loss(even, ids)
    torch.testing.assert_close(worst, torch.tensor(float(experts)))
    torch.testing.assert_close(other, torch.tensor(1.0))
    assert not torch.allclose(torch.autograd.grad(worst, hot)[0], torch.autograd.grad(other, even)[0])


def test_loss_is_attached_once():
    """The gradient with coefficient c less that with 0 is exactly linear in c. reports.md 81"""
    layer = intarsia.MoE(8, 6, experts=4, experts_per_token=2).double()
    x = torch.randn(20, 8, dtype=torch.float64)

    def gradient(c):
        y, routing = layer(x, return_routing=True)
        loss = y.square().sum() + c * losses.load_balance_loss(routing.logits, routing.ids)
        return torch.autograd.grad(loss, layer.w_router)[0]

    base = gradient(0.0)
    one, three = gradient(1.0) - base, gradient(3.0) - base
    assert one.norm() > 0
    torch.testing.assert_close(three, 3 * one)


def test_sigmoid_probabilities_cannot_cheat_the_loss():
    """All logits -60: the normalised probabilities still sum to 1. reports.md 79"""
    logits = torch.full((10, 4), -60.0)
    ids = torch.arange(10).unsqueeze(1) % 4
    assert losses.load_balance_loss(logits, ids, scores="sigmoid", normalisation="megatron").item() == pytest.approx(
        1.0, rel=1e-5
    )


def test_bias_update_moves_towards_balance():
    """Counts of a biased router become even; zero at balance. reports.md 83"""
    layer = intarsia.MoE(16, 4, experts=8, experts_per_token=2, scores="sigmoid_group")
    x = torch.randn(400, 16) + 1.0
    layer(x)
    before = layer.last_counts.float().std()
    for _ in range(150):
        layer(x)
        layer.update_expert_bias(0.01)
    assert layer.last_counts.float().std() < 0.3 * before
    bias = torch.ones(4)
    losses.update_expert_bias(bias, torch.tensor([5, 5, 5, 5]), 0.1)
    assert torch.equal(bias, torch.ones(4))
    losses.update_expert_bias(bias, torch.tensor([9, 1, 5, 5]), 0.5)
    assert bias.tolist() == [0.5, 1.5, 1.0, 1.0]
