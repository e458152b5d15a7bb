"""Workspaces on a GPU, counted by the core, are those of the plan: with and without biases, tokens and sorted rows."""

import pytest
import torch

import intarsia
from intarsia import _core, memory
from intarsia.cli import main

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not _core.doctor()["cuda_kernels"],
        reason="needs a GPU and CUDA kernels",
    ),
]


def peak(function):
    _core.memory_reset()
    live, _ = _core.memory()
    result = function()
    return result, _core.memory()[1] - live


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("sorted_rows", [False, True])
@pytest.mark.parametrize("sizes", [(300, 64, 48, 6, 2), (3, 512, 8, 64, 2), (5000, 96, 64, 4, 1)])
@pytest.mark.parametrize("save", ["preactivation", "input"])
def test_workspaces_are_the_planned_ones(sizes, sorted_rows, biased, save):
    T, H, I, E, K = sizes
    new = {"device": "cuda", "dtype": torch.bfloat16}
    leaf = lambda *shape: torch.randn(*shape, **new).requires_grad_()  # noqa: E731
    x, w_up, w_down = leaf(T, H), leaf(E, 2 * I, H), leaf(E, H, I)
    options = {"save": save} | ({"b_up": leaf(E, 2 * I), "b_down": leaf(E, H)} if biased else {})
    lists = intarsia.build_index(torch.rand(T, E, device="cuda").topk(K).indices, E)

    def forward():
        if sorted_rows:
            offsets = torch.linspace(0, T, E + 1, device="cuda").to(torch.int32)
            return intarsia.grouped_mlp(x, offsets, w_up, w_down, **options)
        return intarsia.moe_mlp(x, lists, torch.rand(T, K, device="cuda").requires_grad_(), w_up, w_down, **options)

    y, in_forward = peak(forward)
    _, in_backward = peak(lambda: y.backward(torch.randn_like(y)))
    plan = _core.plan(
        tokens=T, hidden=H, width=I, experts=E, experts_per_token=1 if sorted_rows else K, dtype="bfloat16",
        sorted_rows=sorted_rows, save=save, bias_gradient=biased, backend="cuda",
    )  # fmt: skip
    assert (in_forward, in_backward) == (plan["forward_workspace_bytes"], plan["backward_workspace_bytes"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scores", ["softmax", "softmax_renorm", "sigmoid_group"])
@pytest.mark.parametrize("save", ["preactivation", "input"])
def test_what_the_whole_layer_holds_is_planned(dtype, scores, save):
    """Between forward and backward, as torch's allocator counts it, up to its rounding to 512 bytes."""
    T, H, I, E, K = 4096, 64, 32, 64, 4
    leaf = lambda *shape: torch.randn(*shape, device="cuda", dtype=dtype).requires_grad_()  # noqa: E731
    x, w_router, w_up, w_down = leaf(T, H), leaf(E, H), leaf(E, 2 * I, H), leaf(E, H, I)
    requested = lambda: torch.cuda.memory_stats()["requested_bytes.all.current"]  # noqa: E731
    before = requested()
    y = intarsia.moe(x, w_router, K, w_up, w_down, scores=scores, save=save)
    held = requested() - before - y.nbytes + x.nbytes
    sizes = {"tokens": T, "hidden": H, "width": I, "experts": E, "experts_per_token": K, "scores": scores}
    plan = memory.plan(memory.LayerSize(**sizes, dtype=str(dtype).removeprefix("torch.")), save, "cuda")
    saved = [b for b in plan["buffers"] if b["kind"] == "saved"]
    assert 0 <= held - plan["saved_bytes"] < 512 * len(saved)
    assert ("logits" in [b["name"] for b in saved]) == (
        scores == "softmax" and save == "preactivation" and dtype != torch.float32
    )


def test_the_demo_shows_the_plan_of_the_gpu(tmp_path, capsys):
    options = {"steps": 1, "batch": 2, "context": 64, "layers": 1, "hidden": 64, "heads": 2, "device": "cuda"}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    assert main(["train", "--out", str(tmp_path), *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = [line.rsplit(maxsplit=2) for line in lines if line.startswith(("  saved", "  workspace"))]
    assert len(table) == 4
    assert all(planned == measured for _, planned, measured in table), table
