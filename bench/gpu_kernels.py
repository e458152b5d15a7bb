"""Time of each kernel in a hot step of the layer, by torch's profiler: milliseconds, share, launches a step.

    python bench/gpu_kernels.py [--sonicmoe] [--activation silu] sonic-7b mixtral

Kernels of the six GEMM operations are called by their operation, with tile and pipeline as in GemmConfig.
"""

import argparse
import re
import sys
from collections import defaultdict
from functools import partial

from gpu_results import Guard

REPEATS = 8
_LEFT = ("gathered_rows", "rows", "gathered_along_k")
_RIGHT = ("rows", "panels", "ragged_panels")
_HALVES = ("none", "stacked", "along_k", "along_k_three", "along_n")


def _template(name: str, start: int) -> list[str]:
    """Top-level template arguments of the `<` at or after `start`."""
    begin = name.find("<", start)
    if begin < 0:
        return []
    parts, depth, current = [], 0, ""
    for c in name[begin + 1 :]:
        if c == ">" and depth == 0:
            break
        depth += (c in "<({") - (c in ">)}")
        if c == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += c
    return [*parts, current.strip()]


def _enumerator(text: str, names: tuple[str, ...]) -> str:
    """`(Left)2` or `Left::rows` as the enumerator's name."""
    number = re.search(r"\)\s*(\d+)$", text)
    if number and int(number[1]) < len(names):
        return names[int(number[1])]
    return text.rpartition("::")[2]


def operation(epilogue: str, left: str, right: str, halves: str, transposed: bool) -> str | None:
    """Which of the six operations a kernel of sm_90a is, for weights (E, out, in): by its epilogue and its operands."""
    if epilogue.startswith("Logits"):
        return "router_logits"
    if epilogue.startswith("FloatWeight"):
        return "float32 weight gradient (the router's too)"
    if epilogue.startswith("Up"):
        return "up_forward"
    if epilogue.startswith("DownBackward"):
        return "down_backward"
    if epilogue.startswith("Weight"):  # dw_up's tiles are computed with H along m, so they are stored transposed
        return "up_weight_backward" if halves == "along_n" or transposed else "down_weight_backward"
    if left == "rows":  # plain stores: w_down's memory runs along k, w_up's along n
        return "up_backward" if halves == "along_k" or right == "panels" else "down_forward"
    return None


def short(name: str) -> str:
    """A name without namespaces, arguments and long templates."""
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    call = re.search(r"\((?!\w+(::\w+)*\)\d)", name)  # the parameter list, not an enumerator such as (Left)0
    name = name[: call.start()] if call else name
    return re.sub(r"\b\w+::", "", name).strip()[:90]


def readable(name: str) -> str:
    """A kernel's name for people: an operation and its tile, or the shortened name."""
    if "gemm_kernel<" not in name or "Operands<" not in name:
        return short(name)
    operands = _template(name, name.find("Operands<"))
    kernel = _template(name, name.find("gemm_kernel<"))
    if len(operands) < 5 or len(kernel) < 2:
        return short(name)
    left, right, halves = (
        _enumerator(text, names) for text, names in zip(operands[-3:], (_LEFT, _RIGHT, _HALVES), strict=True)
    )
    epilogue = kernel[1].partition("<")[0].rpartition("::")[2]
    transposed = _template(kernel[1], 0)[-1:] in (["true"], ["(bool)1"])
    found = operation(epilogue, left, right, halves, transposed)
    config = re.search(r"\{(.*)\}", operands[1])
    tile = config[1].replace(" ", "") if config else operands[1].rpartition("::")[2]
    return f"{found or epilogue} [{tile}; {left}, {right}, {halves}]"


def summed(parts: list[list[tuple[str, float]]], repeats: int) -> list[tuple[str, float, float]]:
    """(name, milliseconds a step, launches a step), longest first."""
    times, launches = defaultdict(float), defaultdict(int)
    for part in parts:
        for name, ms in part:
            times[readable(name)] += ms / repeats
            launches[readable(name)] += 1
    return sorted(((name, ms, launches[name] / repeats) for name, ms in times.items()), key=lambda row: -row[1])


def listing(title: str, parts: list[list[tuple[str, float]]], repeats: int) -> str:
    """The table of one system at one shape; forward and backward apart."""
    text = []
    for passed, chosen in (("forward", parts[::2]), ("backward", parts[1::2])):
        rows = summed(chosen, repeats)
        total = sum(ms for _, ms, _ in rows)
        text.append(f"{title} {passed}: {total:.3f} ms of kernels")
        text += [f"  {ms:8.3f} ms {ms / total:6.1%}  x{n:4.1f}  {name}" for name, ms, n in rows if ms >= total / 1000]
    return "\n".join(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+")
    parser.add_argument("--activation", default="swiglu", choices=("swiglu", "silu"))
    parser.add_argument("--sonicmoe", action="store_true", help="its kernels too")
    arguments = parser.parse_args()

    from gpu_layers import SYSTEMS, Sizes, inputs, passes
    from gpu_timing import profiled

    def show(shape: str, system: str) -> None:
        s = Sizes.of(shape)
        leaves, dy = inputs(s, arguments.activation)
        layer = SYSTEMS[system].make(s.K, arguments.activation)
        print(listing(f"{shape} {system}", profiled(*passes(layer, leaves, dy), REPEATS), REPEATS), flush=True)

    guard = Guard()
    for shape in arguments.shapes:
        for system in ("intarsia", "sonicmoe") if arguments.sonicmoe else ("intarsia",):
            guard(f"{shape} {system}", partial(show, shape, system))
    return guard.status()


if __name__ == "__main__":
    sys.exit(main())
