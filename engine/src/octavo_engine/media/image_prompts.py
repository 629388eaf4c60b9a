"""`ImagePrompts`: replaces the image placeholders of a prompt by image tokens, and finds these among its token ids.

A prompt has one placeholder token for each image. In a text, the placeholder is expanded before the text is tokenised,
because a tokenizer may merge characters around it. In a list of token ids, each placeholder is replaced by several ids.
"""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

from octavo_engine.media.payload import GivenImage
from octavo_engine.media.placeholders import MAX_PIXELS, MAX_RATIO, ImageTokens, PatchGrid, make_image_tokens
from octavo_engine.media.processor_settings import (
    IMAGE_PROCESSOR_FILE,
    REPLACEABLE,
    Kwargs,
    ProcessorSettings,
    check_kwargs,
    read_processor_settings,
)
from octavo_engine.settings.config import EngineConfig
from octavo_engine.settings.records import VisionConfig
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.wire.errors import ContextLengthExceeded, InvalidRequest, StartupError
from octavo_engine.wire.records import ImageInput

logger = logging.getLogger(__name__)

INSTALL = "pip install 'octavo-engine[vision]'"


class TextTokenizer(Protocol):
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def piece(self, token_id: int) -> str: ...


@dataclass(frozen=True, slots=True)
class Picture:
    """An image's file, and the text that replaces its placeholder in a prompt; the text has the image token
    `num_tokens` times.

    `kwargs`: as of `ImageInput`. `grid`: as of `ImageSpan`.
    """

    data: bytes
    num_tokens: int
    text: str
    digest: bytes
    kwargs: str = ""
    grid: tuple[int, int] | None = None


