"""`VisionTower`: the image encoder and its projection to embeddings, run by transformers.

transformers builds a whole model of the family, with a text part that has no layers and is dropped. Weights are not
quantised. transformers is optional: only `registry` imports this module.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
import transformers
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from transformers.utils import logging as hf_logging

from octavo_engine.layers.layer import BuildContext
from octavo_engine.models.transformers_support import bounded_modules
from octavo_engine.settings.records import VisionConfig
from octavo_engine.wire.errors import StartupError, first_line

#: Settings of a text part without layers. Its vocabulary has 8 tokens and no special tokens.
_NO_TEXT = {"num_hidden_layers": 0, "vocab_size": 8, "layer_types": None} | dict.fromkeys(
    ("bos_token_id", "eos_token_id", "pad_token_id")
)
_HEAD = "lm_head.weight"
_TEXT_PARTS = ("language_model", "text_model")


class VisionTower:
    def __init__(self, config: VisionConfig, build: BuildContext) -> None:
        self.config, self.build = config, build
        self._class: Any = getattr(transformers, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[config.family])
        hf = {key: value for key, value in deepcopy(config.hf).items() if key != "quantization_config"}
        text = {key: value for key, value in hf["text_config"].items() if key not in _NO_TEXT}
        hf["text_config"] = text | {k: v for k, v in _NO_TEXT.items() if k != "layer_types"}
        try:
            self._hf = self._class.config_class.from_dict(hf)
            with torch.device("meta"), bounded_modules():
                whole = self._class._from_config(self._hf, dtype=build.dtype)
        except Exception as error:
            raise StartupError(f"transformers cannot build the vision tower: {first_line(error)}") from error
        shapes = {name: tuple(tensor.shape) for name, tensor in whole.state_dict().items()}
        self._model = _without_text(whole)
        kept = whole.state_dict()
        self._shapes = {name: shape for name, shape in shapes.items() if name in kept and name != _HEAD}
        self._text_shapes = {name: shape for name, shape in shapes.items() if name not in self._shapes}

    @property
    def weights_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self._model.parameters(), *self._model.buffers()))

    @property
    def activation_bytes(self) -> int:
        """Estimated peak memory for encoding one image: its pixels, twice, and the activations of one layer.

        A layer's activations are four tensors of the hidden size, and four more of attention or two of the MLP.
        """
        vision = self._hf.vision_config
        num_tokens = min(self.config.most_tokens, self.build.max_model_len)
        edge = vision.patch_size if isinstance(vision.patch_size, int) else max(vision.patch_size)
        hidden = getattr(vision, "embed_dim", vision.hidden_size)
        row = 4 * hidden + max(4 * hidden, 2 * getattr(vision, "intermediate_size", 4 * hidden))
        pixels = 2 * 3 * edge**2 * getattr(vision, "temporal_patch_size", 1)
        num_patches = num_tokens * self._patches_per_token
        row += num_patches if vision.model_type == "pixtral" else 0  # its attention mask
        return int(num_patches * (row * self.build.dtype.itemsize + pixels * torch.float32.itemsize))

    @property
    def row_bytes(self) -> int:
        num_parts = 1 + len(getattr(self._hf.vision_config, "deepstack_visual_indexes", None) or ())
        return int(num_parts * self._hf.text_config.hidden_size * self.build.dtype.itemsize)

    @property
    def _patches_per_token(self) -> float:
        """Number of patches that are merged into a token: the square of a factor whose name depends on the family."""
        names = ("scale_factor", "spatial_merge_size", "downsample_ratio")
        found = [value for part in (self._hf, self._hf.vision_config) for n in names if (value := getattr(part, n, 0))]
        return max(found[0], 1 / found[0]) ** 2 if found else 1.0

    def named_shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def load_weights(self, weights: Mapping[str, Any]) -> None:
        """Load the weights, named in any way that transformers accepts. A value is a tensor, or is read by `[...]`."""
        text = {name: torch.zeros(shape) for name, shape in self._text_shapes.items()}
        try:
            with _without_progress_bar():
                loaded: Any = self._class.from_pretrained(
                    None,
                    config=self._hf,
                    state_dict={**text, **weights},
                    dtype=self.build.dtype,
                    ignore_mismatched_sizes=True,
                    output_loading_info=True,
                )
        except (RuntimeError, ValueError) as error:
            raise StartupError(f"transformers cannot load the vision tower: {first_line(error)}") from error
        model, report = loaded
        for name, shape, expected in sorted(report["mismatched_keys"]):
            raise StartupError(f"tensor '{name}' has shape {tuple(shape)}, the model needs {tuple(expected)}.")
        for kind in ("missing", "unexpected"):
            if names := report[f"{kind}_keys"]:
                raise StartupError(f"{kind} tensor '{min(names)}' of the vision tower: check that all files are there.")
        self._model = _without_text(model).to(self.build.device).eval()

    def encode(self, inputs: Mapping[str, Tensor]) -> Float[Tensor, "rows hidden"]:
        """Return the rows of one image; for Qwen3-VL, rows that its first layers add are concatenated to them.

        `inputs`: the arguments of transformers' `get_image_features`.
        """
        found: Any = self._model.get_image_features(**inputs)
        features = (found.pooler_output, *(getattr(found, "deepstack_features", None) or ()))
        return torch.cat([torch.cat([part.flatten(0, -2) for part in feature]) for feature in features], 1)


def _without_text(model: PreTrainedModel) -> Any:
    base: Any = model.base_model
    for name in _TEXT_PARTS:
        if hasattr(base, name):
            setattr(base, name, None)
    return base


@contextmanager
def _without_progress_bar() -> Iterator[None]:
    """Hide the progress bar of transformers, as the caller shows its own."""
    is_shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if is_shown:
            hf_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
