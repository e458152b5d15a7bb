"""The router on the GPU: logits and their gradients, every family, ties, token rounding, losses; against float64 on the
same device, and the CPU backend on the same inputs.
"""

import pytest
import torch
from gpu_device import DEVICE, MARKS, Guard, generator, normal
from torch import Tensor

import intarsia
from intarsia import _core, losses, reference
from intarsia.errors import InvalidArgument

pytestmark = MARKS

FAMILIES = ("softmax", "softmax_renorm", "sigmoid_group", "sigmoid")
ROUNDINGS = ("up", "down", "nearest", "balanced", "stochastic")
EXPERTS = (1, 7, 64, 128, 256, 512, 4096)
HIDDEN = (8, 64, 96, 1536, 2880)


def within(got: Tensor, want: Tensor, size: Tensor, unit: float, what: str) -> None:
    """Each element: unit times its products over absolute values, and one rounding to got's dtype; their norm: a
    quarter of that.
    """
    eps = torch.finfo(got.dtype).eps if got.dtype in (torch.bfloat16, torch.float16) else 0.0
    error = (got.double() - want).abs()
    excess = error - (4 * unit * size + eps * want.abs() + 2**-24 * (got.dtype == torch.float16))
    assert got.isfinite().all(), what
    assert (excess <= 0).all(), (
        f"{what}: {int((excess > 0).sum())} elements, the worst {excess.max().item():.3e} too far"
    )
    allowed = unit * size.norm() + eps * want.norm() + 2**-24 * (got.dtype == torch.float16) * want.numel() ** 0.5
    assert error.norm() <= allowed, f"{what}: norm {error.norm().item():.3e}, allowed {allowed.item():.3e}"


def check_logits(T, H, E, dtype, wide, bias=True, logits_dtype="float32", seed=0) -> None:
    """router_logits and its three gradients. fp32 logits keep 22 bits, fp32 dlogits 16."""
    g, parameter = generator(seed), torch.float32 if wide else dtype
    leaves = [normal(g, T, H, dtype=dtype), normal(g, E, H, scale=H**-0.5, dtype=parameter)]
    leaves += [normal(g, E, dtype=parameter)] if bias else []
    leaves = [t.requires_grad_() for t in leaves]
    logits = intarsia.router_logits(*leaves, logits_dtype=logits_dtype)
    assert logits.dtype == (torch.float32 if logits_dtype == "float32" else dtype)
    dlogits = normal(g, T, E, dtype=logits.dtype)
    gradients = torch.autograd.grad(logits, leaves, dlogits)
    x, w, *b = (t.detach().double() for t in leaves)
    d = dlogits.double()
    size = x.abs() @ w.abs().T + (b[0].abs() if bias else 0)
    within(logits.detach(), x @ w.T + (b[0] if bias else 0), size, 1e-6, "logits")
    wants = ((d @ w, d.abs() @ w.abs()), (d.T @ x, d.abs().T @ x.abs()), (d.sum(0), d.abs().sum(0)))
    for name, leaf, value, (want, size) in zip(("dx", "dw", "dbias"), leaves, gradients, wants, strict=False):
        assert value.dtype == leaf.dtype
        # beside a bfloat16 weight the products take dlogits rounded to it
        within(value, want, size, 2**-9 if dtype == torch.bfloat16 and not wide and name != "dbias" else 2**-17, name)


# ---- logits


