"""INTARSIA_CHECK=1 on a GPU: wrong lists are refused in the sentences of the CPU; without it they harm nothing."""

import os
import subprocess
import sys

import pytest
import torch

from intarsia import _core

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not _core.doctor()["cuda_kernels"],
        reason="needs a GPU and CUDA kernels",
    ),
]

# The variable is read once in a process, so every value of it has a process of its own.
_SETTING = """
import torch, intarsia
T, H, I, E, K = 40, 64, 32, 4, 2
x, w_up, w_down = torch.randn(T, H), torch.randn(E, 2 * I, H), torch.randn(E, H, I)
scores, logits = torch.rand(T, K), torch.randn(T, E)
sorted_lists = intarsia.build_index(logits.topk(K).indices, E)
rounded_lists = intarsia.round_tokens(logits, K, tile=8)

def move(tensor, device, dtype=None):
    return None if tensor is None else tensor.to(device, dtype if tensor.is_floating_point() else None)

def layer(lists, device, dtype=torch.float32):
    weights = None if lists.slot_row is None else move(scores, device).requires_grad_()
    lists = intarsia.IndexLists(*(move(t, device) for t in lists))
    leaves = [move(t, device, dtype).requires_grad_() for t in (x, w_up, w_down)]
    y = intarsia.moe_mlp(leaves[0], lists, weights, *leaves[1:])
    torch.autograd.grad(y, leaves if weights is None else [*leaves, weights], torch.ones_like(y))
    if device == "cuda":
        torch.cuda.synchronize()

def wrong_lists():
    for lists, names in (
        (sorted_lists, ("expert_offsets", "row_token", "row_slot", "slot_row")),
        (rounded_lists, ("expert_offsets", "row_token", "row_slot", "token_offsets", "token_rows")),
    ):
        for name in names:
            for place, value in ((1, 1 << 20), (1, -7), (-1, 1 << 30)):
                wrong = getattr(lists, name).clone()
                if name in ("row_token", "row_slot", "token_rows") and place == -1:
                    place = lists.expert_offsets[-1] - 1  # the last row in use
                wrong.view(-1)[place] = value
                yield name, lists._replace(**{name: wrong})
"""


def run(script: str, check: str | None) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "INTARSIA_CHECK"}
    environment |= {} if check is None else {"INTARSIA_CHECK": check}
    result = subprocess.run(
        [sys.executable, "-c", _SETTING + script], env=environment, capture_output=True, text=True, timeout=200
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_wrong_lists_are_refused_as_on_the_cpu():
    shown = run(
        """
def sentence(lists, device):
    try:
        layer(lists, device)
        return ""
    except intarsia.InvalidArgument as error:
        return str(error)

for lists in (sorted_lists, rounded_lists):
    assert sentence(lists, "cuda") == sentence(lists, "cpu") == ""
for name, lists in wrong_lists():
    on_cpu, on_gpu = sentence(lists, "cpu"), sentence(lists, "cuda")
    assert on_cpu.startswith("layer_forward: "), (name, on_cpu)
    assert on_gpu == on_cpu, (on_gpu, on_cpu)
    print(name)
""",
        "1",
    )
    assert len(shown.split()) == 27


@pytest.mark.parametrize("check", [None, "0"])
def test_without_it_lists_are_not_read_and_harm_nothing(check):
    shown = run(
        """
for dtype in (torch.float32, torch.bfloat16):
    for lists in (sorted_lists, rounded_lists):
        layer(lists, "cuda", dtype)  # loads the kernels
    for name, lists in wrong_lists():
        layer(lists, "cuda", dtype)
        print(name)
device_lists = intarsia.IndexLists(*(move(t, "cuda") for t in sorted_lists))
arguments = [t.cuda() for t in (scores, w_up, w_down)]
on_gpu = x.cuda()
torch.cuda.set_sync_debug_mode("error")
intarsia.moe_mlp(on_gpu, device_lists, *arguments)
""",
        check,
    )
    assert len(shown.split()) == 2 * 27


def test_a_captured_graph_is_refused_and_nothing_is_broken():
    shown = run(
        """
lists = intarsia.IndexLists(*(move(t, "cuda") for t in sorted_lists))
arguments = [x.cuda(), lists, *(t.cuda() for t in (scores, w_up, w_down))]
before = intarsia.moe_mlp(*arguments)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    doubled = arguments[0] * 2
    try:
        intarsia.moe_mlp(*arguments)
    except intarsia.Unsupported as error:
        print(error)
graph.replay()
assert torch.equal(doubled, arguments[0] * 2)
assert torch.equal(before, intarsia.moe_mlp(*arguments))
""",
        "1",
    )
    assert shown.startswith("layer_forward: INTARSIA_CHECK=1 copies the index lists to the host")
