"""Time and memory of one MoE layer on the CPU, against an eager loop over experts and torch.nn.functional.grouped_mm.

    python bench/layer.py [--shape 4096,512,1024,8,2] [--dtype float32] [--repeats 7] [--threads N] [--out FILE]

Every contender gets the same random inputs, as many threads as there are cores, and computes y, then dx, dscores,
dw_up and dw_down. Before anything is timed the results of all are compared. Repeats are interleaved, contender by
contender, over two sets of buffers in turn; a figure is a median. Memory: `saved` are the bytes that autograd holds
between forward and backward, x included, ids, scores and weights excluded; `peak` is the most that forward and backward
allocate at once above what was there before, gradients included: torch's allocator events plus the peak of the
library's own allocator (an upper bound, since the two peaks need not coincide).
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

import intarsia
from intarsia import _c as core

SHAPES = [(4096, 512, 1024, 8, 2), (4096, 512, 256, 32, 4), (8192, 256, 64, 128, 8)]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}  # largest relative difference (Frobenius) between two contenders


@dataclass
class Inputs:
    """One set of buffers. x, dy (T, H); ids, scores (T, K); w_up (E, 2I, H); w_down (E, H, I)."""

    x: torch.Tensor
    ids: torch.Tensor
    scores: torch.Tensor
    w_up: torch.Tensor
    w_down: torch.Tensor
    dy: torch.Tensor

    @property
    def leaves(self) -> tuple[torch.Tensor, ...]:
        return self.x, self.scores, self.w_up, self.w_down


def draw(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """Random inputs; the chosen experts are those of random logits, so their load is uneven by chance only."""
    t, h, i, e, k = shape

    def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*size, generator=generator) * scale).to(dtype)

    scores, ids = torch.randn(t, e, generator=generator).topk(k)
    inputs = Inputs(
        x=normal(t, h),
        ids=ids,
        scores=scores.softmax(-1),
        w_up=normal(e, 2 * i, h, scale=h**-0.5),
        w_down=normal(e, h, i, scale=i**-0.5),
        dy=normal(t, h),
    )
    for leaf in inputs.leaves:
        leaf.requires_grad_()
    return inputs


# ---- the contenders


def with_intarsia(b: Inputs) -> torch.Tensor:
    return intarsia.moe_mlp(b.x, b.ids, b.scores, b.w_up, b.w_down)


def with_loop(b: Inputs) -> torch.Tensor:
    """The loop over experts of Hugging Face transformers."""
    y = torch.zeros_like(b.x)
    for expert in range(b.w_up.shape[0]):
        token, slot = torch.where(b.ids == expert)
        gate, up = F.linear(b.x[token], b.w_up[expert]).chunk(2, dim=-1)
        rows = F.linear(F.silu(gate) * up, b.w_down[expert])
        y = y.index_add(0, token, (rows * b.scores[token, slot, None]).to(b.x.dtype))
    return y


def with_grouped_mm(b: Inputs) -> torch.Tensor:
    """Sort, gather, two grouped products, scatter: the grouped_mm path of Hugging Face transformers and torchtitan."""
    experts = b.w_up.shape[0]
    k = b.ids.shape[1]
    order = b.ids.flatten().argsort(stable=True)
    token = order // k
    offsets = torch.bincount(b.ids.flatten(), minlength=experts).cumsum(0).to(torch.int32)
    gate, up = F.grouped_mm(b.x[token], b.w_up.transpose(1, 2), offs=offsets).chunk(2, dim=-1)
    rows = F.grouped_mm(F.silu(gate) * up, b.w_down.transpose(1, 2), offs=offsets)
    weighted = (rows * b.scores.flatten()[order, None]).to(b.x.dtype)
    return torch.zeros_like(b.x).index_add(0, token, weighted)


CONTENDERS: dict[str, Callable[[Inputs], torch.Tensor]] = {
    "intarsia": with_intarsia,
    "loop": with_loop,
    "grouped_mm": with_grouped_mm,
}

# ---- what is measured


def results(forward: Callable[[Inputs], torch.Tensor], inputs: Inputs) -> list[torch.Tensor]:
    """y and the four gradients."""
    y = forward(inputs)
    return [y.detach(), *torch.autograd.grad(y, inputs.leaves, inputs.dy)]


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def usable_contenders(inputs: Inputs, tolerance: float) -> tuple[dict[str, Callable], dict[str, str]]:
    """The contenders that run here and agree with the loop, and why the others are left out."""
    expected = results(with_loop, inputs)
    usable, left_out = {}, {}
    for name, forward in CONTENDERS.items():
        try:
            got = results(forward, inputs)
        except (RuntimeError, AttributeError, NotImplementedError) as error:
            if name == "intarsia":
                raise
            left_out[name] = str(error).splitlines()[0]
            continue
        worst = max(difference(g, e) for g, e in zip(got, expected, strict=True))
        if not worst <= tolerance:
            raise SystemExit(
                f"{name} differs from the loop by {worst:.1e}, more than {tolerance:.0e}: nothing was timed"
            )
        usable[name] = forward
    return usable, left_out


def saved_bytes(forward: Callable[[Inputs], torch.Tensor], inputs: Inputs) -> int:
    """Bytes of the distinct storages that autograd holds after forward, those of ids, scores and weights excluded."""
    excluded = {t.untyped_storage().data_ptr() for t in (inputs.ids, inputs.scores, inputs.w_up, inputs.w_down)}
    held: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = forward(inputs)
    total = sum(size for pointer, size in held.items() if pointer not in excluded)
    del y
    return total


def peak_bytes(forward: Callable[[Inputs], torch.Tensor], inputs: Inputs) -> int:
    """Most bytes alive at once in forward and backward, beyond those alive before."""
    core.memory_reset()
    before, _ = core.memory()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        gradients = results(forward, inputs)
    del gradients
    events = sorted(
        (e.start_ns(), e.nbytes()) for e in trace.profiler.kineto_results.events() if e.name() == "[memory]"
    )
    live = peak = 0
    for _, change in events:
        live += change
        peak = max(peak, live)
    return peak + core.memory()[1] - before


def time_all(contenders: dict[str, Callable], sets: list[Inputs], repeats: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of forward and backward, `repeats` of each contender, interleaved; one unrecorded round warms up."""
    times = {name: {"forward": [], "backward": []} for name in contenders}
    for repeat in range(-1, repeats):
        names = list(contenders)
        shift = repeat % len(names)  # nobody always runs after the same other
        for name in names[shift:] + names[:shift]:
            b = sets[repeat % len(sets)]
            start = time.perf_counter()
            y = contenders[name](b)
            middle = time.perf_counter()
            gradients = torch.autograd.grad(y, b.leaves, b.dy)
            end = time.perf_counter()
            del y, gradients
            if repeat >= 0:
                times[name]["forward"].append(middle - start)
                times[name]["backward"].append(end - middle)
    return times


