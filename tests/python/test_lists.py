"""build_index and round_tokens."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import intarsia
from intarsia import reference


def test_worked_example():
    """MoEBlaze's example, as design.md section 2 corrects it."""
    lists = intarsia.build_index(torch.tensor([[2, 3], [0, 1], [0, 3], [1, 2], [0, 3]]), 4)
    assert lists.expert_offsets.tolist() == [0, 3, 5, 7, 10]
    assert lists.row_token.tolist() == [1, 2, 4, 1, 3, 0, 3, 0, 2, 4]
    assert lists.slot_row.tolist() == [[5, 7], [0, 3], [1, 8], [4, 6], [2, 9]]
    assert lists.counts().tolist() == [3, 2, 2, 3]


@given(
    st.integers(0, 200),
    st.integers(1, 12),
    st.integers(1, 50),
    st.booleans(),
    st.sampled_from([torch.int32, torch.int64]),
)
def test_build_index(tokens, k, experts, masked, dtype):
    """Against a stable sort, with duplicates and sentinels; positions unique and dense. reports.md 87, 99"""
    ids = torch.randint(-2, experts + 2, (tokens, k)).to(dtype)
    mask = torch.rand(tokens) < 0.6 if masked else None
    lists = intarsia.build_index(ids, experts, token_mask=mask)
    here = (ids >= 0) & (ids < experts)
    if masked:
        here &= mask.unsqueeze(1)
    flat = torch.where(here, ids, experts).flatten().long()
    order = flat.sort(stable=True).indices[: int(here.sum())]
    rows = order.numel()
    counts = torch.bincount(flat, minlength=experts + 1)[:experts]
    assert torch.equal(lists.counts().long(), counts)
    assert lists.expert_offsets[0] == 0
    assert torch.equal(lists.row_slot[:rows].long(), order)
    assert torch.equal(lists.row_token[:rows].long(), order // k)
    assert (lists.row_token[rows:] == -1).all()
    slot_row = torch.full((tokens * k,), -1, dtype=torch.int64)
    slot_row[order] = torch.arange(rows)
    assert torch.equal(lists.slot_row.flatten().long(), slot_row)


@given(st.integers(0, 120), st.integers(1, 12), st.data())
def test_round_tokens(tokens, experts, data):
    """Pairs, scores and CSR lists against the specification's mask."""
    k = data.draw(st.integers(1, experts))
    tile = data.draw(st.sampled_from([1, 2, 8, 16, 128]))
    rounding = data.draw(st.sampled_from(["up", "down", "nearest", "balanced"]))
    logits = torch.randn(tokens, experts)
    # float32 and float64 order an expert's tokens alike where no two probabilities are close
    assume((logits.double().softmax(1).sort(0).values.diff(dim=0) > 1e-7).all() or experts == 1)
    if tokens and data.draw(st.booleans()):
        logits[-1] = float("nan")
    mask = torch.rand(tokens) < 0.8 if data.draw(st.booleans()) else None
    lists = intarsia.round_tokens(logits, k, tile=tile, rounding=rounding, token_mask=mask)
    want = reference.round_tokens(logits.double(), k, tile=tile, rounding=rounding, token_mask=mask)
    check_lists(lists, want, logits)


def check_lists(lists, want, logits):
    tokens, experts = want.shape
    rows = int(lists.expert_offsets[-1])
    expert = torch.repeat_interleave(torch.arange(experts), lists.counts().long())
    token = lists.row_token[:rows].long()
    got = torch.zeros(tokens, experts, dtype=torch.bool)
    got[token, expert] = True
    assert rows == int(got.sum())
    assert torch.equal(got, want)
    assert all((token[expert == e].diff() > 0).all() for e in range(experts))
    torch.testing.assert_close(lists.row_score[:rows], logits.softmax(1)[token, expert])
    assert (lists.row_score[rows:] == 0).all()
    assert torch.equal(lists.token_offsets.diff().long(), want.sum(1))
    assert torch.equal(
        token[lists.token_rows[:rows].long()], torch.repeat_interleave(torch.arange(tokens), want.sum(1))
    )
    assert torch.equal(lists.token_rows[lists.row_slot[:rows].long()].long(), torch.arange(rows))


@pytest.mark.parametrize("seed", [0, 1, 12345678901])
def test_stochastic_rounding_follows_its_seed(seed):
    logits = torch.randn(200, 6)
    first, again = (intarsia.round_tokens(logits, 2, tile=32, rounding="stochastic", seed=seed) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True) if a is not None)
    assert (first.counts() % 32 == 0).all()


def test_stochastic_rounding_is_unbiased():
    """Up with probability frac(count / tile): the mean over seeds is the count."""
    logits = torch.randn(100, 4)
    ids, _ = intarsia.route(logits, 2)
    counts = torch.bincount(ids.flatten(), minlength=4).double()
    seeds = 400
    draws = torch.stack([
        intarsia.round_tokens(logits, 2, tile=16, rounding="stochastic", seed=s).counts() for s in range(seeds)
    ]).double()  # fmt: skip
    assert ((draws.mean(0) - counts).abs() < 5 * 8 / seeds**0.5).all()  # five standard errors of a coin worth 16


def test_stochastic_seed_comes_from_torch():
    logits = torch.randn(200, 6)
    torch.manual_seed(5)
    a = intarsia.round_tokens(logits, 2, tile=32, rounding="stochastic")
    torch.manual_seed(5)
    b = intarsia.round_tokens(logits, 2, tile=32, rounding="stochastic")
    assert torch.equal(a.row_token, b.row_token)
