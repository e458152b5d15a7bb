"""Result files of the GPU benchmarks: what a row is about, how files merge, how rows print. No torch, no GPU.

A file is one object: device, date, versions, clocks, command, `merged` (the same of files that rows were taken over
from) and `rows`. Rows of bench/gpu.py: shape, system, activation, forward_ms, backward_ms, held_bytes, peak_bytes,
planned_peak_bytes, relative_error. Rows of bench/gpu_extra.py: name, shape or case, figures.
"""

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

_KEY = ("name", "shape", "case", "system", "activation")


def key(row: dict) -> tuple:
    """What a row is about: everything but its figures."""
    return tuple(row.get(name) for name in _KEY)


def merge(new: list[dict], old: list[dict]) -> list[dict]:
    """`new`, and those of `old` that nothing in `new` measured again."""
    done = {key(row) for row in new}
    return new + [row for row in old if key(row) not in done]


def write(path: Path, frame: dict, rows: list[dict], earlier: dict | None = None) -> None:
    """Writes a result file; with `earlier`, another file's content, its rows that are not in `rows` are kept."""
    result = dict(frame)
    if earlier is not None:
        rows = merge(rows, earlier["rows"])
        origin = {name: value for name, value in earlier.items() if name not in ("rows", "merged")}
        result["merged"] = [*earlier.get("merged", []), origin]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result | {"rows": rows}, indent=1) + "\n")


def default_path(device: str, date: str) -> Path:
    """bench/results/<device>-<date>.json."""
    name = device.lower().removeprefix("nvidia ").replace(" ", "-")
    return Path(__file__).parent / "results" / f"{name}-{date}.json"


class Guard:
    """Runs measurements so that one that fails prints a line and the rest goes on."""

    def __init__(self):
        self.failures: list[str] = []

    def __call__(self, label: str, work: Callable):
        """work()'s result, or None where it raised."""
        try:
            return work()
        except Exception as error:  # whatever a peer's compiler, a kernel or the allocator raises
            self.failures.append(label)
            reason = str(error).strip().partition("\n")[0]
            print(f"{label}: {type(error).__name__}: {reason[:300]}", file=sys.stderr, flush=True)
            return None

    def status(self) -> int:
        """The exit status; names what failed."""
        if self.failures:
            print(f"failed: {', '.join(self.failures)}", file=sys.stderr)
        return 1 if self.failures else 0


def medians(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    """Median of the first and of the second figures."""
    first, second = zip(*pairs, strict=True)
    return statistics.median(first), statistics.median(second)


def rotated(names: list[str], by: int) -> list[str]:
    """The names in turn, from another start each round: nobody always runs after the same other."""
    by %= max(len(names), 1)
    return names[by:] + names[:by]


def table(rows: list[dict]) -> str:
    """Rows of bench/gpu.py as text; shares are of the bound of the same shape and activation."""
    bounds = {(r["shape"], r["activation"]): r for r in rows if r["system"] == "cublas_bmm_bound"}
    lines = [
        f"{'shape':12} {'act':7} {'system':17} {'fwd ms':>8} {'bwd ms':>8} {'of the bound':>13} "
        f"{'held MiB':>9} {'peak':>8} {'planned':>8}   error"
    ]
    for r in rows:
        bound = bounds.get((r["shape"], r["activation"]))
        shares = [bound[n] / r[n] for n in ("forward_ms", "backward_ms")] if bound else []
        share = " / ".join(f"{value:.3f}" for value in shares)
        held, peak, planned = (_mib(r.get(n)) for n in ("held_bytes", "peak_bytes", "planned_peak_bytes"))
        error = "" if r.get("relative_error") is None else f"{r['relative_error']:.1e}"
        lines.append(
            f"{r['shape']:12} {r['activation']:7} {r['system']:17} {r['forward_ms']:8.3f} {r['backward_ms']:8.3f} "
            f"{share:>13} {held:>9} {peak:>8} {planned:>8} {error:>7}"
        )
    return "\n".join(lines)


def _mib(count: int | None) -> str:
    return "" if count is None else f"{count / 2**20:.1f}"
