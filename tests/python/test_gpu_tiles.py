"""Every kernel and raster of the Hopper products forced once; which kernels run what; gradients written, scaled and
added in every dtype and layout.
"""

import re

import pytest
import torch
from gpu_device import (
    DEVICE,
    FORMS,
    MARKS,
    assert_near,
    backward_fields,
    by_ids,
    check,
    cuda_only,
    draw,
    explain,
    forward_fields,
    generator,
    oracle,
    random_ids,
)  # fmt: skip

from intarsia import _core
from intarsia.errors import InvalidArgument

pytestmark = MARKS

hopper_only = pytest.mark.skipif(
    DEVICE != "cuda" or not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="about the kernels for compute capability 9.0",
)

FORWARD = ("up_forward", "down_forward")
BACKWARD = ("down_backward", "down_weight_backward", "up_weight_backward", "up_backward")
KERNELS = (
    "tile_256", "tile_256_pair", "tile_192_ping_pong", "tile_128_ping_pong", "tile_128_ping_pong_deep", "tile_128",
)  # fmt: skip
FIRST = dict.fromkeys(FORWARD + BACKWARD, "tile_256") | {"down_backward": "tile_128_ping_pong"}
RASTERS = ("g1:b1", "g2:b1", "g5:b1", "g8:b2", "g16:b3")
COUNTS = [257, 0, 1, 129, 400, 64, 0, 127]


def force(monkeypatch, choice: str) -> None:
    """The variable is read at every launch."""
    monkeypatch.setenv("INTARSIA_CONFIG", ",".join(f"{product}={choice}" for product in FORWARD + BACKWARD))


def outputs(layer: dict, dtype: torch.dtype | None = None) -> dict:
    """Gradients of everything but dy, full of NaN; those of the parameters in dtype."""
    return {
        f"d{n}": torch.full_like(t, torch.nan, dtype=dtype if n.startswith(("w", "b")) else None)
        for n, t in layer.items()
        if n != "dy"
    }


def passes(lists, layer: dict, gradients: dict, forward: dict, **backward) -> tuple[dict, dict]:
    """Runs the raw operators on poisoned buffers: results by name, and what explain says of every operation."""
    fields = forward_fields(lists, layer, **forward)
    rows = layer["x"] if lists.row_token is None else lists.row_token
    width = layer["w_up"].shape[2 if fields["w_up_transposed"] else 1]
    y = torch.full_like(layer["x"], torch.nan)
    z = torch.full((rows.shape[0], width), torch.nan, dtype=y.dtype, device=DEVICE)
    said = explain("layer_forward", fields | {"y": y, "z": z}) if DEVICE == "cuda" else {}
    _core.run("layer_forward", **fields, y=y, z=z)
    fields = backward_fields(fields, dy=layer["dy"], z=z, **backward) | gradients
    said |= explain("layer_backward", fields) if DEVICE == "cuda" else {}
    _core.run("layer_backward", **fields)
    return {"y": y} | gradients, said


def transposed(layer: dict) -> dict:
    """The same weights with their last two axes exchanged in memory."""
    return layer | {n: layer[n].transpose(1, 2).contiguous() for n in ("w_up", "w_down")}


TRANSPOSED = {"w_up_transposed": True, "w_down_transposed": True}


# ---- every configuration


def kernels_of(product: str, form: str, turned: bool) -> tuple[str, ...]:
    """Those beside the first, for bfloat16, swiglu and no bias; sorted rows give their scores to down_forward."""
    if (turned and not product.endswith("weight_backward")) or (form == "sorted" and product == "down_forward"):
        return ()
    if product == "down_backward":
        return ("tile_256", "tile_128_ping_pong_deep")
    return ("tile_256_pair", "tile_192_ping_pong") if product in ("down_forward", "up_backward") else ("tile_256_pair",)


