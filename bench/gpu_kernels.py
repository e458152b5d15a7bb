"""Time of each kernel in a forward and backward of the layer, by torch's profiler.

python bench/gpu_kernels.py sonic-7b mixtral
"""

import sys

import torch
from torch.profiler import ProfilerActivity, profile

from gpu import inputs, intarsia_layer
from intarsia.presets import PRESETS

STEPS = 8


def main() -> None:
    for shape in sys.argv[1:]:
        p = PRESETS[shape]
        leaves, dy = inputs(p.tokens, p.hidden, p.width, p.experts)
        layer = intarsia_layer(p.experts_per_token)

        def step(layer=layer, leaves=leaves, dy=dy):
            torch.autograd.grad(layer(*leaves), leaves, dy)

        for _ in range(5):
            step()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(STEPS):
                step()
            torch.cuda.synchronize()
        events = sorted(profiler.key_averages(), key=lambda e: -e.self_device_time_total)
        total = sum(e.self_device_time_total for e in events) / STEPS / 1e3
        print(f"{shape}: {total:.3f} ms of kernels a step")
        for e in events[:24]:
            print(f"  {e.self_device_time_total / STEPS / 1e3:8.3f} ms  x{e.count / STEPS:4.1f}  {e.key[:150]}")


if __name__ == "__main__":
    main()
