"""Print the external requirements of distributions of this repository: `requirements.py engine[torch] server[api]`.

An image installs these requirements in a layer before the sources, which change with every commit.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
OURS = ("octavo-engine", "octavo-server", "octavo-operator")


def requirements(argument: str) -> list[str]:
    folder, _, extras = argument.rstrip("]").partition("[")
    project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
    optional = project.get("optional-dependencies", {})
    wanted = [*project["dependencies"], *(r for extra in extras.split(",") if extra for r in optional[extra])]
    return [requirement for requirement in wanted if re.split(r"[^A-Za-z0-9-]", requirement)[0] not in OURS]


if __name__ == "__main__":
    print(*dict.fromkeys(r for argument in sys.argv[1:] for r in requirements(argument)), sep="\n")
