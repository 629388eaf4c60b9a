"""Tiny random models that take images, written by transformers, and their answers to compare an engine's with."""

import io
import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from octavo_engine.media.placeholders import processor_options
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.weights.loader import iter_weights
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText, PreTrainedModel

from octavo_testing.tiny_models import VOCAB, scramble
from octavo_testing.vision_checkpoints import (
    VISION,
    VisionFiles,
    small_vision_tokenizer,
    vision_tokenizer,
    write_vision_files,
)

IMAGE = VOCAB
QUANTISED_IMAGE = 15  # of a vocabulary of 16 tokens
TEXT = {
    "vocab_size": vision_tokenizer().get_vocab_size(),
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
_TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


def _with_tower(name: str, **keys: Any) -> VisionFiles:
    files = VISION[name]
    return replace(files, hf=files.hf | {"vision_config": files.hf["vision_config"] | keys})


def _with_image(name: str, **settings: Any) -> VisionFiles:
    return replace(VISION[name], image=VISION[name].image | settings)


#: By name: the files, and keys of the text part. One has a tied head, one another text part and several tower layers.
TINY_VISION: dict[str, tuple[VisionFiles, dict[str, Any]]] = {
    "smolvlm": (
        _with_image("smolvlm", size={"longest_edge": 64}),
        {"model_type": "llama"},
    ),
    "idefics3": (VISION["idefics3"], {"model_type": "llama", "tie_word_embeddings": True}),
    "llava": (VISION["llava"], {"model_type": "llama"}),
    "llava_qwen2": (
        replace(VISION["llava_full"], hf=VISION["llava_full"].hf | {"vision_feature_layer": [-2, -1]}),
        {"model_type": "qwen2"},
    ),
    "qwen2_vl": (
        _with_tower("qwen2_vl", hidden_size=64, embed_dim=32, mlp_ratio=2),
        {"rope_parameters": {"rope_theta": 300.0, "mrope_section": [2, 3, 3]}},
    ),
    "qwen2_5_vl": (
        _with_tower("qwen2_5_vl", num_hidden_layers=3, out_hidden_size=64, window_size=18, fullatt_block_indexes=[1]),
        {"rope_parameters": {"rope_theta": 300.0, "mrope_section": [4, 3, 1]}, "tie_word_embeddings": True},
    ),
    "qwen3_vl": (
        _with_tower(
            "qwen3_vl",
            num_hidden_layers=3,
            out_hidden_size=64,
            num_position_embeddings=16,
            deepstack_visual_indexes=[0, 2],
        ),
        {"head_dim": 24, "rope_parameters": {"rope_theta": 300.0, "mrope_section": [6, 3, 3]}},
    ),
    "pixtral": (_with_image("pixtral", size={"longest_edge": 40}), {"model_type": "mistral", "sliding_window": None}),
    "mistral3": (
        _with_image("mistral3", size={"longest_edge": 40}),
        {"model_type": "mistral", "sliding_window": 24, "tie_word_embeddings": True},
    ),
    "internvl": (_with_image("internvl", max_patches=5), {"model_type": "qwen3", "head_dim": 16}),
}
#: Arrays that a tower takes.
_ARRAYS = ("pixel_values", "pixel_attention_mask", "image_sizes", "image_grid_thw")


def make_tiny_vision(name: str, folder: Path, *, seed: int = 0) -> Path:
    """Write a tiny model with its tokenizer and its image processor under `folder`; return the model's folder."""
    path, (files, text) = folder / name, TINY_VISION[name]
    if not path.exists():
        _make_model(files, TEXT | text, IMAGE, seed=seed).save_pretrained(path)
        write_vision_files(path, files)
    return path


def _make_model(files: VisionFiles, text: dict[str, Any], image_token_id: int, *, seed: int = 0) -> PreTrainedModel:
    hf = files.hf | {"vision_config": _TOWER | files.hf["vision_config"], "text_config": text}
    if hf["vision_config"].get("model_type") == "clip_vision_model":
        hf["vision_config"] |= {"projection_dim": 32}
    hf |= {"image_token_index" if files.family in ("llava", "mistral3") else "image_token_id": image_token_id}
    hf["tie_word_embeddings"] = text.get("tie_word_embeddings", False)
    config = AutoConfig.for_model(hf.pop("model_type", files.family), **hf)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval().float()
    scramble(model, seed)
    with torch.no_grad():  # the model does not answer with an image token, which transformers would take for an image
        model.get_output_embeddings().weight[image_token_id] = 0
    return model


def make_quantised_vision(name: str, text: Path, folder: Path) -> Path:
    """Write a model with the quantised text part of the checkpoint `text`, and `folder/expanded`, without blocks.

    The vocabulary is small; its last token is that of images.
    """
    files, hf = VISION[name], json.loads((text / "config.json").read_text())
    settings = hf.pop("quantization_config")
    model = _make_model(files, hf, QUANTISED_IMAGE)
    expanded = {name: tensor.float() for name, tensor in iter_weights(resolve_model(str(text)), dtype=torch.float32)}
    state = {f"model.language_model.{name.removeprefix('model.')}": tensor for name, tensor in expanded.items()}
    report = model.load_state_dict(state, strict=False)
    assert not report.unexpected_keys
    assert not any("language_model" in name for name in report.missing_keys)
    model.tie_weights()
    model.save_pretrained(folder / "expanded")
    (folder / "expanded" / "preprocessor_config.json").write_text(json.dumps(files.image))
    (folder / "quantised").mkdir()
    dense = load_file(folder / "expanded" / "model.safetensors")
    tensors = {name: tensor for name, tensor in dense.items() if not name.startswith(("language_model", "lm_head"))}
    tensors |= {f"language_model.{name}": tensor for name, tensor in load_file(text / "model.safetensors").items()}
    save_file(tensors, folder / "quantised" / "model.safetensors")
    nested = json.loads((folder / "expanded" / "config.json").read_text()) | {"quantization_config": settings}
    (folder / "quantised" / "config.json").write_text(json.dumps(nested))
    shutil.copy(folder / "expanded" / "preprocessor_config.json", folder / "quantised")
    small_vision_tokenizer(QUANTISED_IMAGE + 1).save(str(folder / "quantised" / "tokenizer.json"))
    return folder / "quantised"


def picture(number: int, *, width: int = 48, height: int = 32) -> bytes:
    """Return a PNG of coarse noise."""
    drawn = np.random.default_rng(number).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    image = Image.fromarray(drawn).resize((width, height), Image.Resampling.BILINEAR)
    data = io.BytesIO()
    image.save(data, format="PNG")
    return data.getvalue()


@dataclass(frozen=True)
class ImagePrompt:
    """Token ids with one image token for each image, as `LLM.generate` takes them."""

    token_ids: list[int]
    images: list[bytes]

    @property
    def request(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.token_ids, "multi_modal_data": {"image": self.images}}


def image_prompt(*parts: list[int] | bytes, image_token_id: int = IMAGE) -> ImagePrompt:
    """Make a prompt of texts, as token ids, and images."""
    token_ids = [token for part in parts for token in ([image_token_id] if isinstance(part, bytes) else part)]
    return ImagePrompt(token_ids, [part for part in parts if isinstance(part, bytes)])


class Reference:
    """The model and its image processor in transformers."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
        self._processor = AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True)
        self._options = processor_options(
            self.model.config.model_type, json.loads((folder / "config.json").read_text())
        )

    def arrays(self, *images: bytes) -> dict[str, torch.Tensor]:
        """Return the arrays of a prompt's images, which transformers pads to one size."""
        opened = [Image.open(io.BytesIO(data)) for data in images]
        arrays = self._processor(images=[opened], return_tensors="np", **self._options)
        return {name: torch.from_numpy(np.asarray(arrays[name])) for name in _ARRAYS if name in arrays}

    def logits(self, token_ids: list[int], images: list[bytes]) -> torch.Tensor:
        """Return the logits [tokens, vocab] of a prompt whose image tokens are expanded."""
        inputs = self.arrays(*images) if images else {}
        if "image_grid_thw" in inputs:
            inputs["position_ids"] = self._positions(token_ids, inputs["image_grid_thw"])
        with torch.inference_mode():
            logits: torch.Tensor = self.model(input_ids=torch.tensor([token_ids]), **inputs).logits[0]
        return logits

    def _positions(self, token_ids: list[int], grids: torch.Tensor) -> torch.Tensor:
        """Return the positions [3, 1, tokens] of Qwen-VL.

        transformers takes two images without a token between them for one: tokens are inserted, and removed again.
        """
        merged = self.model.config.vision_config.spatial_merge_size**2
        ends, kinds, kept = iter((grids.prod(-1) // merged).tolist()), list[int](), list[int]()
        left = 0
        for token_id in token_ids:
            is_image = token_id == self.model.config.image_token_id
            if is_image and not left:
                kinds.append(0)
                left = next(ends)
            left -= is_image
            kept.append(len(kinds))
            kinds.append(int(is_image))
        types = torch.tensor([kinds])
        positions, _ = self.model.model.get_rope_index(types, mm_token_type_ids=types, image_grid_thw=grids)
        inserted = torch.tensor(kept) - torch.arange(len(kept))
        shifted: torch.Tensor = positions[:, :, kept] - inserted
        return shifted
