"""Computes how many tokens an image has, and their text, from its width and height, by a rule for each model family.

The text replaces an image's placeholder in a prompt before the prompt is tokenised. Number and text must equal those of
transformers' processor, because the model makes one row for each image token.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from octavo_engine.wire.errors import StartupError

#: Most pixels of an image, by its header, and while it is scaled.
MAX_PIXELS = 64_000_000
#: Largest ratio of an image's longer side to its shorter side, for Qwen-VL, as in transformers.
MAX_RATIO = 200
#: Limit of an image's edges in Pixtral and Mistral 3, without a setting.
PIXTRAL_EDGE = 1024
_MAX_SIDE = 4096  # of a scaled image that is cut into tiles
_MAX_TILES = 256
_FAKE, _GLOBAL = "<fake_token_around_image>", "<global-img>"


class ImageTokens(Protocol):
    """A family's rule. `width`, `height`: of the upright image, in pixels."""

    def num_tokens(self, width: int, height: int) -> int:
        """Return how many image tokens the text has."""
        ...

    def text(self, width: int, height: int) -> str: ...

    def scaled_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the image's largest width and height during processing."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OneView:
    """LLaVA with CLIP: an image is scaled so that its shorter side has `edge` pixels, and its centre is cropped.

    `pads`: it is made square before.
    """

    token: str
    count: int
    edge: int
    pads: bool

    def num_tokens(self, width: int, height: int) -> int:
        return self.count

    def text(self, width: int, height: int) -> str:
        return self.token * self.count

    def scaled_size(self, width: int, height: int) -> tuple[int, int]:
        short, long = sorted((width, height))
        if self.pads:
            return max(long, self.edge), max(long, self.edge)
        scaled = int(self.edge * long / short)
        return (scaled, self.edge) if width > height else (self.edge, scaled)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageTiles:
    """Idefics 3 and SmolVLM: an image is scaled and cut into square tiles; a small copy of the whole image follows.

    `count`: image tokens per tile. `tile`, `longest`: edges in pixels. `splits`: False: there are no tiles.
    """

    token: str
    count: int
    tile: int
    longest: int
    splits: bool

    def num_tokens(self, width: int, height: int) -> int:
        rows, columns = self._grid(width, height)
        return (rows * columns + 1) * self.count

    def text(self, width: int, height: int) -> str:
        rows, columns = self._grid(width, height)
        tokens, text = self.token * self.count, ""
        for row in range(1, rows + 1):
            text += "".join(f"{_FAKE}<row_{row}_col_{column}>{tokens}" for column in range(1, columns + 1)) + "\n"
        return f"{text}\n{_FAKE}{_GLOBAL}{tokens}{_FAKE}" if text else f"{_FAKE}{_GLOBAL}{tokens}{_FAKE}"

    def scaled_size(self, width: int, height: int) -> tuple[int, int]:
        """Follow transformers' resizing step by step, as each rounds."""
        width, height = _fit_longest(width, height, self.longest, rounds_to_even=True)
        if max(width, height) > _MAX_SIDE:
            width, height = _fit_longest(width, height, _MAX_SIDE, rounds_to_even=False)
        if not self.splits:
            return width, height
        ratio = width / height
        if width >= height:
            width = self._whole_tiles(width)
            height = self._whole_tiles(int(width / ratio))
        else:
            height = self._whole_tiles(height)
            width = self._whole_tiles(int(height * ratio))
        return width, height

    def _whole_tiles(self, length: int) -> int:
        return math.ceil(length / self.tile) * self.tile

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Return rows and columns of tiles; none for an image that fits into one."""
        if not self.splits:
            return 0, 0
        width, height = self.scaled_size(width, height)
        rows, columns = height // self.tile, width // self.tile
        return (rows, columns) if max(rows, columns) > 1 else (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchGrid:
    """Qwen-VL: an image keeps its shape and about its size; each square of `factor` x `factor` pixels is a token.

    `min_pixels`, `max_pixels`: of the scaled image.
    """

    token: str
    factor: int
    min_pixels: int
    max_pixels: int

    def num_tokens(self, width: int, height: int) -> int:
        return math.prod(self.grid(width, height))

    def text(self, width: int, height: int) -> str:
        return self.token * self.num_tokens(width, height)

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Return the rows and columns of tokens."""
        width, height = self.scaled_size(width, height)
        return height // self.factor, width // self.factor

    def scaled_size(self, width: int, height: int) -> tuple[int, int]:
        scaled = round(width / self.factor) * self.factor, round(height / self.factor) * self.factor
        if math.prod(scaled) > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            width, height = (math.floor(side / shrink / self.factor) * self.factor for side in (width, height))
            return max(width, self.factor), max(height, self.factor)
        if math.prod(scaled) < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            width, height = (math.ceil(side * grow / self.factor) * self.factor for side in (width, height))
            return width, height
        return scaled


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchRows:
    """Pixtral and Mistral 3: an image keeps its shape; a special token ends each row of patches.

    `patch`: edge of the square that an image token represents, in pixels. `longest`: most pixels of an image's edge.
    """

    token: str
    patch: int
    longest: int

    def num_tokens(self, width: int, height: int) -> int:
        columns, rows = self._grid(width, height)
        return columns * rows

    def text(self, width: int, height: int) -> str:
        columns, rows = self._grid(width, height)
        return "[IMG_BREAK]".join([self.token * columns] * rows) + "[IMG_END]"

    def scaled_size(self, width: int, height: int) -> tuple[int, int]:
        columns, rows = self._grid(width, height)
        return columns * self.patch, rows * self.patch

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Return columns and rows of patches. An image that is far too narrow has no patch, as in transformers."""
        ratio = max(width / self.longest, height / self.longest, 1)
        return math.ceil(int(width / ratio) / self.patch), math.ceil(int(height / ratio) / self.patch)


@dataclass(frozen=True, slots=True, kw_only=True)
class TileCanvas:
    """InternVL: an image is scaled to the canvas with the nearest ratio and cut into tiles; the whole image follows.

    `count`: image tokens of a tile. `canvases`: columns and rows of tiles, from the smallest.
    """

    token: str
    count: int
    tile: int
    canvases: tuple[tuple[int, int], ...]

    def num_tokens(self, width: int, height: int) -> int:
        columns, rows = self._canvas(width, height)
        return (columns * rows + (columns * rows > 1)) * self.count

    def text(self, width: int, height: int) -> str:
        return f"<img>{self.token * self.num_tokens(width, height)}</img>"

    def scaled_size(self, width: int, height: int) -> tuple[int, int]:
        columns, rows = self._canvas(width, height)
        return columns * self.tile, rows * self.tile

    def _canvas(self, width: int, height: int) -> tuple[int, int]:
        """Return columns and rows of the canvas with the nearest ratio. If several have this ratio, the last one that
        the image fills over half is used, else the first."""
        found, least = (1, 1), math.inf
        for columns, rows in self.canvases:
            distance = abs(width / height - columns / rows)
            is_filled = width * height > 0.5 * self.tile * self.tile * columns * rows
            if distance < least or (distance == least and is_filled):
                found, least = (columns, rows), distance
        return found


def most_tokens(rule: ImageTokens) -> int:
    """Return the largest number of tokens of an image, found by trying images of `MAX_PIXELS` with every ratio up to 16
    to 1, and with the most extreme ratios."""
    shapes = [(columns, rows) for columns in range(1, 17) for rows in range(1, 17)]
    shapes += [shape for ratio in range(17, MAX_RATIO + 1) for shape in ((ratio, 1), (1, ratio))]
    edges = [math.isqrt(MAX_PIXELS // (columns * rows)) for columns, rows in shapes]
    return max(
        rule.num_tokens(columns * edge, rows * edge) for (columns, rows), edge in zip(shapes, edges, strict=True)
    )


def _fit_longest(width: int, height: int, longest: int, *, rounds_to_even: bool) -> tuple[int, int]:
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2 * rounds_to_even
    else:
        width, height = int(longest * ratio), longest
        width += width % 2 * rounds_to_even
    return max(width, 1), max(height, 1)


def make_image_tokens(family: str, hf: Mapping[str, Any], image: Mapping[str, Any], token: str) -> ImageTokens:
    """Return a family's rule. `hf`: config.json. `image`: the image processor's settings. Raises StartupError."""
    rule = _RULES.get(family)
    if rule is None:
        message = f"images of models of type {family!r} are not supported: use one of type {', '.join(sorted(_RULES))}."
        raise StartupError(message)
    try:
        tokens = rule(hf, image, token)
        tokens.text(1, 1)  # it divides by sizes of the files
        return tokens
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        message = f"the settings of the image processor, or vision_config, have values of wrong types: {error}"
        raise StartupError(f"{message}: correct the checkpoint's files.") from error


def processor_options(family: str, hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a family's processor in transformers passes to its image processor."""
    if family == "internvl":
        return {"crop_to_patches": True}
    if family == "mistral3" or _tower(hf).get("model_type") == "pixtral":
        edge = _merged_edge(family, hf)
        return {"patch_size": {"height": edge, "width": edge}}
    return {}