@pytest.mark.parametrize("wide", [False, True], ids=["16-bit weights", "fp32 weights"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("H", HIDDEN)
@pytest.mark.parametrize("E", EXPERTS)
def test_logits(E, H, dtype, wide):
    check_logits(300 if DEVICE == "cuda" else 20, H, E, dtype, wide)


@pytest.mark.parametrize("T", [0, 1, 63, 64, 65, 127, 129, 4096, 20_001])
@pytest.mark.parametrize(("H", "E"), [(96, 128), (256, 8), (33, 5), (40, 300)])
def test_logits_of_any_number_of_tokens(T, H, E):
    for dtype, wide in ((torch.bfloat16, False), (torch.float16, True)):
        check_logits(T, H, E, dtype, wide, bias=E != 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("E", [7, 128, 512])
def test_rounded_logits(E, dtype):
    """logits_dtype "input": rounded once; their gradient comes in 16 bits."""
    for wide in (False, True):
        check_logits(300, 96, E, dtype, wide, logits_dtype="input")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logits_of_plain_products(dtype):
    x, w = normal(generator(), 300, 96, dtype=dtype).requires_grad_(), normal(generator(1), 65, 96, dtype=dtype)
    logits = intarsia.router_logits(x, w.requires_grad_())
    d = torch.randn_like(logits)
    unit = 1e-6 if dtype == torch.float32 else 1e-13
    x64, w64, d64 = (t.detach().double() for t in (x, w, d))
    within(logits.detach(), x64 @ w64.T, x64.abs() @ w64.abs().T, unit, "logits")
    dx, dw = torch.autograd.grad(logits, (x, w), d)
    within(dx, d64 @ w64, d64.abs() @ w64.abs(), unit, "dx")
    within(dw, d64.T @ x64, d64.abs().T @ x64.abs(), unit, "dw")


def test_logits_of_views():
    """Rows out of a wider tensor, a misaligned weight, a stride of zero: NaN around them is not read."""
    for dtype in (torch.bfloat16, torch.float32):
        wide = torch.full((300, 120), torch.nan, dtype=dtype, device=DEVICE)
        wide[:, 8:104] = normal(generator(), 300, 96, dtype=dtype)
        room = torch.full((7 * 96 + 9,), torch.nan, dtype=dtype, device=DEVICE)
        w = room[1 : 7 * 96 + 1].view(7, 96).copy_(normal(generator(1), 7, 96, dtype=dtype))
        for x in (wide[:, 8:104], wide[:1, 8:104].expand(300, 96)):
            want, size = x.double() @ w.double().T, x.double().abs() @ w.double().abs().T
            within(intarsia.router_logits(x, w), want, size, 1e-6, "logits")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_repeated_logits_have_the_same_bits(dtype):
    x, w = normal(generator(), 9000, 1536, dtype=dtype).requires_grad_(), normal(generator(1), 64, 1536).float()
    d = torch.randn(9000, 64, device=DEVICE)

    def once():
        logits = intarsia.router_logits(x, w.requires_grad_())
        return logits.detach(), *torch.autograd.grad(logits, (x, w), d)

    first = once()
    for _ in range(10):
        assert all(torch.equal(a, b) for a, b in zip(once(), first, strict=True))


@pytest.mark.parametrize("add", [False, True], ids=["written", "added"])
@pytest.mark.parametrize("framed", [False, True], ids=["at the ends", "around every row"])
@pytest.mark.parametrize(("dtype", "wide"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, True)])
@pytest.mark.parametrize(("H", "E"), [(200, 72), (33, 7), (64, 264)])
def test_neighbours_in_memory(H, E, dtype, wide, framed, add):
    """NaN around every tensor is neither read nor written; the router's part of dx replaces dx or is added to it."""
    g, guard, parameter = generator(), Guard(), torch.float32 if wide else dtype
    x, w = guard.put(normal(g, 300, H, dtype=dtype), framed), guard.put(normal(g, E, H, dtype=parameter), framed)
    bias, d = guard.put(normal(g, E, dtype=parameter)), guard.put(normal(g, 300, E, dtype=torch.float32), framed)
    before = normal(g, 300, H, dtype=dtype)
    dx = guard.put(before, framed) if add else guard.fresh((300, H), dtype, framed)
    dw, dbias = guard.fresh((E, H), parameter, framed), guard.fresh((E,), parameter)
    logits = guard.fresh((300, E), torch.float32, framed)
    _core.run("router_logits", x=x, w_router=w, bias=bias, logits=logits)
    _core.run("router_logits_backward", dlogits=d, x=x, w_router=w, add_to_dx=add, dx=dx, dw_router=dw, dbias=dbias)
    x64, w64, d64 = x.double(), w.double(), d.double()
    part, size = d64 @ w64, d64.abs() @ w64.abs()
    within(logits, x64 @ w64.T + bias.double(), x64.abs() @ w64.abs().T + bias.double().abs(), 1e-6, "logits")
    unit = 2**-17 if wide or dtype != torch.bfloat16 else 2**-9  # beside a bfloat16 weight dlogits are rounded
    if add:  # rounded before and after the addition
        size = size + before.double().abs() + torch.finfo(dtype).eps / unit * part.abs()
    within(dx, part + before.double() if add else part, size, unit, "dx")
    within(dw, d64.T @ x64, d64.abs().T @ x64.abs(), unit, "dw")
    within(dbias, d64.sum(0), d64.abs().sum(0), 2**-17, "dbias")
    assert guard.intact()


@pytest.mark.parametrize("H", [96, 33])
@pytest.mark.parametrize(("dtype", "wide"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, True)])
def test_a_token_of_nan_touches_no_router_weight(dtype, wide, H):
    """Its logits are NaN, so it chooses nobody; every other token's bits and the weights' gradients are finite."""
    x = normal(generator(), 300, H, dtype=dtype)
    w = normal(generator(1), 24, H, scale=0.2, dtype=torch.float32 if wide else dtype)

    def run(x):
        leaves = [x.detach().requires_grad_(), w.detach().requires_grad_()]
        logits = intarsia.router_logits(*leaves)
        ids, scores = intarsia.route(logits, 3)
        dscores = torch.rand(300, 3, generator=generator(2), device=DEVICE)
        return ids, scores.detach(), *torch.autograd.grad(scores, leaves, dscores)

    bad = x.clone()
    bad[[0, 7, 299]] = torch.nan
    others = torch.ones(300, dtype=torch.bool, device=DEVICE)
    others[[0, 7, 299]] = False
    got, want = run(bad), run(x)
    for a, b in zip(got[:3], want[:3], strict=True):
        assert torch.equal(a[others], b[others])
    assert (got[0][~others] == -1).all()
    assert (got[2][~others] == 0).all()
    assert got[3].isfinite().all()


# ---- the choice


def options_of(family: str, E: int, K: int) -> dict:
    """The richest form of each family."""
    if family != "sigmoid_group":
        return {"scores": family}
    groups = 8 if E % 8 == 0 and E >= 64 else 1
    top_groups = max(1, groups // 2)
    bias = torch.linspace(-0.1, 0.1, E, device=DEVICE)[torch.randperm(E, generator=torch.Generator().manual_seed(E))]
    return {
        "scores": family,
        "groups": groups,
        "top_groups": top_groups,
        "scale": 2.5,
        "expert_bias": bias.contiguous(),
    }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("T", "E", "K"), [(300, 64, 8), (300, 128, 1), (33, 512, 16), (100, 4096, 64), (1, 7, 7), (0, 64, 2)]
)
def test_families(family, T, E, K, dtype):
    """ids, scores and dlogits in float64."""
    logits = (normal(generator(E), T, E, dtype=torch.float32) * 2).to(dtype).requires_grad_()
    options = options_of(family, E, K)
    ids, scores = intarsia.route(logits, K, **options)
    wide = logits.detach().double().requires_grad_()
    if "expert_bias" in options:
        options["expert_bias"] = options["expert_bias"].double()
    want_ids, want_scores = reference.route(wide, K, **options)
    if family == "sigmoid_group":  # float32 ranks tie where float64 ones are close: then either choice is right
        rank = wide.detach().sigmoid() + options["expert_bias"]
        gap = (rank.gather(1, ids.long()) - rank.gather(1, want_ids)).abs()
        assert (gap <= 1e-6).all()
        clear = (ids == want_ids).all(1)
        assert clear.double().mean() >= 0.5 or T == 0 or dtype != torch.float32
    else:
        assert torch.equal(ids.long(), want_ids)
        clear = torch.ones(T, dtype=torch.bool, device=DEVICE)
    torch.testing.assert_close(scores[clear].double(), want_scores[clear], rtol=5e-6, atol=1e-7)
    d = torch.rand(T, K, generator=generator(1), device=DEVICE) * clear.unsqueeze(1)
    (got,) = torch.autograd.grad(scores, logits, d)
    (want,) = torch.autograd.grad(want_scores, wide, d.double())
    unit = 2**-8 if dtype == torch.bfloat16 else 5e-6
    assert (got.double() - want).norm() <= unit * want.norm() + 1e-6 * d.norm()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("E", "K"), [(7, 3), (64, 8), (128, 64), (512, 16), (1024, 8), (1025, 8), (4096, 64)])
