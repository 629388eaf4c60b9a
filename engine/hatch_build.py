"""Build hook of the wheel: adds prebuilt kernels, which makes it a wheel for one platform.

With `OCTAVO_PREBUILT_KERNELS=DIR` (see `make wheels`) the libraries in DIR become part of the wheel. Without it the
wheel is a pure Python one, and the engine compiles its kernels on first use.
"""

import os
import sysconfig
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PrebuiltKernels(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        folder = os.environ.get("OCTAVO_PREBUILT_KERNELS")
        if folder and version != "editable":
            build_data["force_include"][folder] = "octavo_engine/ops/prebuilt_kernels"
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
