"""What a finished run shows: the plot, a sample of text, and the memory of one layer, planned and measured."""

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from .. import _c
from ..layer import MoE
from ..memory import LayerSize, plan
from .trainer import Trainer

_MIB = 1 << 20
SAMPLE_BYTES = 300
TEMPERATURE = 0.7


@torch.no_grad()
def sample(trainer: Trainer, prompt: str) -> str:
    """`prompt` continued by the model, always with the same random numbers."""
    model, c = trainer.model.eval(), trainer.config
    generator = torch.Generator().manual_seed(0)
    text = torch.tensor([list(prompt.encode())])
    for _ in range(SAMPLE_BYTES):
        with trainer.precision():
            logits, _ = model(text[:, -c.context :].to(c.device))
        shares = (logits[0, -1].float().cpu() / TEMPERATURE).softmax(-1)
        text = torch.cat((text, torch.multinomial(shares, 1, generator=generator)[None]), dim=1)
    return bytes(text[0].tolist()).decode(errors="replace")


# ----------------------------------------------------------------------------------------------------------- the memory


def layer_memory(trainer: Trainer) -> str:
    """The first block's experts over one step's tokens, routed by top-k: bytes planned and bytes measured."""
    c, layer = trainer.config, trainer.model.blocks[0].experts
    size = LayerSize(
        tokens=c.batch * c.context,
        hidden=c.hidden,
        width=c.width,
        experts=c.experts,
        experts_per_token=c.experts_per_token,
        dtype=c.dtype,
        scores=layer.scores,
    )
    backend = torch.device(c.device).type
    planned = plan(size, c.save, backend)
    x_bytes = size.tokens * size.hidden * size.element_size
    dtype = getattr(torch, c.dtype)
    layer = copy.deepcopy(layer).eval()
    for parameter in layer.parameters():
        parameter.data = parameter.data.to(dtype)
    x = torch.randn(size.tokens, size.hidden, device=c.device, dtype=dtype, requires_grad=True)
    saved, forward, backward = measure(layer, x)
    above_x = planned["saved_bytes"] - x_bytes
    workspace = max(planned["forward_workspace_bytes"], planned["backward_workspace_bytes"])
    rows = (
        ("saved for backward, x included", planned["saved_bytes"], saved),
        ("workspace of forward", planned["forward_workspace_bytes"], forward),
        ("workspace of backward", planned["backward_workspace_bytes"], backward),
        ("saved and workspace, above x", above_x + workspace, saved - x_bytes + max(forward, backward)),
    )
    title = f"Memory of one layer, {size.tokens} tokens, save={c.save}, {backend}"
    lines = [f"{title:<44}{'planned MiB':>14}{'measured MiB':>14}"]
    lines += [f"  {name:<42}{p / _MIB:>14.3f}{m / _MIB:>14.3f}" for name, p, m in rows]
    return "\n".join(lines)


def measure(layer: MoE, x: Tensor) -> tuple[int, int, int]:
    """Bytes of one forward and backward of `layer` on x (T, H): saved, workspace of forward, workspace of backward.

    Saved: distinct storages that autograd keeps for backward, parameters and buffers left out. Workspace: the peak of
    what the core asked for, on the CPU or on the GPU.
    """
    known = {t.untyped_storage().data_ptr() for t in (*layer.parameters(), *layer.buffers())}
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    def peak_of(work: Callable) -> tuple[Tensor, int]:
        _c.memory_reset()
        before, _ = _c.memory()
        result = work()
        return result, _c.memory()[1] - before

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y, forward = peak_of(lambda: layer(x))
    _, backward = peak_of(lambda: torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y)))
    return sum(held.values()), forward, backward


# ------------------------------------------------------------------------------------------------------------- the plot


def plot(records: list[dict], path: Path, *, before: float, after: float, unigram: float) -> str:
    """Draws the loss and the tokens of each expert into a PNG; returns a sentence about it."""
    try:
        import matplotlib
    except ImportError:
        return "No plot: matplotlib is not installed (pip install matplotlib)."
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    steps = [r["step"] for r in records]
    left.plot(steps, [r["bits_per_byte"] for r in records], linewidth=1, label="training")
    left.plot([0, steps[-1]], [before, after], "o", label="held out, before and after")
    left.axhline(unigram, color="gray", linestyle="--", linewidth=1, label="unigram model, held out")
    left.set(xlabel="step", ylabel="bits per byte", title="Loss", ylim=(0, None))
    left.legend()

    last = records[-max(1, len(records) // 5) :]
    counts_LE = torch.tensor([r["tokens_per_expert"] for r in last], dtype=torch.float64).mean(0)
    bottom_E = torch.zeros_like(counts_LE[0])
    for layer, row_E in enumerate(counts_LE):
        right.bar(range(len(row_E)), row_E, bottom=bottom_E, label=f"layer {layer}")
        bottom_E = bottom_E + row_E
    right.axhline(bottom_E.mean().item(), color="gray", linestyle="--", linewidth=1, label="an equal share")
    right.set(
        xlabel="expert",
        ylabel="tokens of a step, all layers",
        title=f"Tokens per expert, mean of the last {len(last)} steps",
    )
    right.set_ylim(0, 1.25 * bottom_E.max().item())  # room for the legend
    right.legend(loc="upper center", ncols=len(counts_LE) + 1, fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return f"Plot: {path}"
