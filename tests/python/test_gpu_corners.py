"""Corners of the layer on the GPU: layouts, activations, dtypes, odd sizes and pointers, magnitudes, memory that is not
ours, NaN, masks, bad ids, bad lists, refusals.
"""

import pytest
import torch
from gpu_device import (
    DEVICE,
    FORMS,
    MARKS,
    Guard,
    assert_near,
    backward_fields,
    by_ids,
    check,
    cuda_only,
    draw,
    forward_fields,
    normal,
    oracle,
    random_ids,
    run,
)  # fmt: skip
from gpu_device import generator as seeded
from layers import GATED, PLAIN, Spec, assert_close, draw_inputs, expected, magnitudes, results

import intarsia
from intarsia import _core
from intarsia.errors import InvalidArgument, Unsupported

pytestmark = MARKS

COUNTS = [5, 0, 131, 64, 1, 0, 77]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def on_device(inputs: dict) -> dict:
    """The tests' inputs of layers.py, where the layer runs."""

    def moved(v):
        if isinstance(v, tuple):
            return tuple(map(moved, v))
        return v.detach().to(DEVICE).requires_grad_(v.requires_grad) if isinstance(v, torch.Tensor) else v

    return {name: moved(v) for name, v in inputs.items()}


def device_results(spec: Spec, inputs: dict) -> dict:
    got = results(intarsia.moe_mlp, on_device(inputs), save=spec.save, **spec.keywords)
    return {name: t.cpu() for name, t in got.items()}


