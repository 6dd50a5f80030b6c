"""Prints the size profile of the code and holds its caps. Knows line counts, not what the lines do."""

import argparse
import ast
import statistics
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CUDA = ("*.cu", "*.cuh")
OUTSIDE = ("tests/", "protos/deepinfer/")
MODULE_CAP, FUNCTION_CAP, KERNEL_CAP = 400, 40, 100
MODULE_BUDGET = {"median": 100, "p90": 220}
FUNCTION_BUDGET = {"median": 10}


@dataclass(frozen=True, slots=True)
class Sized:
    """One module or function and its length in lines."""

    where: str
    lines: int
    cap: int


def tracked(root: Path, *patterns: str) -> list[str]:
    """Files under git that the caps hold for: neither tests nor generated code."""
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=root, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split() if not name.startswith(OUTSIDE) and (root / name).is_file()]


def measure(name: str, source: str) -> tuple[Sized, list[Sized]]:
    """The module and its functions, methods and nested functions included; a decorator does not count."""
    cap = KERNEL_CAP if name.startswith("kernels/") else FUNCTION_CAP
    functions = [
        Sized(f"{name}:{node.lineno} {node.name}", (node.end_lineno or node.lineno) - node.lineno + 1, cap)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return Sized(name, len(source.splitlines()), MODULE_CAP), functions


def profile(sizes: Iterable[int]) -> dict[str, int]:
    """Median, 90th percentile (nearest rank) and maximum."""
    ordered = sorted(sizes) or [0]
    p90 = ordered[max(0, -(-len(ordered) * 9 // 10) - 1)]
    return {"median": round(statistics.median(ordered)), "p90": p90, "max": ordered[-1]}


def report(title: str, sized: list[Sized], budget: dict[str, int]) -> list[str]:
    """Prints one row; returns what is over its cap or budget."""
    figures = profile(s.lines for s in sized)
    print(f"{title:<10} {len(sized):>5}  {figures['median']:>6}  {figures['p90']:>5}  {figures['max']:>5}")
    broken = [
        f"{s.where}: {s.lines} lines, cap {s.cap}" for s in sorted(sized, key=lambda s: -s.lines) if s.lines > s.cap
    ]
    return broken + [
        f"{title}: {key} of {figures[key]} lines, budget {most}" for key, most in budget.items() if figures[key] > most
    ]


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    measured = [measure(name, (ROOT / name).read_text()) for name in tracked(ROOT, "*.py")]
    cuda = [Sized(name, len((ROOT / name).read_text().splitlines()), MODULE_CAP) for name in tracked(ROOT, *CUDA)]
    print(f"{'':<10} {'count':>5}  {'median':>6}  {'p90':>5}  {'max':>5}   (lines)")
    broken = report("modules", [module for module, _ in measured if module.lines], MODULE_BUDGET)
    broken += report("CUDA files", cuda, {})
    broken += report("functions", [one for _, functions in measured for one in functions], FUNCTION_BUDGET)
    for line in broken:
        print(f"over: {line}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
