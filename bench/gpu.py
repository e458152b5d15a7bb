"""Time and memory of the whole layer on a GPU, x and router weight to y and back to every gradient, beside others.

    python bench/gpu.py [--shapes sonic-7b,olmoe] [--systems intarsia,sonicmoe] [--merge FILE] [--out FILE]

bf16, SwiGLU, softmax router, top-k not renormalised, random data. A step is forward and backward; steps are queued
back to back and timed by events, gaps included. All systems of a shape run in one process, in turn, `--rounds` times,
and the median of each is reported. Systems:
  cublas_bmm_bound   the layer's six products as balanced batched products and nothing else
  intarsia           router_logits, route, moe_mlp
  torch_grouped_mm   torch's grouped product on a permuted copy of the rows
  sonicmoe           SonicMoE through its adapter, when importable; `sonicmoe_kernels` is the sum of its kernels' times
held_bytes: what forward leaves allocated for backward, y not counted; peak_bytes: most during a step above inputs and
gradients.
"""

import argparse
import contextlib
import datetime
import json
import statistics
import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import intarsia
from intarsia.presets import PRESETS

SHAPES = [
    "sonic-7b", "sonic-1.4b", "sonic-30b", "sonic-120b", "olmoe", "qwen3-30b", "qwen3-next", "mixtral", "dsv3",
    "gpt-oss",
    *(f"blaze-conf{i}" for i in range(1, 8)),
]  # fmt: skip
STEPS, WARM = 12, 3


def inputs(T: int, H: int, I: int, E: int):
    """x (T, H), w_router (E, H), w_up (E, 2I, H), w_down (E, H, I), dy (T, H)."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, device="cuda", generator=generator) * scale).to(torch.bfloat16)

    leaves = (
        normal(T, H),
        normal(E, H, scale=H**-0.5),
        normal(E, 2 * I, H, scale=H**-0.5),
        normal(E, H, I, scale=I**-0.5),
    )
    return [leaf.requires_grad_() for leaf in leaves], normal(T, H)


def intarsia_layer(K: int):
    def layer(x, w_router, w_up, w_down):
        ids, scores = intarsia.route(intarsia.router_logits(x, w_router), K, scores="softmax")
        return intarsia.moe_mlp(x, ids, scores, w_up, w_down)

    return layer


def torch_layer(K: int):
    def layer(x, w_router, w_up, w_down):
        scores, ids = F.linear(x, w_router).float().softmax(-1).topk(K, -1)
        flat = ids.reshape(-1)
        order = torch.argsort(flat, stable=True)
        token = order // K
        offsets = torch.bincount(flat, minlength=w_up.shape[0]).cumsum(0).to(torch.int32)
        gate, up = torch._grouped_mm(x[token], w_up.transpose(1, 2), offs=offsets).chunk(2, -1)
        rows = torch._grouped_mm(F.silu(gate) * up, w_down.transpose(1, 2), offs=offsets)
        rows = rows * scores.reshape(-1)[order].to(rows.dtype).unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, token, rows)

    return layer


def sonicmoe_layer(K: int):
    import sonicmoe_layer as adapter

    return adapter.layer(K)


LAYERS = {"intarsia": intarsia_layer, "torch_grouped_mm": torch_layer, "sonicmoe": sonicmoe_layer}


def step_times(layer, leaves, dy) -> tuple[float, float]:
    """Median milliseconds of forward and of backward over queued steps."""
    marks = []
    for step in range(WARM + STEPS):
        start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        start.record()
        y = layer(*leaves)
        middle.record()
        torch.autograd.grad(y, leaves, dy)
        end.record()
        if step >= WARM:
            marks.append((start, middle, end))
    torch.cuda.synchronize()
    forward = statistics.median(start.elapsed_time(middle) for start, middle, _ in marks)
    return forward, statistics.median(middle.elapsed_time(end) for _, middle, end in marks)


def kernel_times(layer, leaves, dy) -> tuple[float, float]:
    """Milliseconds of a step's kernels by the profiler, without the gaps between them: forward and backward."""
    from torch.profiler import ProfilerActivity, profile

    def total(work) -> float:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(4):
                work()
            torch.cuda.synchronize()
        return sum(event.self_device_time_total for event in profiler.key_averages()) / 4 / 1e3

    forward = total(lambda: layer(*leaves))
    return forward, total(lambda: torch.autograd.grad(layer(*leaves), leaves, dy)) - forward


def memory(layer, leaves, dy) -> tuple[int, int]:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = layer(*leaves)
    held = torch.cuda.memory_allocated() - before - y.numel() * y.element_size()
    torch.cuda.reset_peak_memory_stats()
    gradients = torch.autograd.grad(y, leaves, dy)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before - sum(g.numel() * g.element_size() for g in gradients)
    return held, peak


def bound_times(T: int, H: int, I: int, E: int, K: int) -> tuple[float, float]:
    """The six products, balanced, by torch.bmm: milliseconds forward and backward."""
    m = T * K // E

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda").to(torch.bfloat16)

    x, w_up, z, a, w_down, rows = (
        normal(E, m, H),
        normal(E, 2 * I, H),
        normal(E, m, 2 * I),
        normal(E, m, I),
        normal(E, H, I),
        normal(E, m, H),
    )
    dw_up, dw_down, da, dx = (torch.empty_like(t) for t in (w_up, w_down, a, x))

    def layer(*_):
        torch.bmm(x, w_up.transpose(1, 2), out=z)
        torch.bmm(a, w_down.transpose(1, 2), out=rows)

    def backward():
        torch.bmm(rows, w_down, out=da)
        torch.bmm(rows.transpose(1, 2), a, out=dw_down)
        torch.bmm(z, w_up, out=dx)
        torch.bmm(z.transpose(1, 2), x, out=dw_up)

    marks = []
    for step in range(WARM + STEPS):
        start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        start.record()
        layer()
        middle.record()
        backward()
        end.record()
        if step >= WARM:
            marks.append((start, middle, end))
    torch.cuda.synchronize()
    forward = statistics.median(start.elapsed_time(middle) for start, middle, _ in marks)
    return forward, statistics.median(middle.elapsed_time(end) for _, middle, end in marks)


