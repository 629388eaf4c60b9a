"""`ImageProcessor`: turns the file of an image into the arrays that the vision tower takes.

transformers' image processors crop and scale the image; they need neither torch nor torchvision. Pixels stay uint8, a
quarter of the memory of fp32; the model process normalises them by `rescale_factor`, `mean` and `std`.
"""

import json
from copy import deepcopy
from typing import Any

import numpy as np
from transformers import AutoImageProcessor

from octavo_engine.media.picture import decode
from octavo_engine.media.placeholders import MAX_PIXELS, processor_options
from octavo_engine.media.processor_settings import Kwargs, ProcessorSettings, read_processor_settings
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.wire.errors import StartupError, first_line

_PIXELS = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}


class ImageProcessor:
    """Normalised pixels are `(pixels * rescale_factor - mean) / std`, by channel."""

    def __init__(self, files: ModelFiles, settings: ProcessorSettings, kwargs: Kwargs) -> None:
        auto: Any = AutoImageProcessor
        given = deepcopy(dict(kwargs))  # transformers changes it
        try:
            self._processor = auto.from_pretrained(str(files.root), backend="pil", local_files_only=True, **given)
        except Exception as error:
            message = f"{files.root}: transformers cannot make its image processor: {first_line(error)}"
            raise StartupError(f"{message}: correct preprocessor_config.json.") from error
        self._max_pixels = settings.max_pixels
        self._options = processor_options(str(files.config.get("model_type")), files.config)
        has_scale, has_norm = bool(self._processor.do_rescale), bool(self._processor.do_normalize)
        self.rescale_factor = float(self._processor.rescale_factor) if has_scale else 1.0
        self.mean = tuple(map(float, self._processor.image_mean)) if has_norm else (0.0, 0.0, 0.0)
        self.std = tuple(map(float, self._processor.image_std)) if has_norm else (1.0, 1.0, 1.0)

    def process(self, data: bytes, where: str = "image", kwargs: str = "") -> dict[str, np.ndarray]:
        """Return the keywords of `get_image_features` for one image. Raises InvalidRequest.

        `pixel_values` has uint8. A mask that hides nothing is omitted. A patch of Qwen-VL is one flat row in
        transformers; here, channels are a dimension of their own. `kwargs`: JSON of settings that replace the
        processor's; "" if there are none.
        """
        arrays = self._processor.preprocess(
            decode(data, where, self._max_pixels),
            do_rescale=False,
            do_normalize=False,
            input_data_format="channels_last",  # an image of 3 x n pixels is ambiguous otherwise
            return_tensors="np",
            **self._options,
            **self._call_keywords(json.loads(kwargs) if kwargs else {}),
        )
        if "image_grid_thw" in arrays:
            shape = (len(arrays["pixel_values"]), 3, -1, self._processor.patch_size)
            arrays["pixel_values"] = arrays["pixel_values"].astype(np.uint8).reshape(shape)
        arrays.pop("num_patches", None)  # of InternVL, whose processor alone reads it
        return {
            name: array.astype(bool) if name.endswith("_mask") else array
            for name, array in arrays.items()
            if not name.endswith("_mask") or not array.all()
        }

    def _call_keywords(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the settings as transformers takes them for one call: `size` then has the pixel limits."""
        limits = {edge: kwargs.pop(name) for name, edge in _PIXELS.items() if name in kwargs}
        if limits:
            size = {edge: getattr(self._processor.size, edge) for edge in _PIXELS.values()}
            kwargs["size"] = size | limits
        return kwargs


def load_processor(
    files: ModelFiles, kwargs: Kwargs | None = None, max_pixels: int = MAX_PIXELS
) -> ImageProcessor | None:
    """Load the processor; `kwargs` replace its settings. Return None if no file has them.

    Raises StartupError, which names the file.
    """
    settings = read_processor_settings(files, kwargs, max_pixels)
    return ImageProcessor(files, settings, kwargs or {}) if settings.image else None
