"""Time and memory of the whole layer on a GPU, beside the bound and other implementations, in one process a shape.

    make gpu-bench ARGS="--shapes sonic-7b,olmoe --merge FILE --out FILE"
    python bench/gpu.py --activation silu --systems cublas_bmm_bound,intarsia,mb_like

bfloat16, random data, softmax router with top-k. A step is forward and backward, from x and the router's weight to y
and to every gradient; steps are queued back to back, hot, and timed by events, gaps included. Systems take turns,
`--rounds` times; a figure is a median. `sonicmoe` is SonicMoE's time like everybody's, `sonicmoe_kernels` the sum of
its kernels' times. Memory: held_bytes between forward and backward, y not counted; peak_bytes as in gpu_timing.memory;
planned_peak_bytes is Intarsia's own plan. relative_error: y and the gradients against float32, the worst of them.
bench/gpu_targets.py holds the figures against what is required.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from gpu_layers import SYSTEMS, Bound, Layer, Sizes, activate, inputs, passes
from gpu_results import Guard, default_path, table, write
from gpu_timing import clocks_under_load, frame, interleaved, kernel_times, memory, step_times
from intarsia.memory import LayerSize, plan

SHAPES = (
    "sonic-7b", "sonic-1.4b", "sonic-30b", "sonic-120b", "olmoe", "qwen3-30b", "qwen3-next", "mixtral", "dsv3",
    "gpt-oss", *(f"blaze-conf{i}" for i in range(1, 8)),
)  # fmt: skip
BOUND = "cublas_bmm_bound"
CHECKED_TOKENS = 512


def default_shapes(activation: str) -> list[str]:
    """All, or for the ungated activation MoEBlaze's."""
    return [s for s in SHAPES if activation == "swiglu" or s.startswith("blaze")]


def usable(names: list[str], activation: str) -> list[str]:
    """Those of the systems that compute this activation."""
    return [n for n in names if n == BOUND or activation == "swiglu" or not SYSTEMS[n].gated_only]


def planned_peak(s: Sizes, activation: str) -> int:
    """The plan of Intarsia's step."""
    size = LayerSize(
        tokens=s.T, hidden=s.H, width=s.I, experts=s.E, experts_per_token=s.K, activation=activation, scores="softmax"
    )
    return plan(size, backend="cuda")["peak_bytes"]


# ---- right, before fast


def clear_choices(x: torch.Tensor, w_router: torch.Tensor, K: int) -> torch.Tensor:
    """Indices of tokens whose K experts are the same however the logits are rounded to bfloat16."""
    logits = x.float() @ w_router.float().T
    best = logits.topk(min(K + 1, logits.shape[1]), -1).values
    clear = torch.ones_like(best[:, 0], dtype=torch.bool) if best.shape[1] == K else best[:, -2] - best[:, -1] > 2**-5
    return clear.nonzero().squeeze(1)


def reference(x, w_router, w_up, w_down, K: int, activation: str, alternating: bool) -> torch.Tensor:
    """y by a loop over experts, in the inputs' precision."""
    scores, ids = F.linear(x, w_router).softmax(-1).topk(K, -1)
    if alternating:
        w_up = torch.cat([w_up[:, ::2], w_up[:, 1::2]], 1)
    y = torch.zeros_like(x)
    for e, (up, down) in enumerate(zip(w_up.unbind(0), w_down.unbind(0), strict=True)):
        token, slot = (ids == e).nonzero(as_tuple=True)
        if token.numel():
            rows = activate(x[token] @ up.T, activation) @ down.T
            y = y.index_add(0, token, rows * scores[token, slot].unsqueeze(1))
    return y


def relative_error(layer: Layer, s: Sizes, activation: str, alternating: bool) -> float:
    """Worst relative difference of y and the gradients from float32 arithmetic, on a few tokens."""
    many = Sizes(4 * CHECKED_TOKENS, s.H, s.I, s.E, s.K)
    (x, *weights), dy = inputs(many, activation, seed=1)
    token = clear_choices(x.detach(), weights[0].detach(), s.K)[:CHECKED_TOKENS]
    leaves, dy = [x.detach()[token].requires_grad_(), *weights], dy[token]
    wide = [t.detach().float().requires_grad_() for t in leaves]
    expected = reference(*wide, s.K, activation, alternating)
    expected = [expected, *torch.autograd.grad(expected, wide, dy.float())]
    y = layer(*leaves)
    got = [y, *torch.autograd.grad(y, leaves, dy)]
    return max(((g.float() - e).norm() / e.norm()).item() for g, e in zip(got, expected, strict=True))