class ImagePrompts:
    """`token`: text of the image token. If a checkpoint has no settings of an image processor, it takes only text."""

    def __init__(self, vision: VisionConfig, settings: ProcessorSettings, tokenizer: TextTokenizer, name: str) -> None:
        token_id = vision.image_token_id
        self.token = tokenizer.piece(token_id)
        if not self.token or tokenizer.encode(self.token, add_special_tokens=False) != [token_id]:
            problem = f"the tokenizer does not encode its image token {self.token!r} as {token_id}"
            raise StartupError(f"{name}: {problem}, which config.json names: use the tokenizer of this model.")
        self._vision, self._settings, self._tokenizer, self._token_id = vision, settings, tokenizer, token_id
        self._name = name
        self._rule = self._make_rule(settings) if settings.image else None
        if not has_extra():
            logger.warning("%s takes only text, as the packages for images are not installed: %s", name, INSTALL)
        if self._rule is None:
            logger.warning("%s takes only text, as its checkpoint has no %s", name, IMAGE_PROCESSOR_FILE)

    def read_all(
        self, images: Mapping[str, GivenImage], kwargs: Kwargs, *, most_images: int, max_model_len: int
    ) -> list[Picture]:
        """Read images, which are given by their place in the prompt. Raises ContextLengthExceeded for the first image
        that does not fit; InvalidRequest for an invalid image, or for settings of the image processor that cannot be
        replaced."""
        check_kwargs(kwargs, self._vision.family)
        try:
            if self._rule is not None:
                self._make_rule(self._settings.replaced(kwargs))
        except StartupError as error:
            raise InvalidRequest(f"mm_processor_kwargs: {error}", param="mm_processor_kwargs") from error
        if len(images) > most_images:
            remedy = f"the limit is {most_images}: send fewer, or raise --limit-mm-per-prompt."
            raise InvalidRequest(f"The prompt holds {len(images)} images; {remedy}", param=[*images][most_images])
        pictures, count = list[Picture](), 0
        for where, image in images.items():
            pictures.append(self.read(image, where, kwargs))
            count += pictures[-1].num_tokens
            if count > max_model_len:
                raise ContextLengthExceeded(max_model_len=max_model_len, num_requested=1, num_input=count)
        return pictures

    def read(self, given: GivenImage, where: str, kwargs: Kwargs) -> Picture:
        """Read the header of an image file, or encode an object of PIL or numpy as PNG. Raises InvalidRequest.

        `kwargs`: settings of the image processor that replace the engine's, but never for more pixels.
        """
        if not has_extra():
            raise InvalidRequest(f"{where} is an image, for which packages are missing: {INSTALL}", param=where)
        if self._rule is None:
            missing = f"for which the checkpoint of {self._name} has no {IMAGE_PROCESSOR_FILE}"
            raise InvalidRequest(f"{where} is an image, {missing}: add the file, and restart the engine.", param=where)
        from octavo_engine.media.picture import read_size, to_png

        image, limit = given.image, self._settings.max_pixels
        data = image if isinstance(image, bytes) else to_png(image, where, limit)
        size = read_size(data, where, limit)
        kwargs = self._with_detail(given, where, kwargs)
        settings = self._settings.replaced(kwargs)
        rule = self._make_rule(settings) if kwargs else self._rule
        self._check_pixels(rule, self._rule, size, where)
        replacing = json.dumps(kwargs) if kwargs else ""
        grid = rule.grid(*size) if isinstance(rule, PatchGrid) else None
        return Picture(data, rule.num_tokens(*size), rule.text(*size), settings.digest(data), replacing, grid)

    def _with_detail(self, given: GivenImage, where: str, kwargs: Kwargs) -> Kwargs:
        """Return the settings that replace the engine's for one image."""
        family = self._vision.family
        if given.is_low and family not in REPLACEABLE:
            message = f"{where}: detail='low' is not supported for a model of type {family}: leave it out."
            raise InvalidRequest(message, param=where)
        low = REPLACEABLE[family].low(self._settings.replaced(kwargs).image) if given.is_low else {}
        return {**kwargs, **low}

    def _check_pixels(self, rule: ImageTokens, usual_rule: ImageTokens, size: tuple[int, int], where: str) -> None:
        if isinstance(rule, PatchGrid) and max(size) > MAX_RATIO * min(size):
            message = f"{where} has {_shown(size)} pixels; one side is over {MAX_RATIO} times as long as the other"
            raise InvalidRequest(f"{message}; the limit is {MAX_RATIO} times: cut the image.", param=where)
        scaled, usual = rule.scaled_size(*size), usual_rule.scaled_size(*size)
        limit = max(self._settings.max_pixels, MAX_PIXELS)
        if not 1 <= math.prod(scaled) <= limit:
            message = f"{where} has {_shown(size)} pixels, which the model scales to {_shown(scaled)}"
            raise InvalidRequest(f"{message}; the limits are 1 and {limit} pixels: cut the image.", param=where)
        num_tokens, most_tokens = rule.num_tokens(*size), usual_rule.num_tokens(*size)
        if num_tokens > most_tokens or math.prod(scaled) > math.prod(usual):
            message = f"mm_processor_kwargs makes {num_tokens} tokens of {where}, scaled to {_shown(scaled)} pixels"
            remedy = f"the server's settings allow {most_tokens}, of {_shown(usual)}: ask for fewer pixels"
            raise InvalidRequest(f"{message}; {remedy}, or set --mm-processor-kwargs.", param="mm_processor_kwargs")

    def _make_rule(self, settings: ProcessorSettings) -> ImageTokens:
        return make_image_tokens(self._vision.family, self._vision.hf, settings.image, self.token)

    def expand(self, prompt: str | list[int], pictures: Sequence[Picture], where: str) -> str | list[int]:
        """Expand the image placeholders of a text, or among token ids. `where`: the name of the prompt in errors.

        Raises InvalidRequest.
        """
        texts = iter([picture.text for picture in pictures])
        if isinstance(prompt, str):
            first, *others = prompt.split(self.token)
            self._check_count(len(others), pictures, where)
            return first + "".join(next(texts) + piece for piece in others)
        self._check_count(prompt.count(self._token_id), pictures, where)
        expanded: list[int] = []
        for token_id in prompt:
            is_image = token_id == self._token_id
            expanded += self._tokenizer.encode(next(texts), add_special_tokens=False) if is_image else [token_id]
        return expanded

    def find(self, token_ids: Sequence[int], pictures: Sequence[Picture], where: str) -> tuple[ImageInput, ...]:
        """Return the images with their spans. Raises InvalidRequest for an image token of no image."""
        if not pictures:
            self._check_count(token_ids.count(self._token_id), pictures, where)
            return ()
        places = [place for place, token_id in enumerate(token_ids) if token_id == self._token_id]
        if len(places) != sum(picture.num_tokens for picture in pictures):
            self._check_count(len(places), pictures, where)
            raise InvalidRequest(
                f"{where}: the images have {len(places)} tokens, which is not their number.", param=where
            )
        found, start = [], 0
        for picture in pictures:
            first, last = places[start], places[start + picture.num_tokens - 1]
            found.append(
                ImageInput(
                    start=first,
                    length=last + 1 - first,
                    digest=picture.digest,
                    grid=picture.grid,
                    data=picture.data,
                    kwargs=picture.kwargs,
                )
            )
            start += picture.num_tokens
        return tuple(found)

    def _check_count(self, count: int, pictures: Sequence[Picture], where: str) -> None:
        if count != len(pictures):
            problem = (
                f"{where}: the prompt holds the image token {self.token!r} {count} times for {len(pictures)} images"
            )
            raise InvalidRequest(f"{problem}: write it once for each image, and nowhere else.", param=where)


def has_extra() -> bool:
    """Return True if the packages of the extra `vision` are installed."""
    return all(find_spec(name) is not None for name in ("PIL", "transformers"))


def load_image_prompts(
    files: ModelFiles, vision: VisionConfig, tokenizer: TextTokenizer, config: EngineConfig
) -> ImagePrompts:
    """Raises StartupError for a family without a rule for its image tokens."""
    try:
        check_kwargs(config.mm_processor_kwargs, vision.family)
    except InvalidRequest as error:
        raise StartupError(str(error)) from error
    settings = read_processor_settings(files, config.mm_processor_kwargs, config.max_image_pixels)
    return ImagePrompts(vision, settings, tokenizer, files.name)


def _shown(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}"
