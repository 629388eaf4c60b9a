"""A tiny LLaVA that is trained to name the colour of a picture's upper left quarter, by a word or in JSON."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from octavo_testing.pictures import BLACK, BLUE, GREEN, RED, WHITE
from octavo_testing.tiny_models import byte_tokenizer
from octavo_testing.vision_checkpoints import IMAGE, LLAVA_TEMPLATE

COLOURS = {"red": RED, "green": GREEN, "blue": BLUE, "white": WHITE, "black": BLACK}
QUESTION = "Which colour?"
PROMPT = f"USER: {IMAGE}\n{QUESTION} ASSISTANT:"
_JSON = '{"colour":"'  # what precedes the word in JSON without whitespace
_SIDE, _PATCH = 32, 8
_MEAN, _STD = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)
_STEPS, _BATCH = 100, 32


def make_colour_llava(folder: Path) -> Path:
    """Train the model, in some seconds, and write it with its tokenizer, image processor and chat template."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken(IMAGE, special=True, normalized=False)])
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in COLOURS])
    text = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "model_type": "llama",
    }
    tower = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": _SIDE,
        "patch_size": _PATCH,
        "projection_dim": 32,
        "model_type": "clip_vision_model",
    }
    image_id = tokenizer.token_to_id(IMAGE)
    config = AutoConfig.for_model("llava", text_config=text, vision_config=tower, image_token_index=image_id)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").float()
        prompt = PROMPT.replace(IMAGE, IMAGE * (_SIDE // _PATCH) ** 2)
        ids, longer = (tokenizer.encode(text, add_special_tokens=False).ids for text in (prompt, prompt + _JSON))
        words = torch.tensor([tokenizer.token_to_id(name) for name in COLOURS])
        _train(model, torch.tensor(longer), [len(ids) - 1, len(longer) - 1], words)
    model.eval().save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(LLAVA_TEMPLATE, encoding="utf-8")
    processor = {
        "image_processor_type": "CLIPImageProcessor",
        "image_mean": _MEAN,
        "image_std": _STD,
        "crop_size": {"height": _SIDE, "width": _SIDE},
        "size": {"shortest_edge": _SIDE},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")
    return folder


def _train(model: Any, text: Tensor, places: list[int], words: Tensor) -> None:
    """Train the word that follows each of these tokens of a text."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(_STEPS):
        pixels, answers = _pictures(_BATCH)
        logits = model(input_ids=text.expand(_BATCH, -1), pixel_values=pixels).logits[:, places]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), words[answers].repeat_interleave(len(places)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _pictures(count: int) -> tuple[Tensor, Tensor]:
    """Return normalised pictures of four quarters, with a little noise, and the index of the first quarter's colour."""
    palette = torch.tensor(list(COLOURS.values())).float()
    quarters = torch.randint(len(COLOURS), (count, 2, 2))
    pixels = palette[quarters].permute(0, 3, 1, 2).repeat_interleave(_SIDE // 2, 2).repeat_interleave(_SIDE // 2, 3)
    pixels = (pixels + 8 * torch.randn(pixels.shape)).clamp(0, 255) / 255
    mean, std = (torch.tensor(values)[:, None, None] for values in (_MEAN, _STD))
    return (pixels - mean) / std, quarters[:, 0, 0]
