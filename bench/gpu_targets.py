"""What is required of the GPU side, and what result files of bench/gpu.py and bench/gpu_extra.py say about it.

    python bench/gpu_targets.py FILE...      later files take precedence

Prints a line for each requirement that was measured: what, where, required, measured, and `met`, `within 2 %` or how
short it is; then what was not measured. No GPU.
"""

import argparse
import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpu_results import merge
from intarsia.presets import PRESETS

# Fractions of cublas_bmm_bound, forward and backward, by shape.
_FRACTIONS = {
    (0.93, 0.90): ("mixtral", "blaze-conf4", "blaze-conf7"),
    (0.87, 0.85): (
        "dsv3", "sonic-120b", "olmoe", "gpt-oss", "qwen3-30b", "blaze-conf2", "blaze-conf3", "blaze-conf6"
    ),
    (0.72, 0.70): ("sonic-7b", "sonic-30b", "qwen3-next", "blaze-conf5"),
    (0.68, 0.64): ("sonic-1.4b", "blaze-conf1"),
}  # fmt: skip
FRACTIONS = {shape: pair for pair, shapes in _FRACTIONS.items() for shape in shapes}
BLAZE = tuple(f"blaze-conf{i}" for i in range(1, 8))
NARROW = ("sonic-7b", "sonic-1.4b", "sonic-30b", "qwen3-next")
SKEWED = ("zipf", "one expert", "empty experts")
TOLERANCE = 0.02  # of times: the bound itself moves by more between runs


@dataclass(frozen=True)
class Figure:
    """One figure beside what is required of it: at least, or at most."""

    measured: float | None
    required: float
    at_most: bool = False
    tolerance: float = TOLERANCE

    def verdict(self) -> str:
        """met, within 2 %, or how short."""
        if self.measured is None:
            return "not measured"
        low, high = (self.measured, self.required) if self.at_most else (self.required, self.measured)
        if high >= low:
            return "met"
        short = 1 - high / low
        return f"within {self.tolerance:.0%}".replace("%", " %") if short <= self.tolerance else f"short by {short:.1%}"


@dataclass(frozen=True)
class Line:
    """A requirement at one place."""

    what: str
    where: str
    figures: tuple[Figure, ...]
    form: str = "{:.2f}"

    def measured(self) -> bool:
        return any(f.measured is not None for f in self.figures)

    def cells(self) -> list[str]:
        """what, where, required, measured, verdict."""
        required = " / ".join(("<= " if f.at_most else ">= ") + self.form.format(f.required) for f in self.figures)
        found = " / ".join("-" if f.measured is None else self.form.format(f.measured) for f in self.figures)
        verdicts = [f.verdict() for f in self.figures]
        verdict = " / ".join(verdicts if len(set(verdicts)) > 1 else verdicts[:1])
        return [self.what, self.where, required, found, verdict]


class Results:
    """Rows by what they are about."""

    def __init__(self, rows: list[dict]):
        self._layers = {(r["shape"], r["system"], r["activation"]): r for r in rows if "system" in r}
        self._extra = {(r["name"], r.get("shape"), r.get("case")): r for r in rows if "name" in r}

    def field(self, shape: str, system: str, name: str, activation: str = "swiglu") -> float | None:
        """A field of a row of bench/gpu.py; `total_ms` is forward and backward."""
        row = self._layers.get((shape, system, activation), {})
        if name == "total_ms":
            return row["forward_ms"] + row["backward_ms"] if row else None
        return row.get(name)

    def extra(self, name: str) -> list[dict]:
        """Rows of bench/gpu_extra.py by name."""
        return [row for (found, _, _), row in self._extra.items() if found == name]


def ratio(a: float | None, b: float | None) -> float | None:
    """a / b where both were measured."""
    return None if a is None or b is None else a / b


def speed(r: Results, shape: str, other: str, activation: str = "swiglu") -> float | None:
    """How many times as fast as another system a step of Intarsia is."""
    return ratio(r.field(shape, other, "total_ms", activation), r.field(shape, "intarsia", "total_ms", activation))


# ---- the requirements


def against_sonicmoe(r: Results) -> Iterator[Line]:
    what = "forward + backward against sonicmoe_kernels"
    speeds = {shape: speed(r, shape, "sonicmoe_kernels") for shape in FRACTIONS}
    for shape, value in speeds.items():
        yield Line(what, shape, (Figure(value, 0.90),))
    known = [value for value in speeds.values() if value is not None]
    mean = math.exp(sum(map(math.log, known)) / len(known)) if known else None
    yield Line(what, f"geometric mean of {len(known)} of {len(speeds)}", (Figure(mean, 0.96),), "{:.3f}")


def of_the_bound(r: Results) -> Iterator[Line]:
    for activation, shapes in (("swiglu", FRACTIONS), ("silu", BLAZE)):
        for shape in shapes:
            figures = (
                Figure(
                    ratio(
                        r.field(shape, "cublas_bmm_bound", f"{part}_ms", activation),
                        r.field(shape, "intarsia", f"{part}_ms", activation),
                    ),
                    required,
                )
                for part, required in zip(("forward", "backward"), FRACTIONS[shape], strict=True)
            )
            yield Line(f"of the bound, forward / backward, {activation}", shape, tuple(figures), "{:.3f}")


def against_others(r: Results) -> Iterator[Line]:
    for other, required in (("torch_grouped_mm", 2.0), ("scattermoe", 1.8)):
        for shape in NARROW:
            yield Line(f"times as fast as {other}", shape, (Figure(speed(r, shape, other), required),))


