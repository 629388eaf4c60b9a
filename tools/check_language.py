"""Check that the text of the repository is plain English; print each violation and exit with 1 if there is one.

It reads docstrings, comments, defined names and messages in Python files, and every line of the other text files. It
reports words (`WORDS`) in whose sentences readers had to guess subject or object. Data in tests may contain them.

Usage: check_language.py [PATH ...]   Default: the files that git tracks. --count prints only totals by folder.
"""

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORDS = "tell tells telling told hear hears hearing heard whoever anew poke pokes poked news believed nobody somebody"
FORBIDDEN = re.compile(rf"(?<![\w-])({'|'.join(WORDS.split())}|goes on|go on|went on)(?![\w-])", re.IGNORECASE)
IN_A_NAME = frozenset(WORDS.split())
NO_FIRST_WORD = frozenset(
    {"of", "with", "and", "but", "what", "who", "whoever", "that", "which", "whether", "how", "why", "as", "so"}
)
TEXT = frozenset(
    {".md", ".yaml", ".yml", ".toml", ".txt", ".sh", ".tpl", ".cpp", ".h", ".html", ".js", ".json", ".cfg"}
)
NAMED_TEXT = frozenset({"Makefile", "Dockerfile", "run"})
FREE = frozenset({Path("tools/check_language.py")})  # it lists the words
DISTRIBUTIONS = ("engine/src", "server/src", "operator/src")
DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def violations(paths: list[Path]) -> Iterator[str]:
    """Yield each violation as `path:line: message`."""
    for path in paths:
        if path in FREE:
            continue
        if path.suffix == ".py":
            yield from _in_python(path, (ROOT / path).read_text())
        elif path.suffix in TEXT or path.name in NAMED_TEXT:
            yield from _forbidden(path, 1, (ROOT / path).read_text())
    yield from _classes_defined_twice(paths)


def _in_python(path: Path, source: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from _forbidden(path, token.start[0], token.string)
    tree = ast.parse(source)
    docstrings = dict(_docstrings(tree))
    for node, text in docstrings.items():
        yield from _forbidden(path, node.lineno, text)
        first = re.split(r"[\s,.:;]", text.strip(), maxsplit=1)[0].lower()
        if first in NO_FIRST_WORD:
            yield f"{path}:{node.lineno}: the docstring begins with {first!r}; begin with a verb or a noun"
    is_test = path.parts[0] in {"tests", "e2e"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings and not is_test:
            if " " in node.value.strip():
                yield from _forbidden(path, node.lineno, node.value)
        elif isinstance(node, DEFINITIONS) and (found := IN_A_NAME & set(_words(node.name))):
            yield f"{path}:{node.lineno}: the name {node.name} uses {', '.join(sorted(found))}"


def _docstrings(tree: ast.Module) -> Iterator[tuple[ast.Constant, str]]:
    for node in ast.walk(tree):
        first = node.body[0] if isinstance(node, (ast.Module, *DEFINITIONS)) and node.body else None
        constant = first.value if isinstance(first, ast.Expr) else None
        if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
            yield constant, constant.value


def _words(name: str) -> list[str]:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_")


def _forbidden(path: Path, line: int, text: str) -> Iterator[str]:
    for number, part in enumerate(text.splitlines()):
        for match in FORBIDDEN.finditer(part):
            yield f"{path}:{line + number}: the word {match.group()!r} hides who does what: name subject and verb"


def _classes_defined_twice(paths: list[Path]) -> Iterator[str]:
    for distribution in DISTRIBUTIONS:
        seen: dict[str, Path] = {}
        for path in (p for p in paths if p.is_relative_to(distribution) and p.suffix == ".py"):
            for node in ast.parse((ROOT / path).read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    if node.name in seen:
                        yield f"{path}:{node.lineno}: class {node.name} is also defined in {seen[node.name]}"
                    seen[node.name] = path


def _tracked(under: list[str]) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "--", *under], cwd=ROOT, check=True, capture_output=True, text=True)
    return [Path(line) for line in sorted(listed.stdout.splitlines()) if (ROOT / line).is_file()]


def main() -> int:
    parser = argparse.ArgumentParser(description="Check that the text of the repository is plain English.")
    parser.add_argument("paths", nargs="*", help="files or folders below the root of the repository. Default: all")
    parser.add_argument("--count", action="store_true", help="print the number of violations of each folder only")
    arguments = parser.parse_args()
    found = list(violations(_tracked(arguments.paths)))
    if arguments.count:
        folders = Counter("/".join(Path(line.split(":", 1)[0]).parts[:4][:-1] or (".",)) for line in found)
        print(*(f"{number:5}  {folder}" for folder, number in sorted(folders.items())), sep="\n")
    else:
        print(*found, sep="\n", file=sys.stderr if found else sys.stdout)
    print(f"language: {len(found)} violations" if found else "language: no violations")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
