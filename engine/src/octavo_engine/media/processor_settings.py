"""Settings of a checkpoint's image processor: they decide how many tokens an image has, and its digest.

This module needs no transformers, so the API process can use it.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from octavo_engine.sources.json_file import read_optional_json
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.wire.errors import StartupError

PROCESSOR_FILE, IMAGE_PROCESSOR_FILE = "processor_config.json", "preprocessor_config.json"


@dataclass(frozen=True, slots=True)
class ProcessorSettings:
    """`image`: keys of the image processor, none without a file; a key that is absent has transformers' default."""

    image: dict[str, Any]

    def digest(self, data: bytes) -> bytes:
        """Return the SHA-256 of these settings and of an image's file, which names the image in caches and hashes."""
        settings = json.dumps(self.image, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(hashlib.sha256(settings.encode()).digest() + data).digest()


def read_processor_settings(files: ModelFiles) -> ProcessorSettings:
    """Read the settings from the same file as transformers does. Raises StartupError."""
    processor = read_optional_json(files.root / PROCESSOR_FILE)
    image = processor.get("image_processor") or read_optional_json(files.root / IMAGE_PROCESSOR_FILE)
    if not isinstance(image, dict):
        raise StartupError(f"{files.root}: image_processor in {PROCESSOR_FILE} must be an object, got {image!r:.60}.")
    return ProcessorSettings(image)