# ---- what a layer can be


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("score_on", ["output", "inside", "input"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("layout", ["concatenated", "interleaved", ("blocks", 8), ("blocks", 5), "pair"])
def test_layouts(layout, transposed, score_on, dtype):
    """With biases, an addend, a mask and ids that are not here; gradients come back in the weights' layout."""
    spec = Spec(
        tokens=150, hidden=72, width=40, experts=5, k=3, dtype=dtype, layout=layout, transposed=transposed,
        b_up=score_on != "input", b_down=True, score_on=score_on, addend=True, mask=True, routing="sentinels",
    )  # fmt: skip
    inputs = draw_inputs(spec)
    assert_close(device_results(spec, inputs), expected(spec, inputs), magnitudes(spec, inputs), dtype, spec)


@pytest.mark.parametrize("layout", [("blocks", 64), ("blocks", 128), ("blocks", 16), "pair"])
@pytest.mark.parametrize("transposed", [False, True])
def test_layouts_of_wide_experts(layout, transposed):
    """Gates and ups in blocks of tiles and of parts of tiles."""
    spec = Spec(tokens=300, hidden=136, width=384, experts=3, k=2, dtype=torch.bfloat16, layout=layout,
                transposed=transposed)  # fmt: skip
    inputs = draw_inputs(spec)
    assert_close(device_results(spec, inputs), expected(spec, inputs), magnitudes(spec, inputs), spec.dtype, spec)


@pytest.mark.parametrize("sizes", [(72, 40), (33, 17)], ids=["multiples of 8", "odd"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("score_on", ["output", "inside", "input"])
@pytest.mark.parametrize("activation", GATED + PLAIN)
def test_activations_are_those_of_the_cpu(activation, score_on, dtype, sizes):
    spec = Spec(tokens=77, hidden=sizes[0], width=sizes[1], experts=4, k=2, dtype=dtype, activation=activation,
                b_up=score_on != "input", b_down=True, score_on=score_on)  # fmt: skip
    inputs = draw_inputs(spec)
    on_cpu = {n: t.double() for n, t in results(intarsia.moe_mlp, inputs, **spec.keywords).items()}
    assert_close(device_results(spec, inputs), on_cpu, magnitudes(spec, inputs), dtype, spec)


@pytest.mark.parametrize("score_on", ["output", "inside", "input"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_recomputed_preactivations_are_the_kept_ones(score_on, dtype):
    """save="input" gives the bits of save="preactivation"."""
    routing = by_ids(random_ids(seeded(), 700, 9, 3))
    layer = draw(routing, 136, 200, 9, dtype)
    kept, recomputed = (run(routing, layer, score_on=score_on, save=s) for s in ("preactivation", "input"))
    assert_near(recomputed, oracle(routing, layer, score_on=score_on), dtype)
    assert all(torch.equal(kept[n], recomputed[n]) for n in kept)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("sizes", [(33, 17), (40, 17), (33, 24), (3, 5), (129, 7)])
@pytest.mark.parametrize("form", FORMS)
def test_sizes_that_divide_nothing(form, sizes, dtype):
    routing = FORMS[form](COUNTS)
    check(routing, draw(routing, *sizes, len(COUNTS), dtype, bias=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_by_one(dtype):
    """H = I = 1: in 16 bits a gradient of one number may cancel to nothing but its rounding."""
    routing = FORMS["slots"](COUNTS)
    check(routing, draw(routing, 1, 1, len(COUNTS), dtype, bias=True))


# ---- memory


def shifted(t: torch.Tensor) -> torch.Tensor:
    """A copy that begins one element after a multiple of 16 bytes."""
    room = torch.full((t.numel() + 9,), torch.nan, dtype=t.dtype, device=DEVICE)
    return room[1 : t.numel() + 1].view(t.shape).copy_(t)


@pytest.mark.parametrize("name", ["x", "dy", "w_up", "w_down", "scores"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_misaligned_tensors(name, dtype):
    routing = by_ids(random_ids(seeded(), 200, 5, 2))
    layer = draw(routing, 72, 40, 5, dtype)
    check(routing, layer | {name: shifted(layer[name])})


@pytest.mark.parametrize("name", ["x", "dy"])
@pytest.mark.parametrize("view", ["one row", "one number", "columns first", "every other row", "every other column"])
def test_views(name, view):
    routing = by_ids(random_ids(seeded(), 200, 5, 2))
    layer = draw(routing, 72, 40, 5)
    views = {
        "one row": lambda t: t[:1].expand_as(t),
        "one number": lambda t: t[:1, :1].expand_as(t),
        "columns first": lambda t: t.t().contiguous().t(),
        "every other row": lambda t: t.repeat_interleave(2, 0)[::2],
        "every other column": lambda t: t.repeat_interleave(2, 1)[:, ::2],
    }
    check(routing, layer | {name: views[view](layer[name])})


@pytest.mark.parametrize("framed", [False, True], ids=["at the ends", "around every row"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("dtype", "H", "I"),
    [(torch.bfloat16, 72, 40), (torch.float16, 264, 136), (torch.bfloat16, 33, 17), (torch.float32, 72, 40)],
)
def test_neighbours_in_memory(form, framed, dtype, H, I):
    """NaN before and after every tensor is neither read nor written; nor is z where nobody has rows."""
    routing, E = FORMS[form](COUNTS), len(COUNTS)
    plain = draw(routing, H, I, E, dtype, bias=True)
    guard = Guard()
    layer = {n: guard.put(t, framed and n != "scores") for n, t in plain.items()}
    lists = [None if t is None else guard.put(t) for t in routing.lists(E)]

    def output(name):
        return guard.fresh(layer[name].shape, layer[name].dtype, framed and name != "scores")

    fields = forward_fields(lists, layer)
    y, z = output("x"), guard.fresh((len(routing.expert), 2 * I), dtype, framed)
    _core.run("layer_forward", **fields, y=y, z=z)
    assert z[sum(COUNTS) :].isnan().all()
    got = {f"d{n}": output(n) for n in layer if n != "dy"}
    _core.run("layer_backward", **backward_fields(fields, dy=layer["dy"], z=z, overwrite_z=True), **got)
    assert_near(got | {"y": y}, oracle(routing, plain), dtype)
    assert guard.intact()


@cuda_only
def test_tensors_that_fill_an_allocation():
    """Whole multiples of what torch asks of CUDA: one byte further is nobody's memory."""
    routing = by_ids(random_ids(seeded(), 5120, 5, 2))
    layer = draw(routing, H=2048, I=512, E=5)
    torch.cuda.empty_cache()
    layer = {n: t.clone() for n, t in layer.items()}
    big = [t for n, t in layer.items() if n != "scores"]
    assert all(t.untyped_storage().nbytes() % (2 << 20) == 0 for t in big)
    check(routing, layer)


# ---- magnitudes


@pytest.mark.parametrize("dy_scale", [1e-5, 1.0, 1e3])
@pytest.mark.parametrize("x_scale", [1e-5, 1.0, 1e3])
@pytest.mark.parametrize("activation", ["swiglu", "silu"])
def test_magnitudes(activation, x_scale, dy_scale):
    """Relative errors of tensors, rows, experts and stripes of 16 columns do not depend on the inputs' size."""
    routing = by_ids(random_ids(seeded(), 1000, 8, 2))
    layer = draw(routing, 320, 264, 8, gated=activation == "swiglu")
    layer |= {"x": layer["x"] * x_scale, "dy": layer["dy"] * dy_scale}
    check(routing, layer, activation=activation)


# ---- numbers that are none, tokens that are not here


@pytest.mark.parametrize("source", ["x", "dy"])
@pytest.mark.parametrize("token", [0, 5, 299])
@pytest.mark.parametrize("sizes", [(136, 72, torch.bfloat16), (33, 17, torch.bfloat16), (40, 24, torch.float32)])
def test_nan_stays_with_its_token(source, token, sizes):
    """Every bit of the other tokens, and of the experts that the token did not choose, is as without it."""
    H, I, dtype = sizes
    ids = random_ids(seeded(), 300, 6, 2)
    routing = by_ids(ids)
    layer = draw(routing, H, I, 6, dtype)
    clean = run(routing, layer)
    dirty = layer[source].clone()
    dirty[token] = torch.nan
    got = run(routing, layer | {source: dirty})
    tokens = torch.arange(300, device=DEVICE) != token
    experts = torch.ones(6, dtype=torch.bool, device=DEVICE)
    experts[ids[token].long()] = False
    for name, value in got.items():
        others = experts if name.startswith("dw") else tokens
        assert torch.equal(value[others], clean[name][others]), name
        touched = name != "y" or source == "x"
        if name in ("y", "dx", "dscores"):
            assert value[token].isnan().all() if touched else torch.equal(value, clean[name]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_masked_tokens(dtype):
    """Their x and dy, NaN here, are not read; their results are zero."""
    mask = torch.rand(300, generator=seeded(1), device=DEVICE) < 0.6
    routing = by_ids(random_ids(seeded(), 300, 6, 2), token_mask=mask)
    layer = draw(routing, 72, 40, 6, dtype)
    for name in ("x", "dy"):
        layer[name][~mask] = torch.nan
    got = check(routing, layer)
    assert all((got[n][~mask] == 0).all() for n in ("y", "dx", "dscores"))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_out_of_range(dtype):
    """They contribute nothing, whatever they are."""
    ids = random_ids(seeded(), 300, 6, 3).to(dtype)
    far = torch.iinfo(dtype)
    away = torch.tensor([-1, 6, 7, far.max, far.min, far.min + 1, -(2**20)], dtype=dtype, device=DEVICE)
    ids[:200, 0] = away[torch.randint(len(away), (200,), generator=seeded(1), device=DEVICE)]
    ids[7], ids[-1] = -1, 6
    got = check(by_ids(ids), draw(by_ids(ids), 72, 40, 6))
    assert (got["dscores"][(ids < 0) | (ids > 5)] == 0).all()
    assert (got["y"][[7, -1]] == 0).all()


# ---- refusals


REFUSED = [
    ({"backend": "cpu" if DEVICE == "cuda" else "cuda"}, Unsupported, "backend"),
    ({"score_on": "input"}, InvalidArgument, "b_up"),
    ({"activation": "silu"}, InvalidArgument, "w_up"),
    ({"w_up_gate_block": 7}, InvalidArgument, "w_up_gate_block"),
    ({"row_slot": None}, InvalidArgument, "row_slot"),
]


@pytest.mark.parametrize(("change", "error", "word"), REFUSED, ids=[word for *_, word in REFUSED])
def test_refusals_come_before_any_launch(change, error, word):
    """A sentence that names the argument, and outputs as they were."""
    routing = by_ids(random_ids(seeded(), 50, 4, 2))
    layer = draw(routing, 72, 40, 4, bias=True)
    fields = forward_fields(routing.lists(4), layer, **change)
    y, z = torch.full_like(layer["x"], torch.nan), torch.full((100, 80), torch.nan, device=DEVICE, dtype=torch.bfloat16)
    with pytest.raises(error, match=word):
        _core.run("layer_forward", **fields, y=y, z=z)
    gradients = {f"d{n}": torch.full_like(t, torch.nan) for n, t in layer.items() if n != "dy"}
    with pytest.raises(error, match=word):
        _core.run("layer_backward", **backward_fields(fields, dy=layer["dy"], z=z), **gradients)
    assert all(t.isnan().all() for t in (y, z, *gradients.values()))


@cuda_only
def test_tensors_of_two_devices_are_refused():
    ids, x = torch.zeros(5, 2, dtype=torch.int32), normal(seeded(), 5, 8)
    w_up, w_down = normal(seeded(), 3, 16, 8), normal(seeded(), 3, 8, 8)
    with pytest.raises(InvalidArgument, match="ids"):
        intarsia.moe_mlp(x, ids, torch.ones(5, 2, device=DEVICE), w_up, w_down)
    with pytest.raises(InvalidArgument, match="w_down"):
        intarsia.moe_mlp(x, ids.to(DEVICE), torch.ones(5, 2, device=DEVICE), w_up, w_down.cpu())


# ---- lists that are wrong: last, for what they break stays broken in this process


@cuda_only
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("dtype", "score_on"),
    [(torch.bfloat16, "output"), (torch.bfloat16, "input"), (torch.float32, "output")],
    ids=["wgmma", "mma.sync", "general"],
)
def test_wrong_lists_stay_inside(dtype, score_on, seed):
    """The host cannot see lists on the GPU: wrong ones give wrong numbers, but write nowhere else and never hang."""
    g = torch.Generator().manual_seed(seed)
    routing = by_ids(random_ids(seeded(), 150, 6, 2))
    guard = Guard()
    layer = {n: guard.put(t) for n, t in draw(routing, 72, 40, 6, dtype).items()}
    lists = []
    for right in routing.lists(6)[:4]:
        wrong = torch.randint(-50, 350, right.shape, generator=g, dtype=torch.int32).to(DEVICE)
        keep = torch.rand(right.shape, generator=g).to(DEVICE) < 0.5
        lists.append(guard.put(torch.where(keep, right, wrong)))
    fields = forward_fields(lists, layer, score_on=score_on)
    y, z = guard.fresh((150, 72), dtype), guard.fresh((300, 80), dtype)
    _core.run("layer_forward", **fields, y=y, z=z)
    got = {f"d{n}": guard.fresh(layer[n].shape, layer[n].dtype) for n in ("x", "scores", "w_up", "w_down")}
    _core.run("layer_backward", **backward_fields(fields, dy=layer["dy"], z=z), **got)
    torch.cuda.synchronize()
    assert guard.intact()
