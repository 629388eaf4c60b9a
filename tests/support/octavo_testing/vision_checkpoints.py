"""Files of tiny checkpoints that decide how an image becomes tokens: of image processor, tokenizer and template."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo_engine.settings.records import VisionConfig
from octavo_engine.sources.model_files import ModelFiles
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE

from octavo_testing.tiny_models import byte_tokenizer

IMAGE = "<image>"
_MARKS = ("<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
_MORE_MARKS = ("[IMG_BREAK]", "[IMG_END]", "<img>", "</img>")

#: Chat templates of published checkpoints: SmolVLM's, LLaVA 1.5's and Qwen2-VL's, without its videos, take parts.
SMOLVLM_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
LLAVA_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': '}}{% endif %}"
    "{# Render all images first #}{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}"
    "{{ '<image>\n' }}{% endfor %}{# Render all text next #}{% if message['role'] != 'assistant' %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' '}}"
    "{% endfor %}{% else %}{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% generation %}{{ content['text'] + ' '}}{% endgeneration %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
QWEN_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system\n"
    "You are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n{% else %}"
    "{% for content in message['content'] %}{% if content['type'] == 'image' or 'image' in content or 'image_url' in "
    "content %}<|vision_start|><image><|vision_end|>{% elif 'text' in content %}{{ content['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRING_TEMPLATE = (
    "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class VisionFiles:
    """`hf`: the keys of config.json that decide about images; `image`: those of the image processor."""

    family: str
    hf: dict[str, Any]
    image: dict[str, Any]
    template: str


_HALVES = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "rescale_factor": 1 / 255}
_TILES: dict[str, Any] = {"do_resize": True, "do_pad": True, "do_image_splitting": True, "resample": 1, **_HALVES}
_GRID: dict[str, Any] = {"merge_size": 2, "temporal_patch_size": 2, "resample": 3}
VISION: dict[str, VisionFiles] = {
    "smolvlm": VisionFiles(
        family="smolvlm",
        hf={"vision_config": {"image_size": 32, "patch_size": 8}, "scale_factor": 2},
        image={
            **_TILES,
            "image_processor_type": "SmolVLMImageProcessor",
            "max_image_size": {"longest_edge": 32},
            "size": {"longest_edge": 128},
        },
        template=SMOLVLM_TEMPLATE,
    ),
    "smolvlm_whole": VisionFiles(
        family="smolvlm",
        hf={"vision_config": {"image_size": 32, "patch_size": 4}, "scale_factor": 4},
        image={
            **_TILES,
            "image_processor_type": "SmolVLMImageProcessorFast",
            "max_image_size": {"longest_edge": 32},
            "size": {"longest_edge": 64},
            "do_image_splitting": False,
        },
        template=SMOLVLM_TEMPLATE,
    ),
    "idefics3": VisionFiles(
        family="idefics3",
        hf={"vision_config": {"image_size": 28, "patch_size": 14}, "scale_factor": 2},
        image={
            **_TILES,
            "image_processor_type": "Idefics3ImageProcessor",
            "max_image_size": {"longest_edge": 28},
            "size": {"longest_edge": 84},
        },
        template=SMOLVLM_TEMPLATE,
    ),
    "llava": VisionFiles(
        family="llava",
        hf={"vision_config": {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 7}},
        image={"image_processor_type": "CLIPImageProcessor", "crop_size": 28, "size": {"shortest_edge": 28}},
        template=LLAVA_TEMPLATE,
    ),
    "llava_full": VisionFiles(
        family="llava",
        hf={
            "vision_config": {"model_type": "clip_vision_model", "image_size": 32, "patch_size": 8},
            "vision_feature_select_strategy": "full",
        },
        image={
            "image_processor_type": "LlavaImageProcessorFast",
            "crop_size": {"height": 32, "width": 32},
            "size": 40,
            "do_pad": True,
        },
        template=STRING_TEMPLATE,
    ),
    "qwen2_vl": VisionFiles(
        family="qwen2_vl",
        hf={"model_type": "qwen2_vl", "vision_config": {"patch_size": 4, "spatial_merge_size": 2}},
        image={
            **_GRID,
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": 4,
            "min_pixels": 500,
            "max_pixels": 3000,
        },
        template=QWEN_TEMPLATE,
    ),
    "qwen2_5_vl": VisionFiles(
        family="qwen2_5_vl",
        hf={"model_type": "qwen2_5_vl", "vision_config": {"patch_size": 3, "spatial_merge_size": 3}},
        image={
            **_GRID,
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": 3,
            "merge_size": 3,
            "min_pixels": 400,
            "max_pixels": 4000,
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
        },
        template=QWEN_TEMPLATE,
    ),
    "qwen3_vl": VisionFiles(
        family="qwen3_vl",
        hf={"model_type": "qwen3_vl", "vision_config": {"patch_size": 4, "spatial_merge_size": 2}},
        image={
            **_GRID,
            **_HALVES,
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "patch_size": 4,
            "size": {"shortest_edge": 600, "longest_edge": 3500},
        },
        template=QWEN_TEMPLATE,
    ),
    "pixtral": VisionFiles(
        family="llava",
        hf={
            "vision_config": {"model_type": "pixtral", "image_size": 256, "patch_size": 8},
            "vision_feature_select_strategy": "full",
            "vision_feature_layer": -1,
        },
        image={
            **_HALVES,
            "image_processor_type": "PixtralImageProcessor",
            "patch_size": {"height": 8, "width": 8},
            "size": {"longest_edge": 256},
        },
        template=LLAVA_TEMPLATE,
    ),
    "mistral3": VisionFiles(
        family="mistral3",
        hf={"vision_config": {"model_type": "pixtral", "image_size": 256, "patch_size": 4}, "spatial_merge_size": 2},
        image={
            **_HALVES,
            "image_processor_type": "PixtralImageProcessorFast",
            "patch_size": {"height": 4, "width": 4},  # as published, but the processor uses merged patches
            "size": {"longest_edge": 256},
        },
        template=LLAVA_TEMPLATE,
    ),
    "internvl": VisionFiles(
        family="internvl",
        hf={"vision_config": {"image_size": [28, 28], "patch_size": [7, 7]}},
        image={
            **_HALVES,
            "image_processor_type": "GotOcr2ImageProcessorFast",
            "size": {"height": 28, "width": 28},
            "crop_to_patches": False,  # as published, but the processor cuts
        },
        template=LLAVA_TEMPLATE,
    ),
}


def vision_tokenizer(rows: int = 4) -> Tokenizer:
    """Return a tokenizer of bytes with the tokens of images; the token of an image is the first after the bytes."""
    tokenizer = byte_tokenizer()
    places = [f"<row_{row}_col_{column}>" for row in range(1, rows + 1) for column in range(1, rows + 1)]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (IMAGE, *_MARKS)])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in places])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _MORE_MARKS])
    return tokenizer


def small_vision_tokenizer(size: int) -> Tokenizer:
    """Return a tokenizer of `size` tokens, the last of which are the marks of Pixtral and InternVL, and the image's."""
    marks, kept = (*_MORE_MARKS, IMAGE), size - len(_MORE_MARKS) - 1
    tokens = [*map(byte_tokenizer().id_to_token, range(kept)), *marks]
    tokenizer = Tokenizer(BPE(vocab={token: token_id for token_id, token in enumerate(tokens)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in marks])
    return tokenizer


def write_vision_files(folder: Path, files: VisionFiles, *, nested: bool = False) -> Path:
    """Write tokenizer, chat template and image processor. `nested`: the last as newer versions of transformers do."""
    folder.mkdir(parents=True, exist_ok=True)
    vision_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(files.template, encoding="utf-8")
    name, content = (
        ("processor_config.json", {"image_processor": files.image})
        if nested
        else (
            "preprocessor_config.json",
            files.image,
        )
    )
    (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


def model_files(folder: Path, files: VisionFiles | None = None) -> ModelFiles:
    config = {} if files is None else {"model_type": files.family, **files.hf}
    return ModelFiles(name="tiny", root=folder, load_format="safetensors", config=config)


def sizes(count: int) -> Iterable[tuple[int, int]]:
    """Yield widths and heights of images: tiny, narrow, and of all shapes."""
    edges = [(1, 1), (3, 50), (50, 3), (3, 3), (200, 1), (1, 200), (400, 2), (2, 400), (32, 32), (33, 32), (28, 28)]
    yield from edges
    for i in range(count - len(edges)):
        yield 1 + i * 37 % 211, 1 + i * 53 % 173


def vision_config(files: VisionFiles) -> VisionConfig:
    token_id = vision_tokenizer().token_to_id(IMAGE)
    return VisionConfig(family=files.family, image_token_id=token_id, hf=files.hf)
