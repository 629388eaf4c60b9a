"""`ImagePrompts`: puts the tokens of images into a prompt, and finds them among its token ids.

A prompt has one image token for each image. It is expanded as text, before the text is tokenised, since a tokenizer may
join characters at the edges; of a prompt that is given as ids, each image token is replaced.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

from octavo_engine.media.placeholders import MAX_PIXELS, MAX_RATIO, ImageTokens, PatchGrid, make_image_tokens
from octavo_engine.media.processor_settings import IMAGE_PROCESSOR_FILE, ProcessorSettings, read_processor_settings
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
    """The file of an image, and what it becomes in a prompt: a text that holds the image token `num_tokens` times.

    `grid`: as of `ImageSpan`.
    """

    data: bytes
    num_tokens: int
    text: str
    grid: tuple[int, int] | None = None


class ImagePrompts:
    """`token`: the text of the image token. `rule`: None for a checkpoint without settings of its image processor."""

    def __init__(
        self, rule: ImageTokens | None, settings: ProcessorSettings, tokenizer: TextTokenizer, token_id: int, name: str
    ) -> None:
        self.token = tokenizer.piece(token_id)
        if not self.token or tokenizer.encode(self.token, add_special_tokens=False) != [token_id]:
            problem = f"the tokenizer does not encode its image token {self.token!r} as {token_id}"
            raise StartupError(f"{name}: {problem}, which config.json names: use the tokenizer of this model.")
        self._rule, self._settings, self._tokenizer, self._token_id = rule, settings, tokenizer, token_id
        self._name = name
        if not has_extra():
            logger.warning("%s takes only text, as the packages for images are not installed: %s", name, INSTALL)
        if rule is None:
            logger.warning("%s takes only text, as its checkpoint has no %s", name, IMAGE_PROCESSOR_FILE)

    def read(self, image: object, where: str) -> Picture:
        """Read the header of an image file, or encode an object of PIL or numpy. Raises InvalidRequest."""
        if not has_extra():
            raise InvalidRequest(f"{where} is an image, for which packages are missing: {INSTALL}", param=where)
        if self._rule is None:
            missing = f"for which the checkpoint of {self._name} has no {IMAGE_PROCESSOR_FILE}"
            raise InvalidRequest(f"{where} is an image, {missing}: add the file, and restart the engine.", param=where)
        from octavo_engine.media.picture import read_size, to_png

        data = image if isinstance(image, bytes) else to_png(image, where)
        width, height = read_size(data, where)
        has_grid = isinstance(self._rule, PatchGrid)
        if has_grid and max(width, height) > MAX_RATIO * min(width, height):
            message = f"{where} has {width} x {height} pixels, of which one side is over {MAX_RATIO} times the other"
            raise InvalidRequest(f"{message}; the limit is {MAX_RATIO} times: cut the image.", param=where)
        wide, high = self._rule.scaled_size(width, height)
        if wide * high > MAX_PIXELS:
            message = f"{where} has {width} x {height} pixels, which the model scales to {wide} x {high}"
            raise InvalidRequest(f"{message}; the limit is {MAX_PIXELS} pixels: cut the image.", param=where)
        grid = self._rule.grid(width, height) if isinstance(self._rule, PatchGrid) else None
        return Picture(data, self._rule.num_tokens(width, height), self._rule.text(width, height), grid)

    def expand(
        self, prompt: str | list[int], pictures: Sequence[Picture], where: str, max_tokens: int
    ) -> str | list[int]:
        """Replace the image tokens of a text, or among token ids. `where`: the name of the prompt in errors.

        Raises InvalidRequest, as ContextLengthExceeded before an image is decoded.
        """
        if (count := sum(picture.num_tokens for picture in pictures)) > max_tokens:
            raise ContextLengthExceeded(max_model_len=max_tokens, num_requested=1, num_input=count)
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
            digest = self._settings.digest(picture.data)
            length, grid = last + 1 - first, picture.grid
            found.append(ImageInput(start=first, length=length, digest=digest, grid=grid, data=picture.data))
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


def load_image_prompts(files: ModelFiles, vision: VisionConfig, tokenizer: TextTokenizer) -> ImagePrompts:
    """Raises StartupError for a family without a rule for its image tokens."""
    settings, token = read_processor_settings(files), tokenizer.piece(vision.image_token_id)
    rule = make_image_tokens(vision.family, vision.hf, settings.image, token) if settings.image else None
    return ImagePrompts(rule, settings, tokenizer, vision.image_token_id, files.name)
