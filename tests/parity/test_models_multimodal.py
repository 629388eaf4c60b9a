"""The text part of a multimodal Gemma 3 checkpoint: other names, a nested config, and tensors to skip."""

from pathlib import Path

import torch
from octavo_engine.models.registry import build_model
from octavo_engine.sources.model_config import load_model_config
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.weights.loader import iter_weights
from octavo_testing.paged import PagedDriver
from octavo_testing.tiny_models import LENGTH, VOCAB, scramble, tiny_config
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, SiglipVisionConfig

VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def test_the_text_part_equals_transformers(tmp_path: Path) -> None:
    config = Gemma3Config(
        text_config=tiny_config("gemma3").to_dict(),
        vision_config=SiglipVisionConfig(**VISION).to_dict(),
        mm_tokens_per_image=4,
    )
    theirs = Gemma3ForConditionalGeneration(config).eval().float()
    scramble(theirs.model.language_model, seed=0)
    theirs.save_pretrained(tmp_path)
    files = resolve_model(str(tmp_path))
    model = build_model(load_model_config(files), dtype=torch.float32, device="cpu", max_model_len=LENGTH)
    model.load_weights(iter_weights(files))
    model.finish_loading()
    tokens = torch.randint(3, VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        expected = theirs(input_ids=tokens, token_type_ids=torch.zeros_like(tokens)).logits[0]
    assert expected.std() >= 1
    torch.testing.assert_close(PagedDriver(model).feed({0: tokens[0].tolist()})[0], expected, rtol=0, atol=1e-4)
