"""Checks what is committed: no large or generated files, no overlong source file, nothing left half done."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_BYTES = 1_000_000
MAX_LINES = 450
SOURCES = {".h", ".c", ".cpp", ".cu", ".cuh", ".py"}
GENERATED = re.compile(r"\.(o|a|so|pyc|whl|pt|gcda|gcno)$|(^|/)(build[^/]*|__pycache__|out|[^/]*\.egg-info)/")
UNFINISHED = re.compile(r"\b(TO" r"DO|FIX" r"ME|X" r"XX)\b")


def faults_of(name: str) -> list[str]:
    """One sentence for each thing wrong with a tracked file."""
    path = ROOT / name
    faults = []
    if GENERATED.search(name):
        faults.append(f"{name} is generated: remove it from git")
    data = path.read_bytes()
    if len(data) > MAX_BYTES:
        faults.append(f"{name} has {len(data)} bytes: at most {MAX_BYTES}")
    if path.suffix in SOURCES:
        text = data.decode()
        lines = text.count("\n")
        if lines > MAX_LINES:
            faults.append(f"{name} has {lines} lines: at most {MAX_LINES}, split it")
        for number, line in enumerate(text.splitlines(), 1):
            if UNFINISHED.search(line):
                faults.append(f"{name}:{number}: finish it or file it: {line.strip()}")
    return faults


def main() -> int:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    names = [name for name in listing.split("\0") if name and (ROOT / name).is_file()]
    faults = [fault for name in names for fault in faults_of(name)]
    print("\n".join(faults) if faults else f"tree: {len(names)} files, nothing large, generated or unfinished")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
