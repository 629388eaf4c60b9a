"""Tiny random models that take images, written by transformers, and prompts with images for their engines.

`TinyProcessor` stands where the engine's own image processor does; prompts are token ids, with the image tokens
in place.
"""

import hashlib
import io
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from octavo_engine import LLM
from octavo_engine.devices.device import Device
from octavo_engine.models.model import Model
from octavo_engine.runner.image_encoder import Arrays, ImageEncoder
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.weights.loader import iter_weights
from octavo_engine.wire.records import EngineRequest, ImageInput
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText, PreTrainedModel

from octavo_testing.tiny_models import VOCAB, byte_tokenizer, scramble

IMAGE = VOCAB + 1
QUANTISED_IMAGE = 15  # of a vocabulary of 16 tokens
TEXT = {
    "vocab_size": VOCAB + 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
_TILED = {
    "do_resize": True,
    "size": {"longest_edge": 64},
    "do_image_splitting": True,
    "max_image_size": {"longest_edge": 32},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "rescale_factor": 1 / 255,
}
_CLIP = {
    "size": {"shortest_edge": 32},
    "crop_size": {"height": 32, "width": 32},
    "image_mean": [0.48, 0.46, 0.41],
    "image_std": [0.27, 0.26, 0.28],
    "rescale_factor": 1 / 255,
}


@dataclass(frozen=True, kw_only=True)
class TinyVision:
    family: str
    processor: dict[str, Any]
    text_type: str = "llama"
    config: dict[str, Any]


VISION: dict[str, TinyVision] = {
    "smolvlm": TinyVision(
        family="smolvlm",
        processor={"image_processor_type": "SmolVLMImageProcessor", **_TILED},
        config={"image_token_id": IMAGE, "scale_factor": 2},
    ),
    "idefics3": TinyVision(
        family="idefics3",
        processor={"image_processor_type": "Idefics3ImageProcessor", **_TILED},
        config={"image_token_id": IMAGE, "scale_factor": 2, "tie_word_embeddings": True},
    ),
    "llava": TinyVision(
        family="llava",
        processor={"image_processor_type": "CLIPImageProcessor", **_CLIP},
        config={"image_token_index": IMAGE},
    ),
    "llava_qwen2": TinyVision(
        family="llava",
        processor={"image_processor_type": "CLIPImageProcessor", **_CLIP},
        text_type="qwen2",
        config={"image_token_index": IMAGE, "vision_feature_layer": [-2, -1], "vision_feature_select_strategy": "full"},
    ),
}


def make_tiny_vision(name: str, folder: Path, *, seed: int = 0) -> Path:
    """Write a tiny model with its tokenizer and its image processor under `folder`; return the model's folder."""
    path = folder / name
    if not path.exists():
        tiny_vision_model(name, seed=seed).save_pretrained(path)
        tokenizer = byte_tokenizer()
        tokenizer.add_special_tokens(["<row>", "<image>"])
        tokenizer.save(str(path / "tokenizer.json"))
        (path / "preprocessor_config.json").write_text(json.dumps(VISION[name].processor))
    return path


def tiny_vision_model(name: str, *, seed: int = 0) -> PreTrainedModel:
    tiny = VISION[name]
    tower = dict(_TOWER)
    if tiny.family == "llava":
        tower |= {"model_type": "clip_vision_model", "projection_dim": 32}
    text = {"model_type": tiny.text_type, **TEXT}
    text["tie_word_embeddings"] = tiny.config.get("tie_word_embeddings", False)
    config = AutoConfig.for_model(tiny.family, text_config=text, vision_config=tower, **tiny.config)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval().float()
    scramble(model, seed)
    return model


def make_quantised_llava(text: Path, folder: Path) -> Path:
    """Write a LLaVA with the quantised text part of the checkpoint `text`, and `folder/expanded`, without blocks.

    The vocabulary is small; its last token is that of images.
    """
    hf = json.loads((text / "config.json").read_text())
    settings = hf.pop("quantization_config")
    clip = {**_TOWER, "model_type": "clip_vision_model", "projection_dim": 32}
    config = AutoConfig.for_model("llava", text_config=hf, vision_config=clip, image_token_index=QUANTISED_IMAGE)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval().float()
    scramble(model, seed=0)
    expanded = {name: tensor.float() for name, tensor in iter_weights(resolve_model(str(text)), dtype=torch.float32)}
    state = {f"model.language_model.{name.removeprefix('model.')}": tensor for name, tensor in expanded.items()}
    report = model.load_state_dict(state, strict=False)
    assert not report.unexpected_keys
    assert not any("language_model" in name for name in report.missing_keys)
    model.tie_weights()
    model.save_pretrained(folder / "expanded")
    (folder / "expanded" / "preprocessor_config.json").write_text(json.dumps(VISION["llava"].processor))
    (folder / "quantised").mkdir()
    tower = load_file(folder / "expanded" / "model.safetensors")
    tensors = {name: tensor for name, tensor in tower.items() if not name.startswith(("language_model", "lm_head"))}
    tensors |= {f"language_model.{name}": tensor for name, tensor in load_file(text / "model.safetensors").items()}
    save_file(tensors, folder / "quantised" / "model.safetensors")
    nested = json.loads((folder / "expanded" / "config.json").read_text()) | {"quantization_config": settings}
    (folder / "quantised" / "config.json").write_text(json.dumps(nested))
    shutil.copy(folder / "expanded" / "preprocessor_config.json", folder / "quantised")
    byte_tokenizer().save(str(folder / "quantised" / "tokenizer.json"))
    return folder / "quantised"


def picture(number: int, *, width: int = 48, height: int = 32) -> bytes:
    """Return a PNG of coarse noise."""
    drawn = np.random.default_rng(number).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    image = Image.fromarray(drawn).resize((width, height), Image.Resampling.BILINEAR)
    data = io.BytesIO()
    image.save(data, format="PNG")
    return data.getvalue()


class TinyProcessor:
    """`keys`: of the arrays that the family's tower takes."""

    keys = ("pixel_values", "pixel_attention_mask")

    def __init__(self, folder: Path) -> None:
        self._processor = AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True)
        self.mean, self.std = self._processor.image_mean, self._processor.image_std
        self.rescale_factor = self._processor.rescale_factor

    def process(self, data: bytes) -> Arrays:
        try:
            image = Image.open(io.BytesIO(data)).convert("RGB")
        except OSError as error:
            raise ValueError("it is no picture") from error
        arrays = self._call(image, do_rescale=False, do_normalize=False)
        return {name: np.asarray(arrays[name]) for name in self.keys if name in arrays}

    def reference(self, data: bytes) -> dict[str, torch.Tensor]:
        """Return the arrays that transformers' model takes, normalised."""
        arrays = self._call(Image.open(io.BytesIO(data)).convert("RGB"))
        return {name: torch.from_numpy(np.asarray(arrays[name])) for name in self.keys if name in arrays}

    def _call(self, image: Image.Image, **options: Any) -> Any:
        return self._processor(images=image, return_tensors="np", **options)


