"""Microseconds of one step of intarsia.moe, or of the module MoE, on so few tokens that the host's time is nearly all
of it, on the CPU.

    taskset -c 1 python bench/host.py [--module] [--dtype float32] [--scores softmax] [--steps 6000]

Medians. Forward and backward take turns, since the same code takes longer after other code than after itself.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import intarsia

T, H, I, E, K = 4, 8, 8, 4, 2


def leaves(dtype: torch.dtype) -> list[Tensor]:
    """x, w_router, w_up, w_down."""
    shapes = ((T, H), (E, H), (E, 2 * I, H), (E, H, I))
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def medians(
    forward: Callable[[], Tensor], backward: Callable[[Tensor], object], of: list[Tensor], steps: int
) -> tuple[float, float]:
    """Of forward and of backward, the first tenth of the steps aside."""
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        y = forward()
        middle = time.perf_counter()
        backward(y)
        times.append((middle - start, time.perf_counter() - middle))
        for leaf in of:
            leaf.grad = None
    return tuple(statistics.median(part) * 1e6 for part in zip(*times[steps // 10 :], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--module", action="store_true", help="MoE")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--scores", default="softmax_renorm", choices=intarsia.functional.ROUTER_SCORES)
    parser.add_argument("--steps", type=int, default=6000)
    a = parser.parse_args()
    torch.set_num_threads(1)
    of = leaves(getattr(torch, a.dtype))
    x, w_router, w_up, w_down = of
    dy = torch.randn_like(x)

    def forward() -> Tensor:
        return intarsia.moe(x, w_router, K, w_up, w_down, scores=a.scores)

    if a.module:
        module = intarsia.MoE(H, I, E, K, scores=a.scores, dtype=x.dtype)
        of, forward = [x, *module.parameters()], partial(module, x)

    with torch.no_grad():
        print(f"no_grad: forward {medians(forward, lambda _: None, of, a.steps)[0]:.1f}")
    ways = {"backward()": lambda y: y.backward(dy), "autograd.grad()": lambda y: torch.autograd.grad(y, of, dy)}
    for name, way in ways.items():
        print("{}: forward {:.1f}, backward {:.1f}".format(name, *medians(forward, way, of, a.steps)))


if __name__ == "__main__":
    main()
