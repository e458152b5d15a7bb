"""A fresh process' first step of the layer, after torch has done its own first work; prints one JSON object.

import_s: importing intarsia. step_s: the first forward and backward, kernels' loading included. later_s: the second.
"""

import json
import time

import torch

T, H, I, E, K = 24576, 1536, 256, 128, 8  # sonic-7b


def main() -> None:
    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).mul_(scale).requires_grad_()

    start = time.perf_counter()
    leaves = (
        normal(T, H),
        normal(E, H, scale=H**-0.5),
        normal(E, 2 * I, H, scale=H**-0.5),
        normal(E, H, I, scale=I**-0.5),
    )
    x, w_router, w_up, w_down = leaves
    y = x @ w_up[0].T  # torch's own: context, cuBLAS, autograd
    torch.autograd.grad(y, [x], torch.ones_like(y))
    torch.cuda.synchronize()
    seconds = {"torch_s": time.perf_counter() - start}

    start = time.perf_counter()
    import intarsia

    seconds["import_s"] = time.perf_counter() - start
    dy = torch.ones_like(x)
    for name in ("step_s", "later_s"):
        torch.cuda.synchronize()
        start = time.perf_counter()
        y = intarsia.moe(x, w_router, K, w_up, w_down, scores="softmax")
        torch.autograd.grad(y, leaves, dy)
        torch.cuda.synchronize()
        seconds[name] = time.perf_counter() - start
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
