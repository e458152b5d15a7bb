"""Checks that includes point one way: include <- base <- {plan, reference, cpu, cuda} <- api <- {cases, cli, torch}.

A backend never sees another one, only src/torch includes torch, only src/cpu/onednn includes oneDNN, and the core
includes nothing beside the standard library (and, in src/cuda, CUDA).
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
SUFFIXES = {".h", ".c", ".cpp", ".cu", ".cuh"}

# What each folder of src/ may include, beside itself and include/intarsia. The longest name that fits a file counts.
MAY_INCLUDE = {
    "base": [],
    "plan": ["base"],
    "reference": ["base"],
    "cpu": ["base", "plan/blocking.h", "plan/layer_workspace.h", "cpu/onednn/interface.h"],
    "cpu/onednn": ["base", "cpu"],
    "cuda": [
        "base",
        "plan/blocking.h",
        "plan/layer_workspace.h",
        "cuda/sm80/sm80.h",
        "cuda/sm90/sm90.h",
        "cuda/sm90/router.h",
    ],
    "cuda/sm80": ["base", "cuda"],
    "cuda/sm90": ["base", "cuda"],
    "api": ["base", "plan", "reference", "cpu", "cuda"],
    "cases": ["base", "plan", "reference", "api"],
    "cli": ["base", "plan", "api", "cases"],
    "torch": ["base", "plan", "api"],
}
# Includes of other projects, and the folders that may have them.
FOREIGN = {
    r"(torch|ATen|c10)/|.*aoti_torch": ["torch"],
    r"(oneapi/)?dnnl": ["cpu/onednn"],
    r"(cuda|cub/|cooperative_groups|mma\.h)": ["cuda"],
    r"(CLI/|nlohmann/|fmt/)": ["cases", "cli"],
    r"gtest/": [],
}


def folder_of(path: str) -> str:
    """The entry of MAY_INCLUDE that governs a path below src/."""
    fitting = [name for name in MAY_INCLUDE if path.startswith(name + "/")]
    return max(fitting, key=len, default=path.split("/")[0])


def faults_of(file: Path) -> list[str]:
    """One sentence for each include of `file` that points the wrong way."""
    relative = file.relative_to(ROOT).as_posix()
    folder = "include" if relative.startswith("include/") else folder_of(relative.removeprefix("src/"))
    may_include = [folder, *MAY_INCLUDE.get(folder, [])]
    faults = []
    if folder != "include" and folder not in MAY_INCLUDE:
        faults.append(f"{relative}: {folder} is not named in tools/check_includes.py")
    for target in INCLUDE.findall(file.read_text()):
        if (ROOT / "src" / target).is_file():
            if target not in may_include and folder_of(target) not in may_include:
                faults.append(f"{relative} includes {target}: {folder} may include {', '.join(may_include)}")
            continue
        for pattern, owners in FOREIGN.items():
            if re.match(pattern, target) and not any(folder == o or folder.startswith(o + "/") for o in owners):
                faults.append(f"{relative} includes {target}: only {', '.join(owners) or 'tests'} may")
    return faults


def main() -> int:
    files = [f for top in ("include", "src") for f in sorted((ROOT / top).rglob("*")) if f.suffix in SUFFIXES]
    faults = [fault for file in files for fault in faults_of(file)]
    print("\n".join(faults) if faults else f"includes: {len(files)} files, all point one way")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