def test_exact_ties_go_to_the_lowest_id(family, E, K):
    """Logits of three values, and of one."""
    few = torch.randint(0, 3, (200, E), generator=generator(E), device=DEVICE).float()
    few[::7] = 1.0
    ids, _ = intarsia.route(few, K, scores=family)
    assert torch.equal(ids.long(), reference.top_k(few, K))


@pytest.mark.parametrize("E", [16, 300, 4096])
def test_logits_are_compared_with_all_their_bits(E):
    """Neighbouring float32 numbers are told apart."""
    base = torch.rand(100, 1, generator=generator(), device=DEVICE) + 0.5
    order = torch.rand(100, E, generator=generator(1), device=DEVICE).argsort(1)
    logits = (base.view(torch.int32) + order.int()).view(torch.float32)
    ids, _ = intarsia.route(logits, 8)
    assert torch.equal(ids.long(), order.topk(8).indices)


@pytest.mark.parametrize("family", FAMILIES)
def test_nan_infinite_and_masked_tokens(family):
    """ids -1, scores 0, gradient 0; counted unless masked; the others are as without them."""
    logits = normal(generator(), 500, 64, dtype=torch.float32)
    clean, _ = intarsia.route(logits, 4, scores=family)
    mask = torch.rand(500, generator=generator(1), device=DEVICE) < 0.8
    mask[:4] = True
    logits[0, 5], logits[1], logits[2, 63], logits[3] = torch.nan, torch.nan, torch.inf, -torch.inf
    logits[~mask] = torch.nan
    counted = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    logits.requires_grad_()
    ids, scores = intarsia.route(logits, 4, scores=family, token_mask=mask, nan_tokens=counted)
    (dlogits,) = torch.autograd.grad(scores, logits, torch.ones_like(scores))
    good = mask.clone()
    good[:4] = False
    assert counted.item() == 4
    assert torch.equal(ids[good], clean[good])
    assert (ids[~good] == -1).all()
    assert (scores[~good] == 0).all()
    assert (dlogits[~good] == 0).all()
    assert dlogits.isfinite().all()


