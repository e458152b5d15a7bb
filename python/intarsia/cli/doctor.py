"""`intarsia doctor`: is this installation sound, and if not, what fixes it."""

import argparse
import json
import sys
from dataclasses import asdict


def add_parser(commands) -> None:
    p = commands.add_parser(
        "doctor",
        help="versions, processor, GPU, loaded libraries, a one-second numeric self-test",
        description="Versions, processor, GPU, loaded libraries and a one-second numeric self-test; for every red line "
        "the sentence that fixes it. Exit status 1 when something is red.",
    )
    p.add_argument("--json", action="store_true", help="machine-readable")
    p.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from ..doctor import examine

    checks = examine()
    sound = all(c.ok for c in checks)
    if arguments.json:
        print(json.dumps({"ok": sound, "checks": [asdict(c) for c in checks]}, indent=1))
    else:
        print("\n".join(_line(c, sys.stdout.isatty()) for c in checks))
    return 0 if sound else 1


def _line(check, colour: bool) -> str:
    mark = "ok " if check.ok else "RED"
    if colour:
        mark = f"\033[{32 if check.ok else 31}m{mark}\033[0m"
    return f"{mark} {check.name:<18} {check.found}" + ("" if check.ok else f"\n    {'':<18} {check.fix}")
