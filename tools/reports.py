"""Keeps docs/reports.md and the tests in step: which test shows that a reported fault is impossible here.

A Python test names rows in its docstring, any other test file in a comment: "reports.md 52" or "reports.md 4, 11, 40".

    python tools/reports.py --write   puts the tests into the table
    python tools/reports.py --check   fails if the table is out of date, or names no test and no reason
"""

import argparse
import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs" / "reports.md"
ROW = re.compile(r"^\| (\d+) \| (.*) \| (.*) \|$")
NAMED = re.compile(r"reports\.md\s+(\d+(?:(?:,| and|, and)\s+\d+)*)")
UNTESTED = "no test yet"


def numbers_in(text: str) -> list[int]:
    """The rows that a docstring or comment names."""
    return [int(n) for group in NAMED.findall(text) for n in re.findall(r"\d+", group)]


def tests_of_rows() -> dict[int, list[str]]:
    """For each row, the tests that name it: file::function of Python, the file of anything else."""
    found = defaultdict(set)
    for file in sorted((ROOT / "tests").rglob("*")) + sorted((ROOT / "src" / "cases").rglob("*")):
        if file.suffix not in {".py", ".cpp", ".h", ".c", ".sh"}:
            continue
        name = file.relative_to(ROOT).as_posix()
        if file.suffix != ".py":
            for number in numbers_in(file.read_text()):
                found[number].add(name)
            continue
        tree = ast.parse(file.read_text())
        for node in [tree, *ast.walk(tree)]:
            if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef):
                where = name if isinstance(node, ast.Module) else f"{name}::{node.name}"
                for number in numbers_in(ast.get_docstring(node) or ""):
                    found[number].add(where)
    return {number: sorted(names) for number, names in found.items()}


def rewritten(text: str, tests: dict[int, list[str]]) -> str:
    """The table with the last column of every tested row made anew; a row that lost its tests says so."""
    lines = []
    for line in text.splitlines():
        if match := ROW.match(line):
            number, middle, shown_by = match.groups()
            if names := tests.get(int(number)):
                shown_by = ", ".join(f"`{name}`" for name in names)
            elif shown_by.startswith("`"):
                shown_by = UNTESTED
            line = f"| {number} | {middle} | {shown_by} |"
        lines.append(line)
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--write", action="store_true")
    mode.add_argument("--check", action="store_true")
    write = parser.parse_args().write

    tests = tests_of_rows()
    before = TABLE.read_text()
    after = rewritten(before, tests)
    rows = {int(m[1]): m[3] for line in after.splitlines() if (m := ROW.match(line))}
    faults = [
        f"{', '.join(tests[n])} names row {n}, which docs/reports.md does not have" for n in tests if n not in rows
    ]
    faults += [f"row {n} of docs/reports.md has neither a test nor a reason" for n in rows if not rows[n].strip()]
    if write:
        TABLE.write_text(after)
    elif after != before:
        faults.append("docs/reports.md is out of date: python tools/reports.py --write")
    untested = [n for n in rows if rows[n] == UNTESTED]
    print("\n".join(faults) if faults else f"reports: {len(rows)} rows, {sum(n in tests for n in rows)} with a test")
    if untested:
        print(f"{UNTESTED}: {', '.join(map(str, untested))}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
