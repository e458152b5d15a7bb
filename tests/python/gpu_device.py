"""What the GPU tests share: random layers in the three forms of the lists, a float64 oracle on the same device, and how
results are judged.

Expected values come from plain torch in float64, expert by expert over the same routing. INTARSIA_TEST_DEVICE=cpu runs
what is not about CUDA itself on the CPU backend: a check of the tests.
"""

import os
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import intarsia
from intarsia import _c, _core, reference

DEVICE = os.environ.get("INTARSIA_TEST_DEVICE", "cuda")


def _missing() -> bool:
    return DEVICE == "cuda" and not (torch.cuda.is_available() and _core.doctor()["cuda_kernels"])


# A hung kernel keeps the main thread inside CUDA, where no signal handler runs: another thread has to end the process.
MARKS = [
    pytest.mark.gpu,
    pytest.mark.timeout(60, method="thread"),
    pytest.mark.skipif(_missing(), reason="needs a GPU and CUDA kernels"),
]
cuda_only = pytest.mark.skipif(DEVICE != "cuda", reason="about CUDA itself")

# Relative errors in the Frobenius norm: results are rounded three or four times on their way to 16 bits.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5, torch.float64: 1e-12}


# ---- drawing


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


def normal(g: torch.Generator, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal numbers, rounded once to dtype."""
    return (torch.randn(*shape, generator=g, device=DEVICE, dtype=torch.float32) * scale).to(dtype)


class Routing(NamedTuple):
    """One of the three forms of the layer, and what it means row by row."""

    call: Callable  # (x=, scores=, w_up=, w_down=, **options) -> y
    lists: Callable  # (E) -> IndexLists
    tokens: int  # rows of x and y
    scores: tuple[int, ...]  # shape of scores
    token: Tensor  # of every score
    expert: Tensor  # of every score; outside [0, E): no row
    sorted: bool = False  # x and y are rows, not tokens


def by_ids(ids: Tensor, **fixed) -> Routing:
    """moe_mlp on ids (T, K): the lists with slot_row. `fixed`: token_mask."""
    tokens, k = ids.shape
    expert = ids.flatten().long()
    if "token_mask" in fixed:
        expert = torch.where(fixed["token_mask"].repeat_interleave(k), expert, -1)

    def call(x, scores, w_up, w_down, **options):
        return intarsia.moe_mlp(x, ids, scores, w_up, w_down, **fixed, **options)

    def lists(experts):
        return intarsia.build_index(ids, experts, **fixed)

    return Routing(call, lists, tokens, (tokens, k), torch.arange(tokens, device=DEVICE).repeat_interleave(k), expert)


def random_ids(g: torch.Generator, tokens: int, experts: int, k: int) -> Tensor:
    """(T, K) int32, distinct in a row."""
    return torch.rand(tokens, experts, generator=g, device=DEVICE).topk(k).indices.int()


def slots(counts: list[int], k: int = 1, seed: int = 0) -> Routing:
    """Exactly counts[e] slots choose expert e, wherever they are: a token may choose one twice. The rest is -1."""
    chosen = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    chosen = F.pad(chosen, (0, -len(chosen) % k), value=-1)
    order = torch.randperm(len(chosen), generator=torch.Generator().manual_seed(seed))
    return by_ids(chosen[order].view(-1, k).int().to(DEVICE))


def csr(counts: list[int], seed: int = 0) -> Routing:
    """The lists with token_offsets: expert e has counts[e] different tokens, and there are rows to spare."""
    tokens, spare = max(counts) + 3, 5
    luck = torch.rand(len(counts), tokens, generator=torch.Generator().manual_seed(seed))
    chosen = luck.argsort(1).argsort(1) < torch.tensor(counts).unsqueeze(1)  # (E, T)
    expert, token = chosen.nonzero(as_tuple=True)
    token_rows = token.argsort(stable=True)
    row_slot = torch.empty_like(token_rows).scatter_(0, token_rows, torch.arange(len(token)))

    def offsets(n):
        return F.pad(n.cumsum(0), (1, 0)).int().to(DEVICE)

    def rows(t):
        return F.pad(t, (0, spare), value=-1).to(DEVICE)

    lists = intarsia.IndexLists(
        offsets(chosen.sum(1)), rows(token).int(), rows(row_slot).int(), None, offsets(chosen.sum(0)),
        rows(token_rows).int(),
    )  # fmt: skip

    def call(x, scores, w_up, w_down, **options):
        return intarsia.moe_mlp(x, lists, scores, w_up, w_down, **options)

    return Routing(call, lambda _: lists, tokens, (len(token) + spare,), rows(token), rows(expert))


def sorted_rows(counts: list[int], seed: int = 0) -> Routing:
    """grouped_mlp: rows sorted by expert, then slack rows that belong to nobody."""
    slack = 7 + seed
    expert = F.pad(torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)), (0, slack), value=-1).to(DEVICE)
    offsets = F.pad(torch.tensor(counts).cumsum(0), (1, 0)).int().to(DEVICE)

    def call(x, scores, w_up, w_down, **options):
        return intarsia.grouped_mlp(x, offsets, w_up, w_down, row_scores=scores, **options)

    rows = len(expert)
    lists = intarsia.IndexLists(offsets, None, None)
    return Routing(call, lambda _: lists, rows, (rows,), torch.arange(rows, device=DEVICE), expert, sorted=True)


FORMS = {"slots": slots, "csr": csr, "sorted": sorted_rows}


def draw(
    routing: Routing,
    H: int,
    I: int,
    E: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    seed: int = 0,
    gated: bool = True,
    bias: bool = False,
) -> dict:
    """x, scores, w_up, w_down, dy and biases. Slack among sorted rows is NaN: it is never read."""
    g, up = generator(seed), I * (2 if gated else 1)
    layer = {
        "x": normal(g, routing.tokens, H, dtype=dtype),
        "scores": torch.rand(*routing.scores, generator=g, device=DEVICE) + 0.25,
        "w_up": normal(g, E, up, H, scale=H**-0.5, dtype=dtype),
        "w_down": normal(g, E, H, I, scale=I**-0.5, dtype=dtype),
        "dy": normal(g, routing.tokens, H, dtype=dtype),
    }
    if bias:
        layer |= {"b_up": normal(g, E, up, dtype=dtype), "b_down": normal(g, E, H, dtype=dtype)}
    if dtype == torch.float64:
        layer["scores"] = layer["scores"].double()
    if routing.sorted:
        for name in ("x", "dy"):
            layer[name][routing.expert < 0] = torch.nan
    return layer


# ---- running


def poison() -> None:
    """Leaves 0xff bytes, NaN, in what torch's allocator hands out next: outputs, z, gradients and workspaces."""
    if DEVICE != "cuda":
        return
    torch.cuda.empty_cache()
    blocks = [
        torch.full((1 << 20,), 255, dtype=torch.uint8, device=DEVICE) for _ in range(16)
    ]  # its pool of small ones
    blocks.append(torch.full((1 << 28,), 255, dtype=torch.uint8, device=DEVICE))


def run(routing: Routing, layer: dict, **options) -> dict:
    """y and the gradients of everything but dy, by name, on fresh memory full of NaN."""
    leaves = {name: t.detach().requires_grad_() for name, t in layer.items() if name != "dy"}
    poison()
    y = routing.call(**leaves, **options)
    gradients = torch.autograd.grad(y, list(leaves.values()), layer["dy"])
    return {"y": y.detach()} | {f"d{n}": t for n, t in zip(leaves, gradients, strict=True)}


def oracle(
    routing: Routing,
    layer: dict,
    *,
    activation: str = "swiglu",
    layout="concatenated",
    transposed: bool = False,
    score_on: str = "output",
) -> dict:
    """The same results in float64: for each expert its rows of x through two products, summed into their tokens."""
    leaves = {name: t.detach().double().requires_grad_() for name, t in layer.items() if name != "dy"}
    x, scores, b_up, b_down = (leaves.get(n) for n in ("x", "scores", "b_up", "b_down"))
    w_up, w_down, b_up = reference.expert_weights(
        leaves["w_up"], leaves["w_down"], b_up, activation, layout, transposed
    )
    here = torch.where((routing.expert >= 0) & (routing.expert < len(w_up)))[0]
    order = here[routing.expert[here].argsort(stable=True)]
    token, counts = routing.token[order], routing.expert[order].bincount(minlength=len(w_up)).tolist()
    parts = zip(x[token].split(counts), scores.flatten()[order].unsqueeze(1).split(counts), strict=True)
    # Views of all experts at once: the gradient of w[e] alone would be as large as w.
    weights = [None if w is None else w.unbind() for w in (w_up, w_down, b_up, b_down)]
    out = [reference._expert(rows, s, e, *weights, activation, score_on) for e, (rows, s) in enumerate(parts)]
    y = torch.zeros_like(x).index_add(0, token, torch.cat(out))
    gradients = torch.autograd.grad(y, list(leaves.values()), layer["dy"].double())
    return {"y": y.detach()} | {f"d{n}": t for n, t in zip(leaves, gradients, strict=True)}


def check(routing: Routing, layer: dict, **options) -> dict:
    """Runs the layer and judges every result; returns them."""
    got = run(routing, layer, **options)
    assert_near(got, oracle(routing, layer, **{n: v for n, v in options.items() if n != "save"}), layer["x"].dtype)
    return got


# ---- judging


def _row_norms(t: Tensor) -> Tensor:
    return t.reshape(len(t), -1).norm(dim=1)


def _stripe_norms(t: Tensor) -> Tensor:
    """Of every 16 columns."""
    t = F.pad(t.reshape(-1, t.shape[-1]), (0, -t.shape[-1] % 16))
    return t.unflatten(1, (-1, 16)).square().sum((0, 2)).sqrt()


def _within(what: str, error: Tensor, allowed: Tensor) -> None:
    worst = (error - allowed).argmax().item()
    assert (error <= allowed).all(), f"{what} [{worst}]: error {error[worst]:.3e}, allowed {allowed[worst]:.3e}"


def assert_near(got: dict, want: dict, dtype: torch.dtype) -> None:
    """Every tensor within its tolerance; no row of it, no expert's gradient and no stripe of 16 columns much worse.

    A row or stripe is measured by its own norm or the usual one, whichever is larger (a sum may cancel); an expert by
    its own alone, so that the gradient of an expert without rows has to be zero.
    """
    unit = TOLERANCE[dtype]
    for name, expected in want.items():
        assert got[name].shape == expected.shape, name
        assert got[name].isfinite().all(), f"{name} is not finite"
        if expected.numel() == 0:
            continue
        error = got[name].double() - expected
        _within(name, error.norm().view(1), unit * expected.norm().view(1))
        of_expert = name.startswith(("dw", "db"))
        size = _row_norms(expected)
        if not of_expert:
            size = size.clamp_min(size.square().mean().sqrt())
        slack = 16 if name == "dscores" else 4  # a dot product cancels more than a row of H sums
        _within(f"{name}: rows", _row_norms(error), slack * unit * size)
        for axis in (1, 2) if name.startswith("dw") else () if name == "dscores" else (1,):
            stripes = _stripe_norms(expected.transpose(-1, axis))
            size = stripes.clamp_min(stripes.square().mean().sqrt())
            _within(f"{name}: stripes of axis {axis}", _stripe_norms(error.transpose(-1, axis)), 3 * unit * size)


# ---- the raw operators


def forward_fields(lists: intarsia.IndexLists, layer: dict, **more) -> dict:
    """Arguments of layer_forward, but for the outputs."""
    inputs = {n: layer[n] for n in ("x", "scores", "w_up", "w_down", "b_up", "b_down") if n in layer}
    names = ("expert_offsets", "row_token", "row_slot", "slot_row", "token_offsets", "token_rows")
    values = {"w_up_gate_block": 0, "w_up_transposed": False, "w_down_transposed": False}
    return (
        inputs | dict(zip(names, lists, strict=False)) | values | {"activation": "swiglu", "score_on": "output"} | more
    )


def backward_fields(forward: dict, **more) -> dict:
    """Arguments of layer_backward, but for dy, z and the outputs."""
    layouts = ("w_up_gate_block", "w_up_transposed", "w_down_transposed")
    fields = {n: v for n, v in forward.items() if n not in ("y", "z", "addend")}
    fields |= {f"d{n}": forward[n] for n in layouts}
    return fields | {"overwrite_z": False, "accumulate": False, "grad_scale": 1.0} | more


def explain(operation: str, fields: dict) -> dict:
    """What would run each operation of the layer, by name."""
    text = _c.explain(operation, fields).partition("): ")[2]
    return dict(line.split(": ", 1) for line in text.splitlines())


_INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Guard:
    """Keeps tensors inside larger ones of 0xff bytes, which are NaN (or -1): `intact` tells whether they still are."""

    def __init__(self):
        self.kept = []

    def put(self, t: Tensor, framed: bool = False) -> Tensor:
        """A copy of t that begins and ends inside poison; `framed`: so does every row of it."""
        margins = [128, *[8 if framed else 0] * (t.dim() - 1)]  # 8: rows still begin at multiples of 16 bytes
        shape = [n + 2 * m for n, m in zip(t.shape, margins, strict=True)]
        outer = torch.full(shape, -1, dtype=_INTEGER[t.element_size()], device=DEVICE)
        place = tuple(slice(m, m + n) for n, m in zip(t.shape, margins, strict=True))
        self.kept.append((outer, place))
        return outer.view(t.dtype)[place].copy_(t)

    def fresh(self, shape, dtype: torch.dtype, framed: bool = False) -> Tensor:
        """Room for an output."""
        return self.put(torch.full(tuple(shape), torch.nan, device=DEVICE).to(dtype), framed)

    def intact(self) -> bool:
        for outer, place in self.kept:
            rest = outer.clone()
            rest[place] = -1
            if not (rest == -1).all():
                return False
        return True
