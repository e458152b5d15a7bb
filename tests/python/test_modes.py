"""Memory modes, saved bytes, recomputation, split backward, autocast, dtypes, frozen weights, determinism."""

import threading

import pytest
import torch
from layers import Spec, draw_inputs, results
from moe_layers import Calls, outputs_of
from torch.utils.checkpoint import checkpoint

import intarsia
from intarsia import _core, memory
from intarsia.ops import layer as layer_ops


def saved_tensors(function, weights=()):
    """What autograd holds after function(), parameters excluded: {storage pointer: bytes}, and how many tensors were
    packed.
    """
    held, count = {}, 0
    parameters = {w.untyped_storage().data_ptr() for w in weights}

    def pack(t):
        nonlocal count
        count += 1
        storage = t.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in parameters:
            held[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = function()
    return result, sum(held.values()), count


SIZES = {"tokens": 96, "hidden": 32, "width": 24, "experts": 8, "experts_per_token": 2}


@pytest.mark.parametrize("save", ["preactivation", "input"])
@pytest.mark.parametrize("scores", ["softmax", "softmax_renorm", "sigmoid", "sigmoid_group"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_saved_bytes_are_planned_bytes(save, scores, dtype):
    """Router and experts: measured by saved-tensor hooks, planned by the core, bounded by 2TH + 4RI + 20R + 8(E+1), and
    2TE for logits.
    """
    s = SIZES
    layer = intarsia.MoE(
        s["hidden"], s["width"], s["experts"], s["experts_per_token"], scores=scores, save=save, dtype=dtype
    )
    x = torch.randn(s["tokens"], s["hidden"], dtype=dtype, requires_grad=True)
    y, held, _ = saved_tensors(lambda: layer(x), layer.parameters())
    size = memory.LayerSize(**s, dtype=str(dtype).removeprefix("torch."), scores=scores)
    assert held == memory.plan(size, save)["saved_bytes"]
    y.sum().backward()
    if dtype == torch.bfloat16 and save == "preactivation":
        rows = s["tokens"] * s["experts_per_token"]
        raw_scores = 4 * rows if scores == "sigmoid_group" else 0
        logits = 2 * s["tokens"] * s["experts"] if scores == "softmax" else 0
        bound = 2 * s["tokens"] * s["hidden"] + 4 * rows * s["width"] + 20 * rows + 8 * (s["experts"] + 1)
        assert held <= bound + raw_scores + logits


def test_saved_bytes_of_rounded_lists_are_planned_bytes():
    logits, k, tile = torch.randn(50, 6), 2, 8
    lists = intarsia.round_tokens(logits, k, tile=tile)
    x, w = torch.randn(50, 16, requires_grad=True), (torch.randn(6, 24, 16), torch.randn(6, 16, 12))
    _, held, _ = saved_tensors(lambda: intarsia.moe_mlp(x, lists, None, *w), w)
    sizes = {"tokens": 50, "hidden": 16, "width": 12, "experts": 6, "experts_per_token": k}
    plan = _core.plan(**sizes, rows=lists.row_token.numel(), dtype="float32", token_rows=True)
    assert held == plan["saved_bytes"]


def test_core_memory_is_planned_memory():
    """The workspaces of forward and backward, counted by the core's allocator."""
    s = SIZES
    layer = intarsia.MoE(s["hidden"], s["width"], s["experts"], s["experts_per_token"])
    x = torch.randn(s["tokens"], s["hidden"], requires_grad=True)
    plan = _core.plan(**s, dtype="float32", threads=_core.num_threads())
    routing = layer.route(x.detach())
    y = None

    def peak(function):
        _core.memory_reset()
        live, _ = _core.memory()
        result = function()
        return result, _core.memory()[1] - live

    y, forward = peak(lambda: intarsia.moe_mlp(x, routing.lists, routing.scores, layer.w_up, layer.w_down))
    _, backward = peak(lambda: y.sum().backward())
    assert (forward, backward) == (plan["forward_workspace_bytes"], plan["backward_workspace_bytes"])


def test_inference_saves_nothing():
    layer = intarsia.MoE(16, 12, experts=4, experts_per_token=2)
    x = torch.randn(20, 16)
    with torch.no_grad():
        _, held, count = saved_tensors(lambda: layer(x), layer.parameters())
    layer.requires_grad_(False)
    _, also_held, also_count = saved_tensors(lambda: layer(x), layer.parameters())
    assert (held, count, also_held, also_count) == (0, 0, 0, 0)


def test_inference_writes_no_z():
    layer = intarsia.MoE(16, 12, experts=4, experts_per_token=2)
    x, ids, scores = torch.randn(20, 16), torch.randint(0, 4, (20, 2)), torch.rand(20, 2)
    with Calls() as calls:
        for learns in (True, False):
            layer.requires_grad_(learns)
            layer(x)
            intarsia.moe_mlp(x, ids, scores, layer.w_up, layer.w_down)
    wholes = [outputs_of(fields)["z"] for name, fields in calls.seen if name == "moe_forward"]
    experts = [fields["z"] is not None for name, fields in calls.seen if name == "layer_forward"]
    assert [z is not None for z in wholes] == [True, False]
    assert experts == [True, False]


def test_number_of_saved_tensors_never_depends_on_routing():
    """reports.md 90"""
    counts = set()
    for routing in ("uniform", "one expert", "nobody", "sentinels"):
        inputs = draw_inputs(Spec(tokens=40, experts=8, routing=routing))
        args = [inputs[n] for n in ("x", "ids", "scores", "w_up", "w_down")]
        counts.add(saved_tensors(lambda a=args: intarsia.moe_mlp(*a))[2])
    assert len(counts) == 1


def test_save_modes_give_the_same_bits():
    spec = Spec(tokens=50, hidden=24, width=16, experts=6, k=2, b_up=True, b_down=True)
    inputs = draw_inputs(spec)
    kept = results(intarsia.moe_mlp, inputs, save="preactivation")
    recomputed = results(intarsia.moe_mlp, inputs, save="input")
    assert all(torch.equal(kept[n], recomputed[n]) for n in kept)


# ---- z is overwritten once


def one_layer():
    inputs = draw_inputs(Spec(tokens=30))
    leaves = [inputs[n] for n in ("x", "scores", "w_up", "w_down")]
    return (
        inputs,
        leaves,
        lambda **k: intarsia.moe_mlp(
            inputs["x"], inputs["ids"], inputs["scores"], inputs["w_up"], inputs["w_down"], **k
        ),
    )


def test_second_backward_is_an_error_in_words():
    _, leaves, run = one_layer()
    y = run()
    torch.autograd.grad(y.sum(), leaves)
    with pytest.raises(intarsia.Error, match=r"second backward.*retain_graph=True"):
        torch.autograd.grad(y.sum(), leaves)


@pytest.mark.parametrize("save", ["preactivation", "input"])
def test_retain_graph_leaves_z_alone(save):
    _, leaves, run = one_layer()
    y = run(save=save)
    first = torch.autograd.grad(y.sum(), leaves, retain_graph=True)
    second = torch.autograd.grad(y.sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_backward_in_two_passes_equals_one():
    """Inputs first, then weights, as zero-bubble pipelines do; neither pass does the other's work. reports.md 101"""
    _, (x, scores, *weights), run = one_layer()
    joint = torch.autograd.grad(run().square().sum(), [x, scores, *weights])
    needs, original = [], layer_ops._run_backward

    def spy(dy, z, values, need, overwrite_z):
        needs.append((list(need), overwrite_z))
        return original(dy, z, values, need, overwrite_z)

    layer_ops._run_backward = spy
    try:
        loss = run().square().sum()
        apart = torch.autograd.grad(loss, [x, scores], retain_graph=True) + torch.autograd.grad(loss, weights)
    finally:
        layer_ops._run_backward = original
    assert all(torch.equal(a, b) for a, b in zip(joint, apart, strict=True))
    assert needs == [
        ([True, True, False, False, False, False, False], False),
        ([False, False, True, False, True, False, False], True),
    ]


# ---- recomputation


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("rounding", [None, "nearest", "stochastic"])
def test_activation_checkpointing_recomputes_the_same_bits(reentrant, rounding):
    """reports.md 90, 99"""
    layer = intarsia.MoE(16, 12, experts=8, experts_per_token=2, scores="softmax", rounding=rounding, tile=8)
    x = torch.randn(70, 16, requires_grad=True)
    leaves = (x, *layer.parameters())

    def gradients(y):
        for t in leaves:
            t.grad = None
        y.square().sum().backward()
        return [y.detach(), *(t.grad.clone() for t in leaves)]

    torch.manual_seed(3)
    plain = gradients(layer(x))
    torch.manual_seed(3)
    again = gradients(checkpoint(layer, x, use_reentrant=reentrant))
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


# ---- determinism


def test_repeats_are_bit_equal_under_allocator_churn():
    """50 repeats, K = 8, deterministic mode on (which fills torch.empty with NaN). reports.md 59, 91, 92"""
    layer = intarsia.MoE(24, 16, experts=12, experts_per_token=8, shared_width=8)
    x = torch.randn(64, 24, requires_grad=True)
    torch.use_deterministic_algorithms(True)
    try:
        first = None
        for i in range(50):
            churn = [torch.full((97 * (i % 7 + 1),), float("nan")) for _ in range(5)]
            y = layer(x)
            run = [y, *torch.autograd.grad(y.square().sum(), (x, *layer.parameters()))]
            first = first or run
            assert all(torch.equal(a, b) for a, b in zip(first, run, strict=True))
            del churn
    finally:
        torch.use_deterministic_algorithms(False)


def test_two_python_threads_at_once():
    layer = intarsia.MoE(32, 24, experts=6, experts_per_token=2)
    x = torch.randn(200, 32)
    want, got = layer(x).detach(), {}

    def work(i):
        for _ in range(10):
            got[i] = layer(x).detach()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert all(torch.equal(want, y) for y in got.values())


# ---- dtypes


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scaler", [False, True])
def test_autocast(weights, dtype, scaler):
    """fp32 x with fp32 or bf16 weights; the output has autocast's dtype, gradients their parameters'. reports.md 102,
    103
    """
    layer = intarsia.MoE(
        16,
        12,
        experts=4,
        experts_per_token=2,
        bias=True,
        router_bias=True,
        shared_width=8,
        shared_gated=True,
        dtype=weights,
    )
    x = torch.randn(20, 16, requires_grad=True)
    with torch.autocast("cpu", dtype=dtype):
        y = layer(x)
    assert y.dtype == dtype
    loss = y.float().square().mean()
    if scaler:
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        scaler.scale(loss).backward()
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
    else:
        loss.backward()
    assert x.grad.dtype == torch.float32
    for name, p in layer.named_parameters():
        assert p.grad.dtype == weights, name
        assert p.grad.isfinite().all(), name
        assert p.grad.norm() > 0, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scores", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_output_has_the_dtype_of_the_input(dtype, scores):
    """Whatever the dtype of the scores. reports.md 106"""
    ids, s = torch.randint(0, 4, (9, 2)), torch.rand(9, 2).to(scores).requires_grad_()
    y = intarsia.moe_mlp(
        torch.randn(9, 8, dtype=dtype), ids, s, torch.randn(4, 12, 8, dtype=dtype), torch.randn(4, 8, 6, dtype=dtype)
    )
    assert y.dtype == dtype
    y.float().sum().backward()
    assert s.grad.dtype == scores


def test_router_in_float32_does_not_leak_into_a_bf16_layer():
    """reports.md 106"""
    layer = intarsia.MoE(16, 12, experts=4, experts_per_token=2, dtype=torch.bfloat16)
    layer.w_router.data = layer.w_router.data.float()
    x = torch.randn(10, 16, dtype=torch.bfloat16, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == torch.bfloat16
    assert layer.w_router.grad.dtype == torch.float32


def test_fp16_overflows_to_inf_and_never_to_nan_from_finite_products():
    """Gradients of 1e4 in fp16: what exceeds 65504 is inf, which a GradScaler sees; sums of finite terms stay finite.
    reports.md 105
    """
    inputs = draw_inputs(Spec(tokens=30, hidden=16, width=8, dtype=torch.float16, seed=11))
    inputs["dy"] = torch.full_like(inputs["dy"], 1e4)
    got = results(intarsia.moe_mlp, inputs)
    for name, value in got.items():
        assert not value.isnan().any(), name


def test_sum_over_experts_is_rounded_once():
    """K = 8, contributions 256 and 1: no worse than a float32 sum rounded once. reports.md 64"""
    k = 8
    x = torch.ones(5, 1, dtype=torch.bfloat16)
    w_up = torch.ones(k, 1, 1, dtype=torch.bfloat16)
    w_down = torch.ones(k, 1, 1, dtype=torch.bfloat16).index_fill(0, torch.tensor([0]), 256.0)
    ids = torch.arange(k).expand(5, k)
    y = intarsia.moe_mlp(x, ids, torch.ones(5, k), w_up, w_down, activation="relu")
    assert (y == torch.tensor(263.0).bfloat16()).all()


# ---- frozen weights, LoRA


@pytest.mark.parametrize("frozen", ["x", "scores", "w_up", "w_down", "b_up", "b_down"])
def test_a_frozen_input_gets_no_gradient_and_changes_no_other(frozen):
    spec = Spec(tokens=20, b_up=True, b_down=True)
    inputs = draw_inputs(spec)
    want = results(intarsia.moe_mlp, inputs)
    inputs[frozen] = inputs[frozen].detach()
    got = results(intarsia.moe_mlp, inputs)
    assert f"d{frozen}" not in got
    assert all(torch.equal(got[n], want[n]) for n in got)


@pytest.mark.parametrize("backend", [None, "reference"])
def test_lora_built_outside(backend):
    """w_up = base + B A: gradients of A and B are those of the chain rule on the dense gradient. reports.md 108"""
    e, h, i, rank = 4, 16, 8, 3
    base, a, b = (
        torch.randn(e, 2 * i, h),
        torch.randn(e, rank, h, requires_grad=True),
        torch.randn(e, 2 * i, rank, requires_grad=True),
    )
    x, ids, s, w_down = torch.randn(20, h), torch.randint(0, e, (20, 2)), torch.rand(20, 2), torch.randn(e, h, i)
    intarsia.moe_mlp(x, ids, s, base + b @ a, w_down, backend=backend).square().sum().backward()
    dense = (base + b @ a).detach().requires_grad_()
    intarsia.moe_mlp(x, ids, s, dense, w_down, backend=backend).square().sum().backward()
    assert a.grad.norm() > 0
    torch.testing.assert_close(a.grad, b.detach().transpose(1, 2) @ dense.grad)
    torch.testing.assert_close(b.grad, dense.grad @ a.detach().transpose(1, 2))