def against_mb_like(r: Results) -> Iterator[Line]:
    for activation in ("swiglu", "silu"):
        for shape in BLAZE:
            held, peak = (
                ratio(r.field(shape, "intarsia", name, activation), r.field(shape, "mb_like", name, activation))
                for name in ("held_bytes", "peak_bytes")
            )
            figures = (
                Figure(speed(r, shape, "mb_like", activation), 1.0),
                Figure(held, 0.5, at_most=True, tolerance=0),
                Figure(peak, 1.0, at_most=True, tolerance=0),
            )
            yield Line(f"against mb_like: speed, held, peak, {activation}", shape, figures)


def held_limit(shape: str, activation: str = "swiglu", save: str = "preactivation") -> int:
    """Bytes beside x: 4RI + 20R + 8(E+1) (2RI ungated, no RI with save="input"), 2TE for a softmax router's logits."""
    p = PRESETS[shape]
    rows = p.tokens * p.experts_per_token
    z = {"swiglu": 4, "silu": 2}[activation] * rows * p.width if save == "preactivation" else 0
    return z + 20 * rows + 8 * (p.experts + 1) + 2 * p.tokens * p.experts


def memory(r: Results) -> Iterator[Line]:
    for activation, shapes in (("swiglu", FRACTIONS), ("silu", BLAZE)):
        for shape in shapes:
            held, peak, planned = (
                r.field(shape, "intarsia", name, activation)
                for name in ("held_bytes", "peak_bytes", "planned_peak_bytes")
            )
            held_share = Figure(ratio(held, held_limit(shape, activation)), 1.0, at_most=True, tolerance=0)
            yield Line(f"held bytes over the promised, {activation}", shape, (held_share,), "{:.3f}")
            peak_share = Figure(ratio(peak, planned), 1.0, at_most=True)
            yield Line(f"peak over the plan's, {activation}", shape, (peak_share,), "{:.3f}")
    for other in ("sonicmoe", "scattermoe"):
        for shape in FRACTIONS:
            share = ratio(r.field(shape, "intarsia", "peak_bytes"), r.field(shape, other, "peak_bytes"))
            yield Line(f"peak over {other}'s", shape, (Figure(share, 1.0, at_most=True, tolerance=0),))


def extras(r: Results) -> Iterator[Line]:
    """The rows of bench/gpu_extra.py."""
    for row in r.extra("host_time"):
        figures = (Figure(row["forward_us"], 200, at_most=True), Figure(row["backward_us"], 300, at_most=True))
        yield Line("host time of forward / backward, us", row["case"], figures, "{:.0f}")
    for row in r.extra("first_step"):
        yield Line("first step of a fresh process, s", row["case"], (Figure(row["beyond_s"], 1.0, at_most=True),))
    for row in r.extra("rounding"):
        yield Line("token rounding against top-k", row["shape"], (Figure(row["speedup"], 1.05),), "{:.3f}")
    for row in r.extra("build_index"):
        yield Line("build_index against torch", row["case"], (Figure(row.get("speedup"), 5.0),), "{:.1f}")
        limit = 60 if "E=128" in row["case"] else 90
        figure = Figure(row.get("logits_to_lists_us"), limit, at_most=True)
        yield Line("from logits to lists, us", row["case"], (figure,), "{:.0f}")
    for row in r.extra("model"):
        yield Line("tokens/s of a model against grouped_mm", row["case"], (Figure(row["speedup"], 1.5),))
    for row in r.extra("skew"):
        if row["case"] in SKEWED:
            figure = Figure(row.get("ratio"), 1.10, at_most=True)
            yield Line("time per FLOP over uniform routing's", f"{row['shape']}, {row['case']}", (figure,))
    for row in r.extra("save_input"):
        yield Line('cost of save="input"', row["shape"], (Figure(row["cost"], 1.25, at_most=True),))
        share = row["held_bytes"] / held_limit(row["shape"], save="input")
        figure = Figure(share, 1.0, at_most=True, tolerance=0)
        yield Line('held bytes of save="input" over the promised', row["shape"], (figure,), "{:.3f}")


REQUIREMENTS = (against_sonicmoe, of_the_bound, against_others, against_mb_like, memory, extras)
EXTRAS = ("host_time", "first_step", "rounding", "build_index", "model", "skew", "save_input", "few_tokens")


# ---- what is printed


def report(rows: list[dict]) -> str:
    """Every requirement's line, the reported figures, a count of the verdicts, and what is missing."""
    results = Results(rows)
    lines = [line for requirement in REQUIREMENTS for line in requirement(results)]
    cells = [["what", "where", "required", "measured", "verdict"]]
    cells += [line.cells() for line in lines if line.measured()]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    for row in results.extra("few_tokens"):
        figures = ", ".join(f"{name} {value:.3f}" for name, value in row.items() if name.endswith("_ms"))
        text.append(f"reported: {row['shape']} {row['case']}: {figures}")
    verdicts = Counter(f.verdict().partition(" by")[0] for line in lines if line.measured() for f in line.figures)
    text.append(", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common()) or "nothing measured")
    missing = Counter(line.what for line in lines if not line.measured())
    text += [f"not measured: {what}, {count} places" for what, count in missing.items()]
    text += [f"not measured: {name}" for name in EXTRAS if not results.extra(name)]
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    rows: list[dict] = []
    for path in parser.parse_args().files:
        rows = merge(json.loads(path.read_text())["rows"], rows)
    print(report(rows))


if __name__ == "__main__":
    main()