def relative_error(layer, K: int, H: int, I: int, E: int, system: str) -> float:
    """Worst of y and the gradients against float32 arithmetic over the same choice, at few tokens."""
    leaves, dy = inputs(512, H, I, E)
    wide = [leaf.detach().float().requires_grad_() for leaf in leaves]
    exact = F.linear(wide[0], wide[1]).softmax(-1)
    # ours chooses by float32 logits, the others by logits rounded to bfloat16
    ids = (exact if system == "intarsia" else F.linear(leaves[0], leaves[1]).float()).topk(K, -1).indices
    scores = exact.gather(1, ids)
    expected = torch.zeros_like(wide[0])
    up = torch.cat([wide[2][:, ::2], wide[2][:, 1::2]], 1) if system == "sonicmoe" else wide[2]
    for e in range(E):
        token, place = (ids == e).nonzero(as_tuple=True)
        if token.numel():
            gate, value = (wide[0][token] @ up[e].T).chunk(2, -1)
            expected = expected.index_add(
                0, token, (F.silu(gate) * value) @ wide[3][e].T * scores[token, place].unsqueeze(1)
            )
    y = layer(*leaves)
    got, want = [y, *torch.autograd.grad(y, leaves, dy)], [expected, *torch.autograd.grad(expected, wide, dy.float())]
    return max(((g.float() - w).norm() / w.norm()).item() for g, w in zip(got, want, strict=True))


def measure(shape: str, systems: list[str], rounds: int) -> list[dict]:
    preset = PRESETS[shape]
    T, H, I, E, K = preset.tokens, preset.hidden, preset.width, preset.experts, preset.experts_per_token
    times: dict[str, list[tuple[float, float]]] = {}
    rows, errors, bytes_of = [], {}, {}
    leaves, dy = inputs(T, H, I, E)
    for _ in range(rounds):
        for system in systems:
            if system == "cublas_bmm_bound":
                times.setdefault(system, []).append(bound_times(T, H, I, E, K))
                continue
            layer = LAYERS[system](K)
            if system not in errors:
                errors[system] = relative_error(layer, K, H, I, E, system)
                layer(*leaves)
                bytes_of[system] = memory(layer, leaves, dy)
            times.setdefault(system, []).append(step_times(layer, leaves, dy))
            if system == "sonicmoe":
                times.setdefault("sonicmoe_kernels", []).append(kernel_times(layer, leaves, dy))
            torch.cuda.empty_cache()
    for system, pairs in times.items():
        held, peak = bytes_of.get(system, (None, None))
        row = {
            "shape": shape, "system": system, "activation": "swiglu",
            "forward_ms": statistics.median(f for f, _ in pairs), "backward_ms": statistics.median(b for _, b in pairs),
            "held_bytes": held, "peak_bytes": peak, "relative_error": errors.get(system),
        }  # fmt: skip
        rows.append(row)
    return rows


def table(rows: list[dict]) -> str:
    lines = [
        f"{'shape':13} {'system':18} {'fwd ms':>8} {'bwd ms':>8} {'of bound':>12} {'held MiB':>9} {'peak':>9}    error"
    ]
    bounds = {r["shape"]: r for r in rows if r["system"] == "cublas_bmm_bound"}
    for r in rows:
        bound = bounds.get(r["shape"])
        share = (
            f"{bound['forward_ms'] / r['forward_ms']:.2f} / {bound['backward_ms'] / r['backward_ms']:.2f}"
            if bound
            else ""
        )
        mib = [f"{r[k] / 2**20:9.0f}" if r[k] is not None else " " * 9 for k in ("held_bytes", "peak_bytes")]
        error = f"{r['relative_error']:.1e}" if r["relative_error"] is not None else ""
        lines.append(
            f"{r['shape']:13} {r['system']:18} {r['forward_ms']:8.3f} {r['backward_ms']:8.3f} {share:>12} "
            f"{' '.join(mib)} {error:>8}"
        )
    return "\n".join(lines)


def clocks() -> str:
    query = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    return "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--systems", default="cublas_bmm_bound,intarsia,torch_grouped_mm,sonicmoe")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--merge", type=Path, help="rows of an earlier file for shapes and systems that are not run now"
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = []
    for shape in arguments.shapes.split(","):
        try:
            new = measure(shape, arguments.systems.split(","), arguments.rounds)
        except (RuntimeError, ImportError) as error:
            print(f"{shape}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        rows += new
        print(table(new), flush=True)
    if arguments.merge:
        done = {(r["shape"], r["system"]) for r in rows}
        rows += [r for r in json.loads(arguments.merge.read_text())["rows"] if (r["shape"], r["system"]) not in done]
    if arguments.out:
        result = {
            "device": torch.cuda.get_device_name(),
            "date": datetime.date.today().isoformat(),
            "torch": torch.__version__,
            "intarsia": intarsia.__version__,
            "clocks": clocks(),
            "command": " ".join(["python", *sys.argv]),
            "rows": rows,
        }  # fmt: skip
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