# ---- one shape


def contenders(shape: str, activation: str, systems: list[str], guard: Guard) -> tuple[dict, dict[str, dict]]:
    """What to time, (forward, backward) by system, and the other fields of its row. A system that fails is left out."""
    s = Sizes.of(shape)
    leaves, dy = inputs(s, activation)
    found, fields = {}, {}
    for name in systems:
        label = f"{shape} {activation} {name}"
        if name == BOUND:
            bound = guard(label, partial(Bound, s, activation))
            if bound is not None:
                found[name], fields[name] = (bound.forward, bound.backward), {}
            continue
        layer = guard(label, partial(SYSTEMS[name].make, s.K, activation))
        if layer is None:
            continue
        pair = passes(layer, leaves, dy)
        error = guard(f"{label}: error", partial(relative_error, layer, s, activation, SYSTEMS[name].alternating))
        torch.cuda.empty_cache()
        used = guard(f"{label}: memory", partial(memory, *pair))
        if used is not None:  # it runs
            found[name] = pair
            fields[name] = {"held_bytes": used[0], "peak_bytes": used[1], "relative_error": error}
    if "intarsia" in fields:
        fields["intarsia"]["planned_peak_bytes"] = guard(f"{shape}: plan", partial(planned_peak, s, activation))
    return found, fields


def measure(shape: str, activation: str, systems: list[str], rounds: int, guard: Guard) -> tuple[list[dict], str]:
    """The shape's rows, and the clocks under Intarsia's load, empty where nobody could ask."""
    found, fields = contenders(shape, activation, systems, guard)
    timed = {name: partial(step_times, *pair) for name, pair in found.items()}
    if "sonicmoe" in found:
        timed["sonicmoe_kernels"] = partial(kernel_times, *found["sonicmoe"])
    times = interleaved(timed, rounds, guard, f"{shape} {activation}")
    empty = dict.fromkeys(("held_bytes", "peak_bytes", "planned_peak_bytes", "relative_error"))
    rows = [
        {"shape": shape, "system": name, "activation": activation, "forward_ms": forward, "backward_ms": backward}
        | empty
        | fields.get(name, {})
        for name, (forward, backward) in times.items()
    ]
    clocks = ""
    if "intarsia" in found:
        forward, backward = found["intarsia"]
        clocks = guard(f"{shape}: clocks", lambda: clocks_under_load(lambda: backward(forward()))) or ""
    return rows, clocks


# ---- the command


def names(text: str) -> list[str]:
    return text.split(",")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=names, help="default: all")
    parser.add_argument("--systems", type=names, help="default: all that can be imported")
    parser.add_argument("--activation", type=names, default=["swiglu"], help="swiglu, silu or both")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--merge", type=Path, help="an earlier file; its rows that are not measured now are kept")
    parser.add_argument("--out", type=Path, help="for all shapes or with --merge: bench/results/<device>-<date>.json")
    parsed = parser.parse_args(arguments)
    for name, known in (("shapes", SHAPES), ("systems", (BOUND, *SYSTEMS)), ("activation", ("swiglu", "silu"))):
        unknown = set(getattr(parsed, name) or ()) - set(known)
        if unknown:
            parser.error(f"--{name}: expected some of {', '.join(known)}; got {', '.join(sorted(unknown))}")
    return parsed


def main() -> int:
    arguments = parse()
    systems = arguments.systems
    if systems is None:
        absent = {name: missing for name, system in SYSTEMS.items() if (missing := system.missing())}
        systems = [BOUND, *(name for name in SYSTEMS if name not in absent)]
        print(f"not importable: {', '.join(absent) or 'none'}", flush=True)
    earlier = json.loads(arguments.merge.read_text()) if arguments.merge else None
    head = frame() | {"clocks": {}}
    out = arguments.out
    if out is None and (arguments.shapes is None or arguments.merge):
        out = default_path(head["device"], head["date"])
    guard, rows = Guard(), []
    for activation in arguments.activation:
        for shape in arguments.shapes or default_shapes(activation):
            work = partial(measure, shape, activation, usable(systems, activation), arguments.rounds, guard)
            new, clocks = guard(f"{shape} {activation}", work) or ([], "")
            torch.cuda.empty_cache()
            rows += new
            head["clocks"] |= {f"{shape} {activation}": clocks} if clocks else {}
            print(table(new), flush=True)
            if out:
                write(out, head, rows, earlier)
    return guard.status()


if __name__ == "__main__":
    sys.exit(main())
