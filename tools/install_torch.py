"""Install torch into the running interpreter's environment, from the source that suits this machine.

The first of these sources is used: `TORCH_INDEX` or `TORCH_SPEC`; with `ENGINE_TARGET=cuda`, as for an image, the
index of CUDA builds below; on a machine with an NVIDIA device, pip's default index (CUDA builds); a wheel in a folder
of pip's `find-links`; PyTorch's index of CPU builds. Without an NVIDIA device PyPI's default build for Linux is used
only if that index can't be reached, because it brings some 5 GB of CUDA packages. This script installs only torch
itself; its dependencies are installed later, from the default index.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
#: The pinned torch and an index that has CUDA builds of it; a test keeps the version equal to that in constraints.txt.
#: CUDA 12.6 runs on drivers since R525, 13.0 needs R580, which is newer than the default driver of many clusters. GPUs
#: newer than Hopper need TORCH_INDEX=https://download.pytorch.org/whl/cu130.
CUDA_TORCH, CUDA_INDEX = "torch==2.13.0", "https://download.pytorch.org/whl/cu126"
CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
REMEDY = (
    "torch was not installed. Choose another source: make setup TORCH_INDEX=URL, or TORCH_SPEC=REQUIREMENT_OR_WHEEL."
)

Pip = Callable[[list[str]], int]


def run_pip(arguments: list[str]) -> int:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps"]
    quiet = subprocess.DEVNULL if "--dry-run" in arguments else None
    return subprocess.run(pip + arguments, stdout=quiet, stderr=quiet, check=False).returncode


def pinned(name: str, constraints: str) -> str:
    """Return the requirement `name==version` in a constraints file, or `name` if the file does not contain it."""
    found = re.search(rf"^{re.escape(name)}==\S+", constraints, re.MULTILINE)
    return found.group() if found else name


def has_nvidia() -> bool:
    return Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None


def choose(settings: Mapping[str, str], requirement: str, *, nvidia: bool, pip: Pip) -> tuple[str, list[str]]:
    """Return a description of torch's source, and pip's arguments for it."""
    spec, index = settings.get("TORCH_SPEC") or requirement, settings.get("TORCH_INDEX")
    if index:
        return f"{index} (TORCH_INDEX)", ["--index-url", index, spec]
    if spec != requirement:
        return f"{spec} (TORCH_SPEC)", [spec]
    if settings.get("ENGINE_TARGET") == "cuda":
        return f"{CUDA_INDEX} (ENGINE_TARGET=cuda)", ["--index-url", CUDA_INDEX, spec]
    if nvidia:
        return "pip's default index, for the NVIDIA device of this machine", [spec]
    if pip(["--dry-run", "--ignore-installed", "--no-index", spec]) == 0:
        return "a wheel that pip finds locally (find-links)", ["--no-index", spec]
    return f"{CPU_INDEX} (no NVIDIA device here)", ["--index-url", CPU_INDEX, spec]


def is_installed(requirement: str) -> bool:
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return False
    return requirement == f"torch=={version.partition('+')[0]}"


def main() -> int:
    requirement = pinned("torch", CONSTRAINTS.read_text())
    if is_installed(requirement) and not (os.environ.get("TORCH_SPEC") or os.environ.get("TORCH_INDEX")):
        return 0
    source, arguments = choose(os.environ, requirement, nvidia=has_nvidia(), pip=run_pip)
    print(f"{requirement} from {source}", flush=True)
    code = install(arguments, pip=run_pip)
    if code:
        print(REMEDY, file=sys.stderr)
    return code


def install(arguments: list[str], *, pip: Pip) -> int:
    """Install torch, if need be without the index of CPU builds, which a firewall or a mirror of PyPI may lack."""
    quietly = ["--quiet", "--progress-bar", "off"]
    code = pip([*quietly, *arguments])
    if code == 0 or CPU_INDEX not in arguments:
        return code
    print(
        f"{CPU_INDEX} can't be used: torch comes from pip's default index, with some 5 GB of CUDA packages", flush=True
    )
    return pip([*quietly, arguments[-1]])


if __name__ == "__main__":
    sys.exit(main())