@hopper_only
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("turned", [False, True], ids=["out in", "in out"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_and_raster(kernel, form, turned, dtype, monkeypatch):
    """explain names the one that is launched; results are right, and the raster changes no bit of them."""
    routing = FORMS[form](COUNTS)
    layer = draw(routing, 584, 328, len(COUNTS), dtype)
    if turned:
        layer = transposed(layer)
    lists, first = routing.lists(len(COUNTS)), None
    for raster in RASTERS:
        force(monkeypatch, f"{kernel}:{raster}")
        got, said = passes(lists, layer, outputs(layer), TRANSPOSED if turned else {})
        for product in FORWARD + BACKWARD:
            common = dtype == torch.bfloat16 and kernel in kernels_of(product, form, turned)
            assert f"wgmma, {kernel if common else FIRST[product]}:{raster}" in said[product], said
        if first is None:
            assert_near(got, oracle(routing, layer, transposed=turned), dtype)
            first = got
        assert all(torch.equal(got[n], first[n]) for n in got), raster


@hopper_only
@pytest.mark.parametrize("activation", ["silu", "geglu", "clamped_swiglu"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_forced_kernels_with_other_epilogues(kernel, activation, monkeypatch):
    """A kernel that does not exist for a combination gives way to one that does."""
    force(monkeypatch, f"{kernel}:g3:b2")
    routing, gated = FORMS["slots"](COUNTS), activation != "silu"
    for bias in (False, True):
        layer = draw(routing, 264, 200, len(COUNTS), gated=gated, bias=bias)
        for score_on in ("output", "inside"):
            check(routing, layer, activation=activation, score_on=score_on)


@hopper_only
@pytest.mark.parametrize("size", [8, 64, 128, 200, 256, 512, 1032])
@pytest.mark.parametrize("kernel", KERNELS)
def test_forced_kernels_at_borders_of_h_and_i(kernel, size, monkeypatch):
    force(monkeypatch, kernel)
    routing = FORMS["slots"](COUNTS)
    for H, I in ((size, 96), (96, size)):
        check(routing, draw(routing, H, I, len(COUNTS)))


@hopper_only
@pytest.mark.parametrize("text", ["tile_1", "tile_256:g0", "tile_256:x4", "tile_256:b", ""])
def test_a_wrong_choice_is_refused_in_a_sentence(text, monkeypatch):
    """The one about kernels names all of them: none is left out here."""
    monkeypatch.setenv("INTARSIA_CONFIG", f"up_forward={text}")
    routing = FORMS["slots"](COUNTS)
    layer = draw(routing, 64, 32, len(COUNTS))
    with pytest.raises(InvalidArgument, match="INTARSIA_CONFIG") as refusal:
        passes(routing.lists(len(COUNTS)), layer, outputs(layer), {})
    if text == "tile_1":
        assert set(re.findall(r"tile_\w+", str(refusal.value))) == {text, *KERNELS}


# ---- which kernels run


@cuda_only
@pytest.mark.parametrize(
    ("change", "word", "products"),
    [
        ({}, "wgmma", FORWARD + BACKWARD),
        ({"score_on": "input"}, "wgmma", FORWARD + BACKWARD),
        ({"I": 48, "blocks": 24}, "mma.sync", ("up_forward", "up_backward", "up_weight_backward")),
        ({"H": 36}, "general", FORWARD + BACKWARD),
        ({"I": 17}, "general", FORWARD + BACKWARD),
        ({"dtype": torch.float32}, "general", FORWARD + BACKWARD),
        ({"dtype": torch.float64}, "general", FORWARD + BACKWARD),
        ({"shift": "x"}, "general", ("up_forward", "up_weight_backward")),
        ({"shift": "w_down"}, "general", ("down_forward", "down_backward")),
    ],
    ids=str,
)
def test_kernels_that_explain_names(change, word, products):
    """A fallback is visible, has its reason, and is right."""
    if word == "wgmma" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("about the kernels for compute capability 9.0")
    routing, dtype = FORMS["slots"](COUNTS), change.get("dtype", torch.bfloat16)
    layer = draw(routing, change.get("H", 64), change.get("I", 40), len(COUNTS), dtype)
    if name := change.get("shift"):
        room = torch.empty(layer[name].numel() + 1, dtype=dtype, device=DEVICE)
        layer[name] = room[1:].view(layer[name].shape).copy_(layer[name])
    fields = options = {"score_on": change.get("score_on", "output")}
    if blocks := change.get("blocks"):
        fields, options = fields | {"w_up_gate_block": blocks}, options | {"layout": ("blocks", blocks)}
    got, said = passes(routing.lists(len(COUNTS)), layer, outputs(layer), fields)
    assert_near(got, oracle(routing, layer, **options), dtype)
    for product in products:
        path = said[product].partition("; no ")
        assert word in path[0], said[product]
        assert path[2] or word == "wgmma", said[product]


# ---- gradients: overwritten or added to, in every dtype and layout


LAYOUTS = {
    "concatenated": ({}, {}),
    "interleaved": ({"w_up_gate_block": 1}, {"layout": "interleaved"}),
    "blocks": ({"w_up_gate_block": 8}, {"layout": ("blocks", 8)}),
    "transposed": (TRANSPOSED, {"transposed": True}),
}


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("of_gradients", [torch.float32, None], ids=["fp32", "like the weight"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", [(264, 136, torch.bfloat16), (72, 40, torch.float16), (33, 24, torch.bfloat16)])
def test_gradients_are_written_scaled_or_added(sizes, layout, of_gradients, accumulate):
    """grad_scale times the gradient, added in fp32 and rounded once; experts without rows: zeros, or untouched."""
    H, I, dtype = sizes
    routing, experts = FORMS["slots"](COUNTS), len(COUNTS)
    layer = draw(routing, H, I, experts, dtype, bias=True)
    fields, options = LAYOUTS[layout]
    if layout == "transposed":
        layer = transposed(layer)
    gradients, g = outputs(layer, of_gradients), generator(1)
    parameters = [n for n in gradients if n.startswith(("dw", "db"))]
    if accumulate:
        for name in parameters:
            gradients[name].copy_(torch.randn(gradients[name].shape, generator=g, device=DEVICE))
    before = {n: gradients[n].clone() for n in parameters}
    got, _ = passes(routing.lists(experts), layer, gradients, fields, accumulate=accumulate, grad_scale=0.5)
    want = oracle(routing, layer, **options)
    assert_near({n: got[n] for n in ("y", "dx", "dscores")}, {n: want[n] for n in ("y", "dx", "dscores")}, dtype)
    empty = [e for e, count in enumerate(COUNTS) if count == 0]
    for name in parameters:
        added = before[name].double() if accumulate else torch.zeros_like(want[name])
        assert torch.equal(got[name][empty].double(), added[empty]), name
        error = (got[name].double() - added - 0.5 * want[name]).flatten(1).norm(dim=1)
        rounding = torch.finfo(got[name].dtype).eps * added.flatten(1).norm(dim=1)
        assert (error <= 1e-2 * 0.5 * want[name].flatten(1).norm(dim=1) + rounding).all(), name


@pytest.mark.parametrize("wanted", ["dx", "dscores", "dw_up", "dw_down", "db_up", "db_down"])
def test_one_gradient_alone(wanted):
    """What nobody asks for is not computed, and what is asked for has the bits that it has beside the others."""
    routing = by_ids(random_ids(generator(), 300, 5, 2))
    layer = draw(routing, 136, 72, 5, bias=True)
    gradients = outputs(layer)
    everything, _ = passes(routing.lists(5), layer, gradients, {})
    alone, _ = passes(routing.lists(5), layer, {wanted: torch.full_like(gradients[wanted], torch.nan)}, {})
    assert torch.equal(alone[wanted], everything[wanted])


def test_two_tensors_for_gate_and_up():
    """Gradients of both, added to fp32 buffers."""
    routing, experts = FORMS["slots"](COUNTS), len(COUNTS)
    layer = draw(routing, 136, 72, experts)
    halves = {n: t.contiguous() for n, t in zip(("w_up", "w_up_second"), layer["w_up"].chunk(2, 1), strict=True)}
    fields = forward_fields(routing.lists(experts), layer | halves, w_up_second=halves["w_up_second"])
    y = torch.full_like(layer["x"], torch.nan)
    z = torch.full((len(routing.expert), 144), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    _core.run("layer_forward", **fields, y=y, z=z)
    sums = {f"d{n}": torch.ones_like(t, dtype=torch.float32) for n, t in halves.items()}
    _core.run(
        "layer_backward", **backward_fields(fields, dy=layer["dy"], z=z, accumulate=True, overwrite_z=True), **sums
    )
    want = oracle(routing, layer)
    got = {"y": y, "dw_up": torch.cat([t - 1 for t in sums.values()], 1)}
    assert_near({"y": y}, {"y": want["y"]}, torch.bfloat16)
    error, size = (t.flatten(1).norm(dim=1) for t in (got["dw_up"] - want["dw_up"], want["dw_up"]))
    assert (error <= 1e-2 * size).all()
