"""Sizes on the GPU: rows per expert at the borders of tiles, one and thousands of experts, many tokens, tensors of more
than 2^31 elements; in all three forms of the lists.
"""

import pytest
import torch
from gpu_device import (
    DEVICE,
    FORMS,
    MARKS,
    assert_near,
    by_ids,
    check,
    cuda_only,
    draw,
    normal,
    oracle,
    random_ids,
    slots,
)
from gpu_device import generator as seeded

import intarsia

pytestmark = MARKS

BORDERS = [0, 1, 63, 64, 65, 127, 128, 129, 255, 257]
MIXES = {
    "ascending": BORDERS,
    "descending": BORDERS[::-1],
    "empty ends": [0, 0, 129, 0, 1, 127, 0, 0],
    "ones": [1] * 33,
    "all in one": [0, 0, 1000, 0],
}

# ---- rows per expert


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", BORDERS[1:])
@pytest.mark.parametrize("experts", [1, 3])
def test_every_expert_at_a_border(form, count, experts):
    routing = FORMS[form]([count] * experts)
    check(routing, draw(routing, H=96, I=72, E=experts))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("sizes", [(96, 72), (320, 264), (1024, 64), (64, 520)])
def test_mixed_borders(form, mix, dtype, sizes):
    """Neighbours of every size; H and I of no whole tile, of one and of several."""
    counts = MIXES[mix]
    routing = FORMS[form](counts)
    check(routing, draw(routing, *sizes, E=len(counts), dtype=dtype))


@pytest.mark.parametrize("activation", ["silu", "clamped_swiglu"])
@pytest.mark.parametrize("form", FORMS)
def test_borders_of_other_kernels(form, activation):
    """Without a gate, and with biases and an activation chosen at run time."""
    gated = activation != "silu"
    routing = FORMS[form](BORDERS)
    check(routing, draw(routing, 136, 200, len(BORDERS), gated=gated, bias=gated), activation=activation)


@pytest.mark.parametrize("k", [1, 16, 64])
@pytest.mark.parametrize("counts", [BORDERS, [40] * 130], ids=["borders", "130 experts"])
def test_experts_per_token(k, counts):
    routing = slots(counts, k, seed=k)
    check(routing, draw(routing, 96, 72, len(counts)))


@pytest.mark.parametrize("form", FORMS)
def test_thousands_of_experts(form):
    """2048 experts, most of them without rows."""
    luck = torch.rand(2048, generator=torch.Generator().manual_seed(0))
    counts = torch.where(luck < 0.7, 0, (luck * 20).int() - 12).tolist()
    counts[-1] = 129
    routing = FORMS[form](counts)
    check(routing, draw(routing, 64, 24, 2048))


@pytest.mark.parametrize("k", [1, 16])
def test_thousands_of_chosen_experts(k):
    routing = by_ids(random_ids(seeded(k), 3000, 2048, k))
    check(routing, draw(routing, 64, 16, 2048))


@pytest.mark.parametrize("ids", [torch.zeros(0, 2), torch.full((5, 2), -1), torch.full((1, 1), 2)])
def test_nothing_to_do(ids):
    """No tokens, no rows, one row."""
    routing = by_ids(ids.int().to(DEVICE))
    got = check(routing, draw(routing, 64, 32, 3))
    assert (got["dw_up"][:2] == 0).all()


# ---- many tokens


@pytest.mark.parametrize(("experts", "k"), [(8, 2), (1, 1), (300, 1)])
def test_six_hundred_thousand_tokens(experts, k):
    tokens = 600_000 if DEVICE == "cuda" else 20_000
    routing = by_ids(random_ids(seeded(), tokens, experts, k))
    check(routing, draw(routing, 16, 16, experts))


# ---- more than 2^31 elements


def around(places: list[int], size: int) -> torch.Tensor:
    """Indices below size: the first, the last, and some before and after each place."""
    marks = torch.tensor([2, size - 3, *places]).clamp(2, size - 3)
    return (marks.unsqueeze(1) + torch.arange(-2, 3)).flatten().unique().to(DEVICE)


