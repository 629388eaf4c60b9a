"""Download the wheels that a GPU machine without network lacks, and check the metadata of each.

The machine has Python with torch, triton, transformers and all that these require. The folder gets everything else that
the engine and the server require, in the versions of constraints.txt; `benchmarks/gpu/run --wheels` installs it.
"""

import argparse
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from importlib.metadata import PathDistribution
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement  # any Python that can download has it
from pip._vendor.packaging.specifiers import SpecifierSet
from pip._vendor.packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PARTS = {"engine": ("torch", "cuda"), "server": ()}  # distributions and their extras
PRESENT = """
    annotated-doc anyio click filelock fsspec h11 hf-xet huggingface-hub idna jinja2 markupsafe mpmath networkx numpy
    octavo-engine packaging pygments pyyaml regex rich safetensors setuptools shellingham sympy tokenizers torch tqdm
    transformers triton typer
"""
PLATFORMS = [f"manylinux{n}_x86_64" for n in (1, 2010, 2014, *(f"_2_{n}" for n in (5, 12, 17, 24, 27, 28, 31, 34, 35)))]
MAX_BYTES = 40 << 20


def own_requirements() -> list[str]:
    found = []
    for part, extras in PARTS.items():
        project = tomllib.loads((ROOT / part / "pyproject.toml").read_text())["project"]
        found += project["dependencies"]
        found += [text for extra in extras for text in project["optional-dependencies"][extra]]
    return found


def parse(texts: Iterable[str], python: str) -> list[Requirement]:
    """Return the requirements that hold on the machine."""
    machine = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "platform_machine": "x86_64",
        "extra": "",
    }
    found = [Requirement(text) for text in texts]
    return [each for each in found if each.marker is None or each.marker.evaluate(machine)]


def download(names: Iterable[str], target: Path, python: str) -> None:
    """Download one wheel of each name. Raises CalledProcessError."""
    options = ["-q", "--no-deps", "--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    options += [f"--abi={abi}" for abi in (f"cp{python.replace('.', '')}", "abi3", "none")]
    options += [f"--platform={platform}" for platform in PLATFORMS]
    options += ["-c", str(ROOT / "constraints.txt"), "-d", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "download", *options, *names], check=True)


def read_wheels(target: Path) -> dict[str, PathDistribution]:
    """Return the metadata of each wheel by its name. Raises SystemExit if a name has two wheels."""
    found: dict[str, PathDistribution] = {}
    for wheel in sorted(target.glob("*.whl")):
        info = next(path for path in zipfile.Path(wheel).iterdir() if path.name.endswith(".dist-info"))
        distribution = PathDistribution(info)
        name = canonicalize_name(distribution.metadata["Name"])
        if name in found:
            sys.exit(f"{target} has two wheels of {name}: remove one.")
        found[name] = distribution
    return found


def collect(target: Path, python: str, present: frozenset[str]) -> list[str]:
    """Download until nothing is missing; return one line for each requirement that a wheel's version breaks."""
    while True:
        wheels = read_wheels(target)
        texts = [*own_requirements(), *(text for wheel in wheels.values() for text in wheel.requires or ())]
        needed = [(canonicalize_name(each.name), each) for each in parse(texts, python)]
        missing = {name for name, _ in needed} - present - wheels.keys()
        if not missing:
            break
        download(sorted(missing), target, python)
    wrong = [
        f"{name} {wheels[name].version} is not what a package requires: {each}"
        for name, each in needed
        if name in wheels and not each.specifier.contains(wheels[name].version, prereleases=True)
    ]
    versions = {name: SpecifierSet(wheel.metadata.get("Requires-Python") or "") for name, wheel in wheels.items()}
    wrong += [f"{name} requires Python {versions[name]}" for name in wheels if f"{python}.0" not in versions[name]]
    return wrong + [f"{name}: nothing requires this wheel" for name in wheels.keys() - {name for name, _ in needed}]


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu/wheels", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="version of the machine's Python. Default: 3.12")
    parser.add_argument("--present", nargs="+", default=[], help="more packages of the machine, such as aiohttp")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    wrong = collect(args.folder, args.python, frozenset([*PRESENT.split(), *args.present]))
    sizes = {path.name: path.stat().st_size for path in sorted(args.folder.glob("*.whl"))}
    print(*(f"{size:9}  {name}" for name, size in sizes.items()), sep="\n")
    print(f"{len(sizes)} wheels of {sum(sizes.values()) / 2**20:.1f} MiB")
    if sum(sizes.values()) > MAX_BYTES:
        wrong.append(f"the wheels have more than {MAX_BYTES >> 20} MiB: name what the machine has (--present)")
    sys.stderr.writelines(f"{line}\n" for line in wrong)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