def image_tokens(num_rows: int, image_token_id: int, *, row: int = 4) -> list[int]:
    """Return the tokens of an image with `num_rows` rows, and a token of another kind after each few of them."""
    parts = ([image_token_id] * min(row, num_rows - at) for at in range(0, num_rows, row))
    return [token for part in parts for token in (*part, image_token_id - 1)]


def image_input(start: int, tokens: list[int], data: bytes) -> ImageInput:
    return ImageInput(start=start, length=len(tokens), digest=hashlib.sha256(data).digest(), data=data)


@contextmanager
def tiny_processors() -> Iterator[None]:
    """Let engines start with `TinyProcessor`."""

    def load(device: Device, files: ModelFiles, model: Model) -> ImageEncoder:
        assert model.config.vision is not None
        return ImageEncoder(TinyProcessor(files.root), model.config.vision.image_token_id, device)

    with patch("octavo_engine.runner.model_loading.load_images", load):
        yield


class Album:
    """Prompts with images for one engine, which recognises them by their tokens, also where beams have grown."""

    def __init__(self, folder: Path, *, image_token_id: int = IMAGE) -> None:
        self._image_token_id = image_token_id
        self.processor = TinyProcessor(folder)
        self.model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
        self._images: dict[tuple[int, ...], tuple[ImageInput, ...]] = {}

    def num_rows(self, data: bytes) -> int:
        with torch.inference_mode():
            features = self.model.get_image_features(**self.processor.reference(data)).pooler_output
        return sum(len(part.flatten(0, -2)) for part in features)

    def prompt(self, *parts: list[int] | bytes) -> list[int]:
        """Return the tokens of a prompt of texts, as token ids, and images."""
        token_ids, images = list[int](), list[ImageInput]()
        for part in parts:
            tokens = image_tokens(self.num_rows(part), self._image_token_id) if isinstance(part, bytes) else part
            if isinstance(part, bytes):
                images.append(image_input(len(token_ids), tokens, part))
            token_ids += tokens
        self._images[tuple(token_ids)] = tuple(images)
        return token_ids

    def images(self, token_ids: list[int]) -> tuple[ImageInput, ...]:
        known = [prompt for prompt in self._images if tuple(token_ids[: len(prompt)]) == prompt]
        return self._images[max(known, key=len)] if known else ()

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """Return the logits [tokens, vocab] of transformers."""
        images = [self.processor.reference(image.data) for image in self.images(token_ids)]
        inputs: dict[str, torch.Tensor] = {}
        if images and images[0]["pixel_values"].dim() == 5:  # [1, tiles, ...]: one prompt has all tiles
            inputs = {name: torch.cat([image[name] for image in images], 1) for name in images[0]}
        elif images:
            inputs = {name: torch.cat([image[name] for image in images]) for name in images[0]}
        with torch.inference_mode():
            return self.model(input_ids=torch.tensor([token_ids]), **inputs).logits[0]

    def attach(self, llm: LLM) -> None:
        """Give the requests of an engine the images of their prompts."""
        add = llm._core.add

        def add_with_images(request: EngineRequest) -> None:
            add(replace(request, images=self.images(request.prompt_token_ids)))

        llm._core.add = add_with_images  # type: ignore[method-assign]