def measure(shape: tuple[int, ...], dtype: str, repeats: int) -> dict:
    """All figures of one shape and dtype."""
    generator = torch.Generator().manual_seed(sum(shape))
    sets = [draw(shape, DTYPES[dtype], generator) for _ in range(2)]
    contenders, left_out = usable_contenders(sets[0], TOLERANCE[dtype])
    times = time_all(contenders, sets, repeats)
    t, h, i, e, k = shape
    record = {"shape": dict(zip("THIEK", shape, strict=True)), "dtype": dtype, "left_out": left_out, "contenders": {}}
    for name, forward in contenders.items():
        fwd, bwd = (statistics.median(times[name][part]) for part in ("forward", "backward"))
        record["contenders"][name] = {
            "forward_ms": fwd * 1e3,
            "backward_ms": bwd * 1e3,
            "total_ms": statistics.median(map(sum, zip(*times[name].values(), strict=True))) * 1e3,
            "spread": [min(times[name]["backward"]) / bwd, max(times[name]["backward"]) / bwd],
            "gflops": 18e-9 * t * k * i * h / (fwd + bwd),
            "saved_bytes": saved_bytes(forward, sets[0]),
            "peak_bytes": peak_bytes(forward, sets[0]),
        }
    size = DTYPES[dtype].itemsize
    r = t * k
    record["promised_saved_bytes"] = (t * h + 2 * r * i) * size + 20 * r + 8 * (e + 1)
    peers = [c["total_ms"] for name, c in record["contenders"].items() if name != "intarsia"]
    record["speedup_over_best"] = min(peers) / record["contenders"]["intarsia"]["total_ms"]
    return record


# ---- what is printed


@dataclass(frozen=True)
class Machine:
    cpu: str
    threads: int
    python: str
    torch: str
    intarsia: str
    products: dict[str, str]


def machine() -> Machine:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
    return Machine(
        cpu=model,
        threads=torch.get_num_threads(),
        python=platform.python_version(),
        torch=torch.__version__,
        intarsia=core.version(),
        products=core.doctor()["products"],
    )


def print_record(record: dict) -> None:
    shape = ",".join(str(n) for n in record["shape"].values())
    print(f"\n(T,H,I,E,K) = ({shape})  {record['dtype']}")
    print(
        f"  {'':12}{'forward ms':>12}{'backward ms':>12}{'total ms':>10}{'GFLOP/s':>9}{'saved MiB':>11}{'peak MiB':>10}"
    )
    for name, c in record["contenders"].items():
        print(
            f"  {name:12}{c['forward_ms']:12.1f}{c['backward_ms']:12.1f}{c['total_ms']:10.1f}{c['gflops']:9.0f}"
            f"{c['saved_bytes'] / 2**20:11.1f}{c['peak_bytes'] / 2**20:10.1f}"
        )
    for name, reason in record["left_out"].items():
        print(f"  {name} does not run here: {reason}")
    print(f"  {record['speedup_over_best']:.2f} times the speed of the best other", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", action="append", help="T,H,I,E,K; may be given more than once")
    parser.add_argument("--dtype", action="append", choices=list(DTYPES))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--out", type=Path, help="default: bench/results/cpu-<date>.json, for a run of all shapes and dtypes"
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    shapes = [tuple(map(int, text.split(","))) for text in arguments.shape or []] or SHAPES
    found = machine()
    print(" · ".join(f"{name} {value}" for name, value in asdict(found).items()))
    records = []
    for shape in shapes:
        for dtype in arguments.dtype or DTYPES:
            records.append(measure(shape, dtype, arguments.repeats))
            print_record(records[-1])
    out = arguments.out
    if out is None and not arguments.shape and not arguments.dtype:
        out = Path(__file__).parent / "results" / f"cpu-{date.today()}.json"
    if out:
        command = "python " + " ".join([os.path.relpath(sys.argv[0]), *sys.argv[1:]])
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"command": command, "machine": asdict(found), "records": records}, indent=1) + "\n")
        print(f"\nwritten to {os.path.relpath(out)}")


if __name__ == "__main__":
    main()
