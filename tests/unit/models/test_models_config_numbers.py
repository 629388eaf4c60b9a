"""Wrong numbers in config.json or in GGUF metadata: the start ends with one line, whichever number is wrong."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo_engine.models.registry import ARCHITECTURES, build_model
from octavo_engine.sources.gguf_config import gguf_to_hf_config
from octavo_engine.sources.gguf_header import read_gguf
from octavo_engine.sources.model_config import LIMITS, context_length, load_model_config
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.wire.errors import StartupError
from octavo_testing.gguf_checkpoints import tiny_model, write_tiny_gguf
from octavo_testing.tiny_models import TINY, tiny_config
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

WRONG = (-1, 0, 10**9, 10**18, 10**40, 1e300, math.nan, math.inf, "x", [1], {}, True)
FAST = ("llama_yarn", "gemma3", "phi3_longrope", "qwen2_moe", "opt_350m", "gpt2")
CASES = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in TINY]
#: The GGUF metadata of which the arithmetic of conversion depends, beside that of `config.json`.
GGUF_CASES = ("llama", "gemma2", "gemma3", "phi3", "gpt2", "qwen2moe")


def start(hf: dict[str, Any]) -> None:
    """Build the model as a start does. The bounds keep it small."""
    config = load_model_config(ModelFiles(name="m", root=Path(), load_format="dummy", config=hf))
    length = context_length(config)
    assert 1 <= length <= LIMITS["max_position_embeddings"]
    build_model(config, dtype=torch.float32, device="meta", max_model_len=length)


def changed(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """List the paths of all numbers in a config, or in the part of it at `path`."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from changed(part, (*path, key))
    elif isinstance(value, list) and value and isinstance(value[0], int | float):
        yield path
        yield (*path, 0)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    parts = dict(value) if isinstance(value, dict) else list(value)
    parts[path[0]] = replaced(value[path[0]], path[1:], new)
    return parts


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_number_ends_the_start_with_one_line_or_is_never_read(name: str) -> None:
    config = tiny_config(name)
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]
    assert architecture in ARCHITECTURES
    hf = config.to_dict() | {"architectures": [architecture]}
    if "n_layer" not in hf:
        hf |= {"num_hidden_layers": 1, "layer_types": None}
    for path in changed(hf):
        for wrong in WRONG:
            ends_well(start, replaced(hf, path, wrong), path, wrong)


def ends_well(step: Callable[[Any], Any], given: Any, *shown: Any) -> None:
    """Run a step of the start, which may raise StartupError with one line only."""
    message = ""
    try:
        step(given)
    except StartupError as error:
        message = str(error)
    except Exception as error:
        raise AssertionError(f"{shown} raises {error!r}") from error
    assert "\n" not in message, shown


@pytest.mark.parametrize("name", GGUF_CASES)
def test_a_wrong_number_in_gguf_metadata_ends_the_start_with_one_line(name: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, name, tiny_model(name))
    header = read_gguf(path)
    start(gguf_to_hf_config(header))
    keys = [key for key in header.metadata if not key.startswith(("tokenizer.ggml.tokens", "tokenizer.ggml.scores"))]
    for key in keys:
        for wrong in (*WRONG, 4 * 10**9, [[1], [2]]):
            other = replace(header, metadata={**header.metadata, key: wrong})
            ends_well(lambda given: start(gguf_to_hf_config(given)), other, key, wrong)


def test_tables_of_other_shapes_in_a_gguf_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, "llama", tiny_model("llama"))
    header = read_gguf(path)
    for shape in ((), (8,), (2, 2, 2)):
        table = replace(header.tensors["token_embd.weight"], shape=shape)
        with pytest.raises(StartupError, match=r"'token_embd.weight' has shape"):
            gguf_to_hf_config(replace(header, tensors={**header.tensors, "token_embd.weight": table}))


def test_limits_are_far_above_real_models() -> None:
    """DeepSeek-V3 has 61 layers of 256 experts, Llama 4 Scout 10 million positions."""
    assert min(LIMITS["num_experts"], LIMITS["num_hidden_layers"]) >= 8 * 256
    assert LIMITS["max_position_embeddings"] >= 100 * 10_485_760


def test_layer_types_fit_the_layers() -> None:
    hf = tiny_config("gemma3").to_dict() | {"architectures": ["Gemma3ForCausalLM"]}
    for types in (["x"] * 4, ["full_attention"] * 5, "full_attention", [["full_attention"]] * 4):
        with pytest.raises(StartupError, match=r"layer_types in config\.json must list"):
            start(hf | {"layer_types": types})
