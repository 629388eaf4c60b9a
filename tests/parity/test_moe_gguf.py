"""A GGUF file of a model with experts gives the same tokens as its source."""

from pathlib import Path

import pytest
from octavo_engine import LLM, SamplingParams
from octavo_testing.gguf_checkpoints import tiny_model, write_tiny_gguf
from octavo_testing.tiny_models import byte_tokenizer

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("architecture", ["qwen3moe", "qwen2moe", "olmoe", "llama with experts"])
def test_a_gguf_file_gives_the_tokens_of_its_source(architecture: str, tmp_path: Path) -> None:
    model, source = tiny_model(architecture), tmp_path / "source"
    write_tiny_gguf(tmp_path / "m.gguf", architecture, model)
    model.save_pretrained(source)
    byte_tokenizer().save(str(source / "tokenizer.json"))
    prompts = [{"prompt_token_ids": [5, 6, 7, 8]}, {"prompt_token_ids": list(range(3, 40))}]
    outputs = []
    for path in (tmp_path / "m.gguf", source):
        llm = LLM(str(path), tokenizer=str(source), dtype="float32", num_gpu_blocks_override=64)
        results = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True), use_tqdm=False)
        outputs.append([result.outputs[0].token_ids for result in results])
        llm.shutdown()
    assert outputs[0] == outputs[1]
    assert len({*outputs[0][0], *outputs[0][1]}) >= 5
