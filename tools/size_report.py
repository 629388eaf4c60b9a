"""Print sizes of files and functions per package; exit with 1 if one exceeds its limit (CONTRIBUTING.md).

The limits have no exceptions: a file or function that exceeds its limit must be split. The column `growth` is the
number of lines added since `--base` (a git revision), minus lines removed.
"""

import argparse
import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
AREAS = ("engine/src", "server/src", "operator/src", "tests", "e2e", "benchmarks", "examples", "tools")
FILE_LIMIT, TEST_FILE_LIMIT, FUNCTION_LIMIT = 500, 700, 60


@dataclass(frozen=True, slots=True, order=True)
class Size:
    """Number of lines of a file or function, and its place. Sizes sort by the number of lines."""

    lines: int
    place: str


def function_sizes(source: str, place: str) -> Iterator[Size]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            last = node.end_lineno or node.lineno
            yield Size(last - node.lineno + 1, f"{place}:{node.lineno} {node.name}")


def growth(area: str, base: str) -> str:
    """Return lines added minus lines removed since `base`; "-" without git or without that revision."""
    if shutil.which("git") is None:
        return "-"
    command = ["git", "-C", str(ROOT), "diff", "--numstat", base, "--", f"{area}/*.py"]
    diff = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = [line.split("\t") for line in diff.stdout.splitlines()]
    return f"{sum(int(added) - int(removed) for added, removed, _ in rows):+d}" if diff.returncode == 0 else "-"


def report(area: str, base: str) -> list[str]:
    """Print the table's row for one package and return its violations of the limits."""
    paths = sorted((ROOT / area).rglob("*.py"))
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in paths}
    files = [Size(text.count("\n"), place) for place, text in texts.items()]
    functions = [size for place, text in texts.items() for size in function_sizes(text, place)]
    longest_file, longest_function = max(files, default=Size(0, "")), max(functions, default=Size(0, ""))
    total = sum(file.lines for file in files)
    print(f"{area:14}{len(files):6}{total:8}{longest_file.lines:14}{longest_function.lines:18}{growth(area, base):>10}")
    limit = TEST_FILE_LIMIT if area == "tests" else FILE_LIMIT
    too_long = [f"{file.place}: {file.lines} lines, the limit is {limit}" for file in files if file.lines > limit]
    return too_long + [
        f"{function.place}: {function.lines} lines, the limit is {FUNCTION_LIMIT}"
        for function in functions
        if function.lines > FUNCTION_LIMIT
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Print sizes of files and functions, and check their limits.")
    parser.add_argument("--base", default="HEAD~1", help="git revision from which growth is counted. Default: HEAD~1")
    base = parser.parse_args().base
    print(f"{'':14}{'files':>6}{'lines':>8}{'longest file':>14}{'longest function':>18}{'growth':>10}")
    problems = [problem for area in AREAS if (ROOT / area).is_dir() for problem in report(area, base)]
    print(*problems, sep="\n", end="\n" if problems else "", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
