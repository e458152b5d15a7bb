"""Draws docs/figures/memory.svg: bytes that a layer of Qwen3-30B-A3B holds between forward and backward, by library.

Figures are those of `intarsia memory --preset qwen3-30b-a3b --tokens 32768 --json`.
"""

import json
import subprocess
import sys
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

PRESET, TOKENS = "qwen3-30b-a3b", 32768
OUT = Path(__file__).resolve().parent.parent / "docs" / "figures" / "memory.svg"
PEERS = {
    "megablocks": "MegaBlocks",
    "scattermoe": "ScatterMoE",
    "megatron": "Megatron",
    "moeblaze": "MoEBlaze",
    "sonicmoe": "SonicMoE",
}
MODES = {"preactivation": "Intarsia", "input": "Intarsia, save=input"}


def held_bytes() -> list[tuple[str, int, bool]]:
    """(label, bytes, whether it is ours), most first."""
    command = [sys.executable, "-m", "intarsia", "memory", "--preset", PRESET, "--tokens", str(TOKENS), "--json"]
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    peers = [(label, report["peers"][name]["saved_bytes"], False) for name, label in PEERS.items()]
    ours = [(label, report["modes"][name]["saved_bytes"], True) for name, label in MODES.items()]
    return sorted(peers + ours, key=lambda row: -row[1])


def main() -> None:
    mpl.rcParams.update({"svg.hashsalt": "intarsia", "svg.fonttype": "none", "font.size": 11})
    labels, sizes, is_ours = zip(*held_bytes(), strict=True)
    gib = [size / 2**30 for size in sizes]
    figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
    bars = axes.barh(labels, gib, color=["#1f6f8b" if ours else "#c9c9c9" for ours in is_ours])
    axes.bar_label(bars, [f"{size:.2f}" for size in gib], padding=4)
    axes.invert_yaxis()
    axes.set_xlabel(f"GiB held by one MoE layer of {PRESET}, {TOKENS} tokens, bfloat16")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.12)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(OUT, metadata={"Date": None})
    print(OUT.relative_to(Path.cwd()) if OUT.is_relative_to(Path.cwd()) else OUT)


if __name__ == "__main__":
    main()