def _llava(hf: Mapping[str, Any], image: Mapping[str, Any], token: str) -> ImageTokens:
    if _tower(hf).get("model_type") != "pixtral":
        return _one_view(hf, image, token)
    if (strategy := hf.get("vision_feature_select_strategy", "default")) != "full":
        raise _unsupported("vision_feature_select_strategy", strategy, "full with Pixtral")
    return _patch_rows("llava", hf, {"image_processor_type": "LlavaImageProcessor", **image}, token)


def _one_view(hf: Mapping[str, Any], image: Mapping[str, Any], token: str) -> OneView:
    tower, kind = _tower(hf), _kind(image, "CLIPImageProcessor")
    if tower.get("model_type") != "clip_vision_model" or not kind.startswith(("CLIP", "Llava")):
        raise _unsupported("model_type of vision_config", f"{tower.get('model_type')}, {kind}", "LLaVA with CLIP")
    side, patch = tower.get("image_size", 224), tower.get("patch_size", 32)
    crop = image.get("crop_size", 224)
    if not image.get("do_center_crop", True) or _sides(crop) != (side, side):
        raise _unsupported("crop_size", crop, f"the {side} x {side} pixels of vision_config")
    size = image.get("size", 224)
    edge = size if isinstance(size, int) else size.get("shortest_edge") or max(size.values(), default=side)
    count = (side // patch) ** 2 + (hf.get("vision_feature_select_strategy", "default") != "default")
    return OneView(token=token, count=count, edge=edge, pads=kind.startswith("Llava") and bool(image.get("do_pad")))


def _tiles(hf: Mapping[str, Any], image: Mapping[str, Any], token: str) -> ImageTiles:
    tower = _tower(hf)
    side, patch = tower.get("image_size", 224), tower.get("patch_size", 32)
    tile = image.get("max_image_size", {}).get("longest_edge", 364)
    longest = image.get("size", {"longest_edge": 4 * 364}).get("longest_edge")
    if tile != side or not image.get("do_resize", True):
        raise _unsupported("max_image_size", tile, f"the {side} pixels of vision_config, and do_resize")
    if not isinstance(longest, int):
        raise _unsupported("size", image.get("size"), "a longest_edge")
    count = (side // patch) ** 2 // hf.get("scale_factor", 2) ** 2
    splits = bool(image.get("do_image_splitting", True))
    return ImageTiles(token=token, count=count, tile=tile, longest=longest, splits=splits)


def _patches(hf: Mapping[str, Any], image: Mapping[str, Any], token: str) -> PatchGrid:
    tower = _tower(hf)
    patch, merge = image.get("patch_size", 14), image.get("merge_size", 2)
    default = 16 if hf.get("model_type") == "qwen3_vl" else 14
    found = tower.get("patch_size", default), tower.get("spatial_merge_size", 2)
    if (patch, merge) != found or not image.get("do_resize", True):
        raise _unsupported("patch_size and merge_size", (patch, merge), f"{found} of vision_config, and do_resize")
    size = image.get("size") or {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
    smallest = image.get("min_pixels") or size.get("shortest_edge")
    largest = image.get("max_pixels") or size.get("longest_edge")
    if not smallest or not largest:
        raise _unsupported("size", size, "a shortest_edge and a longest_edge")
    return PatchGrid(token=token, factor=patch * merge, min_pixels=smallest, max_pixels=largest)


def _patch_rows(family: str, hf: Mapping[str, Any], image: Mapping[str, Any], token: str) -> PatchRows:
    if not (kind := _kind(image, "PixtralImageProcessor")).startswith("Pixtral"):
        raise _unsupported("image_processor_type", kind, "PixtralImageProcessor with Pixtral")
    longest = image.get("size", {"longest_edge": PIXTRAL_EDGE}).get("longest_edge")
    if not isinstance(longest, int) or not image.get("do_resize", True) or image.get("do_center_crop"):
        raise _unsupported("size", image.get("size"), "a longest_edge, with do_resize and without do_center_crop,")
    return PatchRows(token=token, patch=_merged_edge(family, hf), longest=longest)


def _canvas(hf: Mapping[str, Any], image: Mapping[str, Any], token: str) -> TileCanvas:
    if not (kind := _kind(image, "GotOcr2ImageProcessor")).startswith("GotOcr2"):
        raise _unsupported("image_processor_type", kind, "GotOcr2ImageProcessor with InternVL")
    if (strategy := hf.get("vision_feature_select_strategy", "default")) != "default":
        raise _unsupported("vision_feature_select_strategy", strategy, "default with InternVL")
    (side, width), (patch, _) = (_sides(_tower(hf).get(*each)) for each in (("image_size", 448), ("patch_size", 14)))
    if {width, *_sides(image.get("size", 384))} != {side}:
        raise _unsupported("size", image.get("size"), f"the {side} x {side} pixels of vision_config")
    fewest, most = image.get("min_patches", 1), image.get("max_patches", 12)
    if not 1 <= fewest <= most <= _MAX_TILES:
        raise _unsupported("max_patches", most, f"min_patches to {_MAX_TILES}")
    canvases = [(columns, rows) for columns in range(1, most + 1) for rows in range(1, most // columns + 1)]
    canvases = sorted((each for each in canvases if math.prod(each) >= fewest), key=math.prod)
    count = int(side // patch * hf.get("downsample_ratio", 0.5)) ** 2
    return TileCanvas(token=token, count=count, tile=side, canvases=tuple(canvases))


def _tower(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    return hf.get("vision_config") or {}


def _kind(image: Mapping[str, Any], default: str) -> str:
    return str(image.get("image_processor_type") or image.get("feature_extractor_type") or default)


def _sides(size: Any) -> tuple[Any, Any]:
    """Return height and width of a `size` setting, which is a number, a list or an object."""
    if isinstance(size, int):
        return size, size
    return tuple(size) if isinstance(size, list) else (size.get("height"), size.get("width"))


def _merged_edge(family: str, hf: Mapping[str, Any]) -> int:
    """Return the edge of the square that an image token represents: a patch, or the patches that Mistral 3 merges."""
    merged = hf.get("spatial_merge_size", 2) if family == "mistral3" else 1
    return int(_tower(hf).get("patch_size", 16)) * merged


def _unsupported(name: str, value: object, supported: str) -> StartupError:
    return StartupError(f"{name} of the image processor is {value!r:.80}: this version supports {supported} only.")


_RULES: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any], str], ImageTokens]] = {
    "idefics3": _tiles,
    "internvl": _canvas,
    "llava": _llava,
    "mistral3": partial(_patch_rows, "mistral3"),
    "qwen2_5_vl": _patches,
    "qwen2_vl": _patches,
    "qwen3_vl": _patches,
    "smolvlm": _tiles,
}