def test_many_tokens():
    """600,000 of them, with a group for each multiprocessor many times over."""
    logits = normal(generator(), 600_000, 8, dtype=torch.float32)
    ids, scores = intarsia.route(logits, 2, scores="softmax_renorm")
    want = reference.top_k(logits, 2)
    assert torch.equal(ids.long(), want)
    torch.testing.assert_close(scores, logits.gather(1, want).softmax(1), rtol=1e-5, atol=1e-6)


def test_refusals_leave_the_outputs_alone():
    """K and E beyond what is built: a sentence before any launch."""
    for E, K, word in ((100, 65, "K"), (4097, 2, "logits")):
        logits = torch.randn(10, E, device=DEVICE)
        ids = torch.full((10, K), -7, dtype=torch.int32, device=DEVICE)
        scores = torch.full((10, K), torch.nan, device=DEVICE)
        options = {"scores_kind": "softmax", "groups": 1, "top_groups": 1, "renormalise": True, "scale": 1.0}
        with pytest.raises(InvalidArgument, match=word):
            _core.run("route", logits=logits, ids=ids, scores=scores, **options)
        assert (ids == -7).all()
        assert scores.isnan().all()


# ---- token rounding


def chosen(lists: intarsia.IndexLists, T: int, E: int) -> Tensor:
    """(T, E) bool: who goes where."""
    rows = lists.row_token[: lists.expert_offsets[-1]].long().cpu()
    expert = torch.arange(E).repeat_interleave(lists.counts().cpu().long())
    return torch.zeros(T, E, dtype=torch.bool).index_put_((rows, expert), torch.tensor(True))


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize(
    ("T", "E", "K", "tile"),
    [(1000, 16, 2, 64), (700, 200, 4, 8), (2000, 60, 8, 128), (1, 4, 1, 2), (90, 4, 4, 128), (300, 8, 1, 1)],
)
def test_token_rounding_is_that_of_the_cpu(T, E, K, tile, rounding):
    """Counts exactly; tokens but for those whose probabilities float32 can hardly tell apart; consistent lists."""
    logits = normal(generator(T), T, E, dtype=torch.float32)
    mask = torch.rand(T, generator=generator(1), device=DEVICE) < 0.9
    for token_mask in (None, mask):
        options = {"tile": tile, "rounding": rounding, "seed": 5}
        got = intarsia.round_tokens(logits, K, token_mask=token_mask, **options)
        want = intarsia.round_tokens(logits.cpu(), K, token_mask=None if token_mask is None else mask.cpu(), **options)
        assert torch.equal(got.expert_offsets.cpu(), want.expert_offsets)
        here, there = chosen(got, T, E), chosen(want, T, E)
        probability = logits.double().softmax(1).cpu()
        top = torch.zeros_like(here).scatter(1, reference.top_k(logits, K).cpu(), True)
        worth = probability + 2 * top
        missed = torch.where(there & ~here, worth, -torch.inf).amax(0)
        instead = torch.where(here & ~there, worth, torch.inf).amin(0)
        assert (missed <= instead + 1e-6).all()
        on_cpu = intarsia.IndexLists(*(None if t is None else t.cpu() for t in got))
        used = int(on_cpu.expert_offsets[-1])
        expert = torch.arange(E).repeat_interleave(on_cpu.counts().long())
        torch.testing.assert_close(
            on_cpu.row_score[:used].double(), probability[on_cpu.row_token[:used].long(), expert], rtol=1e-5, atol=1e-7
        )
        # The CPU checks that lists are ascending and each other's inverse.
        intarsia.moe_mlp(torch.ones(T, 1), on_cpu, None, torch.ones(E, 2, 1), torch.ones(E, 1, 1))


