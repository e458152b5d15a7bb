"""How things are timed on the GPU: queued steps between events, graph replays, the profiler's kernel times, memory.

Every timing starts hot: its own work runs first, for HOT_SECONDS, so that no figure profits from the clock that a GPU
has after a pause. Nothing waits for the GPU inside a timed region.
"""

import datetime
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from gpu_results import Guard, medians, rotated

STEPS, WARM, HOT_SECONDS = 12, 3, 0.2
_MARK = "spin_kernel"  # what torch.cuda._sleep launches

Pair = tuple[float, float]  # milliseconds of forward and backward


def warm(work: Callable) -> None:
    """Runs work until the clock is what it is under this load."""
    start, calls = time.perf_counter(), 0
    while calls < WARM or time.perf_counter() - start < HOT_SECONDS:
        work()
        torch.cuda.synchronize()
        calls += 1


def step_times(forward: Callable, backward: Callable) -> Pair:
    """Medians over STEPS steps queued back to back, gaps included. backward takes what forward returned."""
    warm(lambda: backward(forward()))
    marks = []
    for _ in range(WARM + STEPS):
        start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        start.record()
        y = forward()
        middle.record()
        backward(y)
        end.record()
        del y
        marks.append((start, middle, end))
    torch.cuda.synchronize()
    return medians([(a.elapsed_time(b), b.elapsed_time(c)) for a, b, c in marks[WARM:]])


def queued_ms(work: Callable, calls: int = 20, repeats: int = 7) -> float:
    """Milliseconds a call, of calls queued back to back."""
    warm(work)
    marks = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            work()
        end.record()
        marks.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in marks) / calls


def replay_ms(work: Callable) -> float:
    """Milliseconds a call when work is captured once in a CUDA graph and replayed."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return queued_ms(graph.replay)


def interleaved(contenders: dict[str, Callable[[], Pair]], rounds: int, guard: Guard, label: str) -> dict[str, Pair]:
    """Medians over rounds in which every contender is timed once; one that fails is left out from then on."""
    times: dict[str, list[Pair]] = {name: [] for name in contenders}
    failed = set()
    for turn in range(rounds):
        for name in rotated(list(contenders), turn):
            if name in failed:
                continue
            pair = guard(f"{label} {name}", contenders[name])
            failed |= {name} if pair is None else set()
            times[name] += [] if pair is None else [pair]
            guard(f"{label} {name}: release", torch.cuda.empty_cache)
    return {name: medians(pairs) for name, pairs in times.items() if pairs and name not in failed}


# ---- kernels, by the profiler


def segments(events: list[tuple[float, str, float]], mark: str = _MARK) -> list[list[tuple[str, float]]]:
    """(start, name, duration) in any order -> (name, duration) of what ran between each two marks in a row."""
    parts, current = [], None
    for _, name, duration in sorted(events):
        if mark in name:
            parts += [] if current is None else [current]
            current = []
        elif current is not None:
            current.append((name, duration))
    return parts


def profiled(forward: Callable, backward: Callable, repeats: int = 8) -> list[list[tuple[str, float]]]:
    """Kernels (name, milliseconds) of forward, backward, forward, backward, ... of hot steps."""

    def mark():
        torch.cuda._sleep(1)

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        warm(lambda: backward(forward()))
        mark()
        for _ in range(repeats):
            y = forward()
            mark()
            backward(y)
            mark()
            del y
        torch.cuda.synchronize()
    events = [
        (e.time_range.start, e.name, e.time_range.elapsed_us() / 1e3)
        for e in profiler.events()
        if e.device_type == DeviceType.CUDA and not e.is_user_annotation
    ]
    parts = segments(events)
    if len(parts) != 2 * repeats:
        raise RuntimeError(f"the profiler saw {len(parts)} passes of {2 * repeats}")
    return parts


def kernel_times(forward: Callable, backward: Callable) -> Pair:
    """Sums of the kernels' times, without the gaps between them: what a host that runs ahead would see."""
    sums = [sum(ms for _, ms in part) for part in profiled(forward, backward)]
    return statistics.median(sums[::2]), statistics.median(sums[1::2])


# ---- memory and the machine


def memory(forward: Callable, backward: Callable) -> tuple[int, int]:
    """Bytes (held, peak) of a step, as requested from torch's allocator.

    held: what forward leaves for backward, y not counted. peak: the most at once above what was there before forward;
    in backward y and the gradients are not counted.
    """

    def requested(which: str) -> int:
        return torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]

    def size(tensors) -> int:
        return sum(t.numel() * t.element_size() for t in tensors)

    backward(forward())
    torch.cuda.synchronize()
    before = requested("current")
    torch.cuda.reset_peak_memory_stats()
    y = forward()
    held = requested("current") - before - size([y])
    peak = requested("peak") - before
    torch.cuda.reset_peak_memory_stats()
    gradients = backward(y)
    torch.cuda.synchronize()
    return held, max(peak, requested("peak") - before - size([y, *gradients]))


def clocks_under_load(work: Callable) -> str:
    """What nvidia-smi says while work runs: clocks of the multiprocessors and the memory, power, temperature."""
    query = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu", "--format=csv,noheader"]
    if shutil.which(query[0]) is None:
        return "unknown"
    warm(work)
    with subprocess.Popen(query, stdout=subprocess.PIPE, text=True) as asked:
        deadline = time.monotonic() + 10
        while asked.poll() is None and time.monotonic() < deadline:
            work()
            torch.cuda.synchronize()
        asked.kill()
        return asked.communicate()[0].strip()


def frame() -> dict:
    """What a result file says about the machine, the versions and the command."""
    import intarsia

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        driver = "unknown"
    return {
        "device": torch.cuda.get_device_name(),
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "intarsia": intarsia.__version__,
        "binding": intarsia.binding()[0],
        "cuda": torch.version.cuda,
        "driver": driver,
        "command": shlex.join(["python", *(Path(a).name if a.startswith("/") else a for a in sys.argv)]),
    }
