"""Settings of a checkpoint's image processor; they decide how many tokens an image has, and are part of its digest.

Some settings can be replaced at the start, by a request, or by an image's detail "low". This module does not import
transformers, so that the API process can use it.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from octavo_engine.media.placeholders import MAX_PIXELS, PIXTRAL_EDGE
from octavo_engine.sources.json_file import read_optional_json
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.wire.errors import InvalidRequest, StartupError

Kwargs = Mapping[str, Any]
_LOW_EDGE = 512
_LOW_PIXELS = _LOW_EDGE**2
_EDGES = {"shortest_edge", "longest_edge"}
_RANGE = f"from 1 to {MAX_PIXELS}"
PROCESSOR_FILE, IMAGE_PROCESSOR_FILE = "processor_config.json", "preprocessor_config.json"


@dataclass(frozen=True, slots=True)
class FamilySettings:
    """`names`: keys of the family's image processor that can be replaced. `low`: returns the settings for the detail
    "low" (one tile, or 512 x 512 pixels), given the image processor's."""

    names: tuple[str, ...]
    low: Callable[[Kwargs], dict[str, Any]]


def _low_pixels(image: Kwargs) -> dict[str, Any]:
    largest = image.get("max_pixels") or (image.get("size") or {}).get("longest_edge") or _LOW_PIXELS
    return {"max_pixels": min(largest, _LOW_PIXELS)}


def _low_edge(image: Kwargs) -> dict[str, Any]:
    """Return the size of Pixtral and Mistral 3; LLaVA with CLIP shows one tile anyway."""
    is_pixtral = str(image.get("image_processor_type")).startswith("Pixtral")
    size = image.get("size", {"longest_edge": PIXTRAL_EDGE} if is_pixtral else None)
    longest = size.get("longest_edge") if isinstance(size, Mapping) else None
    return {"size": {"longest_edge": min(longest, _LOW_EDGE)}} if longest else {}


_GRID = FamilySettings(("max_pixels", "min_pixels"), _low_pixels)
_TILED = FamilySettings(("do_image_splitting", "size"), lambda _: {"do_image_splitting": False})
REPLACEABLE: Mapping[str, FamilySettings] = {
    "idefics3": _TILED,
    "internvl": FamilySettings(("max_patches",), lambda image: {"max_patches": image.get("min_patches", 1)}),
    "llava": FamilySettings(("size",), _low_edge),
    "mistral3": FamilySettings(("size",), _low_edge),
    "qwen2_5_vl": _GRID,
    "qwen2_vl": _GRID,
    "qwen3_vl": _GRID,
    "smolvlm": _TILED,
}


@dataclass(frozen=True, slots=True)
class ProcessorSettings:
    """`image`: keys of the image processor's file; empty without a file. Absent keys have transformers' defaults.
    `max_pixels`: most pixels of an image, as its header states them."""

    image: dict[str, Any]
    max_pixels: int = MAX_PIXELS

    def replaced(self, kwargs: Kwargs) -> "ProcessorSettings":
        return replace(self, image={**self.image, **kwargs})

    def digest(self, data: bytes) -> bytes:
        """Return the SHA-256 of these settings and an image file: caches and block hashes identify images by it."""
        settings = json.dumps(self.image, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(hashlib.sha256(settings.encode()).digest() + data).digest()


def check_kwargs(kwargs: Kwargs, family: str) -> None:
    """Check settings that replace those of a family's image processor. Raises InvalidRequest."""
    names = REPLACEABLE[family].names if family in REPLACEABLE else ()
    for name, value in kwargs.items():
        if name not in names:
            remedy = f"use {' and '.join(names)}" if names else "leave it out"
            raise _refused(f"{name!r:.80} is not supported for a model of type {family}: {remedy}.")
        if name.startswith("do_"):
            wanted, is_valid = "true or false", type(value) is bool
        elif name == "size":
            wanted = f'an object such as {{"longest_edge": 512}}, of numbers {_RANGE}'
            edges = value if isinstance(value, Mapping) else {}
            is_valid = bool(edges) and edges.keys() <= _EDGES and all(map(_is_size, edges.values()))
        else:
            wanted, is_valid = f"a whole number {_RANGE}", _is_size(value)
        if not is_valid:
            raise _refused(f"{name} must be {wanted}, got {value!r:.80}.")


def _is_size(value: object) -> bool:
    """Return whether a size is within the limits: beyond them, the text of image tokens would take all memory."""
    return type(value) is int and 0 < value <= MAX_PIXELS


def _refused(problem: str) -> InvalidRequest:
    return InvalidRequest(f"mm_processor_kwargs: {problem}", param="mm_processor_kwargs")


def read_processor_settings(
    files: ModelFiles, kwargs: Kwargs | None = None, max_pixels: int = MAX_PIXELS
) -> ProcessorSettings:
    """Read the settings from the same file as transformers; `kwargs` replace some of them. Raises StartupError."""
    processor = read_optional_json(files.root / PROCESSOR_FILE)
    image = processor.get("image_processor") or read_optional_json(files.root / IMAGE_PROCESSOR_FILE)
    if not isinstance(image, dict):
        raise StartupError(f"{files.root}: image_processor in {PROCESSOR_FILE} must be an object, got {image!r:.60}.")
    settings = ProcessorSettings(image, max_pixels)
    return settings.replaced(kwargs) if image and kwargs else settings