@cuda_only
@pytest.mark.slow
@pytest.mark.parametrize(
    ("k", "H", "I"),
    [(8, 64, 1104), (8, 64, 1100), (8, 2176, 64), (1, 2176, 64)],
    ids=["z, wgmma", "z, general", "rows", "x and y"],
)
def test_tensors_past_two_to_the_31(k, H, I):
    """2^20 rows of z (R, 2I), rows (R, H) or x (T, H): sampled tokens and the last expert's gradients, each alone."""
    if torch.cuda.mem_get_info()[0] < 60 << 30:
        pytest.skip("needs 60 GiB of free GPU memory")
    torch.cuda.empty_cache()
    experts, tokens = 16, (1 << 20) // k
    ids = random_ids(seeded(), tokens, experts, k)
    routing = by_ids(ids)
    assert max(len(routing.expert) * max(H, 2 * I), tokens * H) > 2**31
    g = seeded(1)
    x, dy = (torch.randn(tokens, H, generator=g, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    layer = {"x": x, "scores": torch.rand(tokens, k, generator=g, device=DEVICE) + 0.25, "dy": dy}
    layer |= {"w_up": normal(g, experts, 2 * I, H, scale=H**-0.5), "w_down": normal(g, experts, H, I, scale=I**-0.5)}
    leaves = {n: t.detach().requires_grad_() for n, t in layer.items() if n != "dy"}
    y = routing.call(**leaves)
    gradients = torch.autograd.grad(y, list(leaves.values()), dy)
    got = {"y": y.detach()} | {f"d{n}": t for n, t in zip(leaves, gradients, strict=True)}

    rows = intarsia.build_index(ids, experts).row_token[around([2**31 // (2 * I), 2**31 // H], len(routing.expert))]
    some = torch.cat([rows, around([2**31 // H], tokens)]).unique().long()
    part = layer | {n: layer[n][some] for n in ("x", "scores", "dy")}
    want = oracle(by_ids(ids[some]), part)
    names = ("y", "dx", "dscores")
    assert_near({n: got[n][some] for n in names}, {n: want[n] for n in names}, torch.bfloat16)

    token, slot = torch.where(ids == experts - 1)
    part = {"x": x[token], "dy": dy[token], "scores": layer["scores"][token, slot].unsqueeze(1)}
    part |= {n: layer[n][-1:] for n in ("w_up", "w_down")}
    want = oracle(by_ids(torch.zeros(len(token), 1, dtype=torch.int32, device=DEVICE)), part)
    for name in ("dw_up", "dw_down"):
        assert_near({name: got[name][-1:]}, {name: want[name]}, torch.bfloat16)


@cuda_only
def test_weights_past_two_to_the_31():
    """w_up (E, 2I, H) of 2.2e9 elements; the gradient goes to the last experts alone."""
    if torch.cuda.mem_get_info()[0] < 60 << 30:
        pytest.skip("needs 60 GiB of free GPU memory")
    torch.cuda.empty_cache()
    E, H, I = 2100, 1024, 512
    g = seeded()
    w_up = torch.empty(E, 2 * I, H, device=DEVICE, dtype=torch.bfloat16)
    w_down = torch.empty(E, H, I, device=DEVICE, dtype=torch.bfloat16)
    assert w_up.numel() > 2**31
    chosen = torch.tensor([0, 2047, 2048, E - 1], device=DEVICE)
    for e in chosen.tolist():
        w_up[e], w_down[e] = normal(g, 2 * I, H, scale=H**-0.5), normal(g, H, I, scale=I**-0.5)
    which = torch.randint(4, (300, 1), generator=g, device=DEVICE)
    routing, small = by_ids(chosen[which].int()), by_ids(which.int())
    layer = {"x": normal(g, 300, H), "scores": torch.rand(300, 1, generator=g, device=DEVICE), "dy": normal(g, 300, H)}
    leaves = {n: layer[n].requires_grad_() for n in ("x", "scores")} | {
        "w_up": w_up.requires_grad_(), "w_down": w_down.requires_grad_()
    }  # fmt: skip
    y = routing.call(**leaves)
    dx, dscores, dw_up, dw_down = torch.autograd.grad(y, list(leaves.values()), layer["dy"])
    got = {"y": y.detach(), "dx": dx, "dscores": dscores, "dw_up": dw_up[chosen], "dw_down": dw_down[chosen]}
    assert_near(got, oracle(small, layer | {"w_up": w_up[chosen], "w_down": w_down[chosen]}), torch.bfloat16)
    for dw in (dw_up, dw_down):
        assert (dw[1:2047].flatten(1).amax(1) == 0).all()
        assert (dw[1:2047].flatten(1).amin(1) == 0).all()


# ---- the lists themselves


@pytest.mark.parametrize("experts", [1, 7, 128, 2048, 4096])
@pytest.mark.parametrize(("tokens", "k"), [(1, 1), (1000, 8), (257, 64)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lists_are_those_of_the_cpu(experts, tokens, k, dtype):
    """Duplicates, ids outside [0, E) and masked tokens included."""
    g = torch.Generator().manual_seed(experts)
    ids = torch.randint(-1, experts + 1, (tokens, k), generator=g, dtype=dtype)
    for mask in (None, torch.rand(tokens, generator=g) < 0.7):
        want = intarsia.build_index(ids, experts, token_mask=mask)
        got = intarsia.build_index(ids.to(DEVICE), experts, token_mask=None if mask is None else mask.to(DEVICE))
        assert all(torch.equal(a.cpu(), b) for a, b in zip(got[:4], want[:4], strict=True))


def test_lists_of_many_tokens():
    """A stable sort says the same."""
    ids = torch.randint(0, 96, (600_000, 2), generator=seeded(), device=DEVICE, dtype=torch.int32)
    lists = intarsia.build_index(ids, 96)
    order = ids.flatten().argsort(stable=True)
    assert torch.equal(lists.row_slot.long(), order)
    assert torch.equal(lists.row_token.long(), order // 2)
    assert torch.equal(lists.counts().long(), ids.flatten().bincount(minlength=96))
    assert torch.equal(lists.slot_row.flatten()[order].long(), torch.arange(len(order), device=DEVICE))
