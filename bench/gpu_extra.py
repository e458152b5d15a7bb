"""The figures beside bench/gpu.py's table: host time, first step, skew, few tokens, rounding, lists, model, save_input.

    python bench/gpu_extra.py [--only host_time,skew] [--merge FILE] [--out FILE]

Every measurement prints one line a row: name, shape or case, figures (ms, us, bytes, ratios as they are called).
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpu_routing
import intarsia
from gpu_layers import Layer, Sizes, grouped_mm_layer, inputs, intarsia_functions, intarsia_layer, passes
from gpu_results import Guard, write
from gpu_routing import row_text
from gpu_timing import frame, interleaved, memory, step_times

# ---- the host


def host_us(forward: Callable, backward: Callable, leaves: list[Tensor], repeats: int = 200) -> tuple[float, float]:
    """Median microseconds of Python in forward and in backward, while the GPU has nothing else to do."""
    times = []
    for _ in range(repeats + 20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        y = forward()
        middle = time.perf_counter()
        torch.cuda.synchronize()
        resumed = time.perf_counter()
        backward(y)
        times.append(((middle - start) * 1e6, (time.perf_counter() - resumed) * 1e6))
        for leaf in leaves:
            leaf.grad = None
    torch.cuda.synchronize()
    forward_us, backward_us = zip(*times[20:], strict=True)
    return statistics.median(forward_us), statistics.median(backward_us)


def call_us(work: Callable) -> float:
    """Median microseconds of Python in one call, while the GPU has nothing else to do."""
    return host_us(work, lambda _: None, [])[0]


def host_time(guard: Guard):
    """Python's time for a layer of sonic-7b's sizes at 256 tokens, not waiting for the GPU.

    And that of single calls of torch, to compare machines.
    """
    big = Sizes.of("sonic-7b")
    s = Sizes(256, big.H, big.I, big.E, big.K)
    leaves, dy = inputs(s)
    module = intarsia.MoE(s.H, s.I, s.E, s.K, scores="softmax", device="cuda", dtype=torch.bfloat16)
    cases = {
        "route and moe_mlp": (partial(intarsia_functions(s.K, "swiglu"), *leaves), leaves),
        "moe": (partial(intarsia_layer(s.K, "swiglu"), *leaves), leaves),
        "MoE": (partial(module, leaves[0]), [leaves[0], *module.parameters()]),
    }
    for case, (forward, wanted) in cases.items():
        ways = {"backward": lambda y: y.backward(dy), "grad": lambda y, of=wanted: torch.autograd.grad(y, of, dy)}
        for way, backward in ways.items():
            label = f"{case}, {way}()"
            found = guard(f"host_time {label}", partial(host_us, forward, backward, wanted))
            if found is not None:
                yield {"name": "host_time", "case": label, "forward_us": found[0], "backward_us": found[1]}
    with torch.no_grad():
        x, w = leaves[0][:16], leaves[1]
        calls = {"empty": lambda: torch.empty_like(x), "add_": lambda: dy.add_(1), "mm": lambda: torch.mm(x, w.T)}
        found = {f"{name}_us": call_us(work) for name, work in calls.items()}
        yield {"name": "torch_calls", "case": "one call"} | found


def first_step(_: Guard):
    """The first step of a fresh process beyond torch's own first work: import and kernels' loading."""
    command = [sys.executable, str(Path(__file__).parent / "gpu_first_step.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no output"])[-1])
    row = {"name": "first_step", "case": "sonic-7b"} | json.loads(done.stdout.splitlines()[-1])
    yield row | {"beyond_s": row["import_s"] + row["step_s"]}


# ---- the save modes


def save_input(guard: Guard):
    """What save="input" costs in time and what it then holds."""
    for shape in ("sonic-7b", "qwen3-30b", "mixtral"):
        s = Sizes.of(shape)
        leaves, dy = inputs(s)
        pairs = {save: passes(intarsia_layer(s.K, "swiglu", save), leaves, dy) for save in ("preactivation", "input")}
        used = guard(f"save_input {shape}: memory", partial(memory, *pairs["input"]))
        timed = {save: partial(step_times, *pair) for save, pair in pairs.items()}
        times = interleaved(timed, 3, guard, f"save_input {shape}")
        if used is None or len(times) < 2:
            continue
        yield {
            "name": "save_input", "shape": shape, "forward_ms": times["input"][0], "backward_ms": times["input"][1],
            "cost": sum(times["input"]) / sum(times["preactivation"]), "held_bytes": used[0], "peak_bytes": used[1],
        }  # fmt: skip


# ---- a model


class Block(nn.Module):
    """Attention and an MoE layer, each on a normalised input and added to the residual."""

    def __init__(self, s: Sizes, head: int = 128):
        super().__init__()
        self.head = head
        self.norms = nn.ModuleList(nn.RMSNorm(s.H) for _ in range(2))
        self.qkv, self.out = nn.Linear(s.H, 3 * s.H, bias=False), nn.Linear(s.H, s.H, bias=False)
        shapes = ((s.E, s.H), (s.E, 2 * s.I, s.H), (s.E, s.H, s.I))
        self.experts = nn.ParameterList(nn.Parameter(torch.randn(shape) * shape[-1] ** -0.5) for shape in shapes)

    def forward(self, x: torch.Tensor, layer: Layer) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (-1, self.head)).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        return x + layer(self.norms[1](x).flatten(0, 1), *self.experts).view_as(x)


def model(guard: Guard):
    """Tokens/s, forward and backward, of four blocks with sonic-7b's layer, sequences of 2048."""
    s = Sizes.of("sonic-7b")
    with torch.device("cuda"):
        blocks = nn.ModuleList(Block(s) for _ in range(4)).to(torch.bfloat16)
    x, dy = (torch.randn(s.T // 2048, 2048, s.H, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def run(layer: Layer) -> torch.Tensor:
        y = x
        for block in blocks:
            y = block(y, layer)
        return y

    layers = {"intarsia": intarsia_layer(s.K, "swiglu"), "grouped_mm": grouped_mm_layer(s.K, "swiglu")}
    parameters = list(blocks.parameters())
    timed = {
        name: partial(step_times, partial(run, layer), lambda y: torch.autograd.grad(y, parameters, dy))
        for name, layer in layers.items()
    }
    speed = {name: s.T / sum(pair) * 1e3 for name, pair in interleaved(timed, 3, guard, "model").items()}
    if len(speed) == 2:
        figures = {f"{name}_tokens_per_s": value for name, value in speed.items()}
        yield {"name": "model", "case": "4 x sonic-7b"} | figures | {"speedup": speed["intarsia"] / speed["grouped_mm"]}


# ---- the command

MEASUREMENTS = {
    "host_time": host_time,
    "first_step": first_step,
    "build_index": gpu_routing.build_index,
    "few_tokens": gpu_routing.few_tokens,
    "rounding": gpu_routing.rounding,
    "skew": gpu_routing.skew,
    "save_input": save_input,
    "model": model,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(MEASUREMENTS))
    parser.add_argument("--merge", type=Path, help="an earlier file; its rows that are not measured now are kept")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if unknown := set(arguments.only) - set(MEASUREMENTS):
        parser.error(f"--only: expected some of {', '.join(MEASUREMENTS)}; got {', '.join(sorted(unknown))}")
    earlier = json.loads(arguments.merge.read_text()) if arguments.merge else None
    guard, rows, head = Guard(), [], frame()

    def collect(name: str) -> None:
        for row in MEASUREMENTS[name](guard):
            rows.append(row)
            print(row_text(row), flush=True)

    for name in arguments.only:
        guard(name, partial(collect, name))
        guard(f"{name}: release", torch.cuda.empty_cache)
        if arguments.out:
            write(arguments.out, head, rows, earlier)
    return guard.status()


if __name__ == "__main__":
    sys.exit(main())