@pytest.mark.parametrize(("T", "E", "K"), [(500, 16, 2), (300, 200, 8)])
def test_gradient_of_rounded_scores(T, E, K):
    """Through the softmax of the same rows in float64."""
    logits = normal(generator(), T, E, dtype=torch.float32).requires_grad_()
    lists = intarsia.round_tokens(logits, K, tile=32)
    used = int(lists.expert_offsets[-1])
    d = torch.rand(lists.row_score.shape, generator=generator(1), device=DEVICE)
    (got,) = torch.autograd.grad(lists.row_score, logits, d)
    wide = logits.detach().double().requires_grad_()
    expert = torch.arange(E, device=DEVICE).repeat_interleave(lists.counts().long())
    score = wide.softmax(1)[lists.row_token[:used].long(), expert]
    (want,) = torch.autograd.grad(score, wide, d[:used].double())
    assert (got.double() - want).norm() <= 5e-6 * want.norm()


def test_stochastic_rounding_follows_its_seed():
    logits = normal(generator(), 1000, 40, dtype=torch.float32)
    lists = [intarsia.round_tokens(logits, 4, tile=64, rounding="stochastic", seed=s) for s in (1, 1, 2)]
    assert torch.equal(lists[0].row_token, lists[1].row_token)
    assert not torch.equal(lists[0].expert_offsets, lists[2].expert_offsets)


# ---- losses and statistics


@pytest.mark.parametrize("family", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalisation", ["huggingface", "megatron"])
@pytest.mark.parametrize(("T", "E", "K"), [(1000, 16, 2), (3, 7, 3), (20_000, 128, 8), (50, 4096, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_are_those_of_the_cpu(T, E, K, normalisation, family, dtype):
    """With masked and NaN tokens: values and gradients."""
    logits = normal(generator(E), T, E, dtype=dtype)
    logits[T // 2, E // 2] = torch.nan
    mask = torch.rand(T, generator=generator(1), device=DEVICE) < 0.8
    ids, _ = intarsia.route(logits, K, token_mask=mask)

    def both(device):
        leaf = logits.to(device).requires_grad_()
        balance = losses.load_balance_loss(
            leaf, ids.to(device), normalisation=normalisation, scores=family, token_mask=mask.to(device)
        )
        z = losses.z_loss(leaf, token_mask=mask.to(device))
        gradients = [torch.autograd.grad(loss, leaf)[0] for loss in (balance, z)]
        return [t.detach().double().cpu() for t in (balance, z, *gradients)]

    unit = 1e-5 if dtype == torch.float32 else 2**-8
    for got, want in zip(both(DEVICE), both("cpu"), strict=True):
        assert (got - want).norm() <= unit * want.norm() + 1e-12


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_expert_bias_update_is_that_of_the_cpu(dtype):
    counts = torch.randint(0, 50, (300,), generator=torch.Generator().manual_seed(0)).to(dtype)
    counts[:10] = counts.float().mean().round().to(dtype)
    start = torch.randn(300, generator=torch.Generator().manual_seed(1))
    on_gpu, on_cpu = start.to(DEVICE, copy=True), start.clone()
    losses.update_expert_bias(on_gpu, counts.to(DEVICE), 0.01)
    losses.update_expert_bias(on_cpu, counts, 0.01)
    assert torch.equal(on_gpu.cpu(), on_cpu)
    assert not torch.equal(on_cpu, start)


def test_module_counts_are_those_of_its_ids():
    module = intarsia.MoE(64, 32, 24, 3, device=DEVICE, dtype=torch.bfloat16)
    _, routing = module(normal(generator(), 500, 64), return_routing=True)
    assert torch.equal(module.last_counts.long(), routing.ids.flatten().long().bincount(minlength=24))
