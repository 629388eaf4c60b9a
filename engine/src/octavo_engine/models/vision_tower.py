"""`VisionTower`: the part of a model that sees, as transformers has it: encoder of images and projection to embeddings.

transformers builds the whole family with a text part without layers, which is dropped. The weights stay unquantised.
The library is optional: only `registry` imports this module.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
import transformers
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from octavo_engine.layers.layer import BuildContext
from octavo_engine.models.transformers_decoder import without_progress_bar
from octavo_engine.settings.records import VisionConfig
from octavo_engine.sources.model_config import QWEN_FAMILIES
from octavo_engine.wire.errors import StartupError, first_line

#: Keys of a text part without layers; a padding token would have to be one of its few tokens.
_NO_TEXT = {"num_hidden_layers": 0, "vocab_size": 8, "pad_token_id": None, "layer_types": None}
_HEAD = "lm_head.weight"
_TEXT_PARTS = ("language_model", "text_model")
#: Tiles of the largest image that the processor of a family makes; 1 for other families.
_TILES = {"idefics3": 17, "smolvlm": 17}
_QWEN_TOKENS = 16_384  # of the largest image, by the settings of published models


class VisionTower:
    def __init__(self, config: VisionConfig, build: BuildContext) -> None:
        self.config, self.build = config, build
        self._class: Any = getattr(transformers, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[config.family])
        hf = {key: value for key, value in deepcopy(config.hf).items() if key != "quantization_config"}
        text = {key: value for key, value in hf["text_config"].items() if key not in _NO_TEXT}
        hf["text_config"] = {"model_type": "llama"} | text | {k: v for k, v in _NO_TEXT.items() if k != "layer_types"}
        try:
            self._hf = self._class.config_class.from_dict(hf)
            with torch.device("meta"):
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
        """The most memory that the encoding of one image takes, estimated: a layer's tensors of all its patches."""
        vision = self._hf.vision_config
        hidden = getattr(vision, "embed_dim", vision.hidden_size)
        if self.config.family in QWEN_FAMILIES:
            patches = min(self.build.max_model_len, _QWEN_TOKENS) * vision.spatial_merge_size**2
        else:
            patches = (vision.image_size // vision.patch_size) ** 2 * _TILES.get(self.config.family, 1)
        row = 8 * hidden + 2 * getattr(vision, "intermediate_size", 4 * hidden)
        pixels = 3 * vision.patch_size**2
        return int(patches * (row * self.build.dtype.itemsize + pixels * 2 * torch.float32.itemsize))

    def named_shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def load_weights(self, weights: Mapping[str, Any]) -> None:
        """Load the weights, under any name that transformers accepts: a value is a tensor, or `[...]` reads it."""
        text = {name: torch.zeros(shape) for name, shape in self._text_shapes.items()}
        try:
            with without_progress_bar():
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
        """Return the rows of one image, of Qwen3-VL with those that its first layers add, side by side.

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
