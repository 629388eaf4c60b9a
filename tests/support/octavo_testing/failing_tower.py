"""An engine whose tower fails for pictures of a single colour while a file exists: the real loader.

The file, whose path is in the environment variable TOWER_FAULT, holds the fault: "raises" or "poisons" (rows that are
not finite).
"""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from octavo_engine.models.vision_tower import VisionTower
from octavo_engine.runner import load as loading
from octavo_engine.settings.config import EngineConfig

LOADER = "octavo_testing.failing_tower:load"
TOWER_FAULT = "OCTAVO_TEST_TOWER_FAULT"


def load(config: EngineConfig) -> Any:
    encode, file = VisionTower.encode, Path(os.environ[TOWER_FAULT])

    def fail(tower: VisionTower, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        pixels = inputs["pixel_values"]
        is_plain = bool((pixels.amax((-1, -2)) == pixels.amin((-1, -2))).all())
        fault = file.read_text() if is_plain and file.exists() else ""
        if fault == "raises":
            raise RuntimeError("the tower broke")
        return encode(tower, inputs) * (math.nan if fault == "poisons" else 1)

    VisionTower.encode = fail  # type: ignore[method-assign]
    return loading.load(config)
