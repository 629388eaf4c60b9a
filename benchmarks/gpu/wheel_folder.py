"""Download the wheels that a GPU machine without network lacks, for this Python's version and this platform.

The machine has Python with torch, triton, transformers and all that these require. The folder gets everything else that
the engine and the server require, as pip resolves it with constraints.txt; `benchmarks/gpu/run --wheels` installs it.
"""

import argparse
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PARTS = {"engine": ("torch", "cuda"), "server": ()}  # distributions and their extras
PRESENT = """
    annotated-doc anyio click filelock fsspec h11 hf-xet huggingface-hub idna jinja2 markupsafe mpmath networkx numpy
    octavo-engine packaging pygments pyyaml regex rich safetensors setuptools shellingham sympy tokenizers torch tqdm
    transformers triton typer
"""


def own_requirements() -> list[str]:
    found = []
    for part, extras in PARTS.items():
        project = tomllib.loads((ROOT / part / "pyproject.toml").read_text())["project"]
        found += project["dependencies"]
        found += [text for extra in extras for text in project["optional-dependencies"][extra]]
    return found


def package(text: str) -> str:
    """Return the name of the package of a requirement or of a wheel's file name."""
    return re.split(r"-\d|[^\w.-]", text)[0].lower().replace("_", "-")


def collect(target: Path, present: set[str]) -> list[Path]:
    """Download what the packages `present` lack; return the wheels. Raises CalledProcessError."""
    needed = [text for text in own_requirements() if package(text) not in present]
    options = ["-q", "--only-binary=:all:", "-c", str(ROOT / "constraints.txt"), "-d", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "download", *options, *needed], check=True)
    for wheel in target.glob("*.whl"):
        if package(wheel.name) in present:
            wheel.unlink()
    return sorted(target.glob("*.whl"))


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu/wheels", description=__doc__)
    parser.add_argument("folder", type=Path, help="new folder")
    parser.add_argument("--present", nargs="+", default=[], help="more packages of the machine, such as aiohttp")
    args = parser.parse_args()
    if any(args.folder.glob("*")):
        parser.error(f"{args.folder} has files already, which may be of other versions: name a new folder")
    wheels = collect(args.folder, {*PRESENT.split(), *args.present})
    print(*(f"{wheel.stat().st_size:9}  {wheel.name}" for wheel in wheels), sep="\n")
    print(f"{len(wheels)} wheels of {sum(wheel.stat().st_size for wheel in wheels) / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
