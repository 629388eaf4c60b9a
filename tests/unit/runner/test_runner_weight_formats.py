"""A GGUF model whose weights stay in blocks computes as the expanded model, but for rounded inputs, in less memory."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from octavo_engine.devices import device
from octavo_engine.devices.device import CpuDevice
from octavo_engine.models.model import Model
from octavo_engine.runner import weight_formats
from octavo_engine.runner.memory_plan import MemoryPlan, plan_memory
from octavo_engine.runner.model_loading import load_model
from octavo_engine.runner.weight_formats import kept_formats, log_expanded
from octavo_engine.settings.config import EngineConfig
from octavo_engine.sources.gguf_header import read_gguf
from octavo_engine.sources.model_config import load_model_config
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.weights.loader import stored_tensors
from octavo_engine.wire.errors import StartupError
from octavo_testing.block_products import MOST_DISTANCE, distance
from octavo_testing.gguf_checkpoints import TINY_CONFIGS, tiny_model, write_tiny_gguf
from octavo_testing.paged import PagedDriver

DEVICE = CpuDevice()
TOKENS = list(range(3, 40))


def write(folder: Path, architecture: str = "qwen2", qtype: str = "Q8_0") -> ModelFiles:
    path = folder / "m.gguf"
    write_tiny_gguf(path, architecture, tiny_model(architecture), qtype=qtype)
    return resolve_model(str(path))


def planned(files: ModelFiles, *, dtype: str = "auto", in_blocks: bool = True) -> MemoryPlan:
    config = EngineConfig(model=files.name, dtype=dtype, kv_cache_memory_bytes=1 << 20, max_model_len=64)  # type: ignore[arg-type]
    return plan_memory(config, DEVICE, load_model_config(files), stored_tensors(files) if in_blocks else None)


def loaded(files: ModelFiles, plan: MemoryPlan) -> Model:
    return load_model(DEVICE, files, load_model_config(files), plan)


def change_block(files: ModelFiles, name: str, row: int, at: int, scale: bytes) -> None:
    """Overwrite the scale of the first block of a row with `scale`; `at`: the place in the block."""
    info = read_gguf(files.weight_files[0]).tensors[name]
    with files.weight_files[0].open("r+b") as file:
        file.seek(info.offset + row * info.num_bytes // info.shape[0] + at)
        file.write(scale)


@pytest.mark.parametrize("qtype", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("architecture", sorted(TINY_CONFIGS))
def test_logits_are_close_to_those_of_the_expanded_model(tmp_path: Path, architecture: str, qtype: str) -> None:
    files = write(tmp_path, architecture, qtype)
    blocks = loaded(files, planned(files))
    expanded = loaded(files, planned(files, dtype="bfloat16", in_blocks=False))
    quantised = {name for name, info in stored_tensors(files).items() if info.type.name == qtype}
    assert blocks.block_tensors() == quantised - {"transformer.wpe.weight"}
    assert not expanded.block_tensors()
    logits, expected = (PagedDriver(model).feed({0: TOKENS})[0] for model in (blocks, expanded))
    assert 0 < distance(logits, expected) < MOST_DISTANCE


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "qwen2moe"])
def test_logits_of_mixed_types_are_close_to_those_of_the_expanded_model(tmp_path: Path, architecture: str) -> None:
    """The types of a Q4_K_M file, and a gate and up of two types."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 16}
    if architecture == "qwen2moe":
        sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
    others = {"attn_v": "Q6_K", "attn_k.": "Q5_K", "blk.1.ffn_up": "Q5_1", "ffn_down": "Q6_K", "token_embd": "Q8_0"}
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, architecture, tiny_model(architecture, **sizes), qtype="Q4_K", others=others)
    files = resolve_model(str(path))
    blocks = loaded(files, planned(files))
    expanded = loaded(files, planned(files, dtype="bfloat16", in_blocks=False))
    quantised = {name for name, info in stored_tensors(files).items() if info.type.block_elements > 1}
    assert blocks.block_tensors() == quantised
    logits = PagedDriver(blocks).feed({0: TOKENS})[0]
    assert logits.isfinite().all()
    assert 0 < distance(logits, PagedDriver(expanded).feed({0: TOKENS})[0]) < MOST_DISTANCE


def test_the_plan_has_the_bytes_of_the_blocks(tmp_path: Path) -> None:
    files = write(tmp_path, "qwen2", "Q4_0")
    plan = planned(files)
    model = loaded(files, plan)
    assert plan.dtype == torch.bfloat16
    assert plan.model.weights_bytes == model.weights_bytes()
    stored = stored_tensors(files).values()
    matrices = sum(info.num_bytes for info in stored if len(info.shape) > 1)
    assert matrices < model.weights_bytes() < planned(files, in_blocks=False).model.weights_bytes / 2


def test_parts_beside_a_part_without_blocks_are_expanded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = write(tmp_path, "llama", "Q8_0")
    stored = stored_tensors(files)
    q = "model.layers.0.self_attn.q_proj.weight"
    formats = kept_formats(stored, DEVICE, torch.bfloat16)
    del formats[q]
    plan = replace(planned(files), block_formats=formats)
    model = loaded(files, plan)
    fused = {q.replace("q_proj", part) for part in ("q_proj", "k_proj", "v_proj")}
    assert formats.keys() - model.block_tensors() == fused - {q}
    with caplog.at_level(logging.INFO, logger=weight_formats.__name__):
        log_expanded(stored, model.block_tensors(), DEVICE, plan.dtype)
    assert "3 quantised tensors are expanded to bfloat16" in caplog.text
    assert "another part of their fused weight" in caplog.text


@pytest.mark.parametrize(("qtype", "dtype"), [("MXFP4", "bfloat16"), ("Q8_0", "float32")])
def test_one_line_names_the_cause_of_an_expansion(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, qtype: str, dtype: str
) -> None:
    files = write(tmp_path, "qwen2", qtype)
    plan = planned(files, dtype=dtype)
    assert not plan.block_formats or qtype == "Q8_0"
    kept = loaded(files, plan).block_tensors()
    caplog.clear()  # planning logs lines of its own if an earlier test has raised the level of all loggers
    with caplog.at_level(logging.INFO, logger=weight_formats.__name__):
        log_expanded(stored_tensors(files), kept, DEVICE, plan.dtype)
    (message,) = caplog.messages
    assert "15 quantised tensors" in message
    assert (qtype if dtype == "bfloat16" else f"--dtype {dtype}") in message


def test_nothing_is_logged_if_nothing_is_expanded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = write(tmp_path)
    kept = loaded(files, planned(files)).block_tensors()
    caplog.clear()  # as above
    with caplog.at_level(logging.INFO, logger=weight_formats.__name__):
        log_expanded(stored_tensors(files), kept, DEVICE, torch.bfloat16)
    assert not caplog.messages


def test_without_kernels_all_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = write(tmp_path)
    monkeypatch.setattr(device, "kernels_expand_blocks", lambda dtype: False)
    assert not planned(files, dtype="bfloat16").block_formats


@pytest.mark.parametrize("tensor", ["blk.1.ffn_down.weight", "token_embd.weight"])
def test_a_scale_that_is_not_finite_names_tensor_and_row(tmp_path: Path, tensor: str) -> None:
    files = write(tmp_path)
    change_block(files, tensor, row=21, at=0, scale=b"\x00\x7c")
    name = next(name for name, info in stored_tensors(files).items() if info.name == tensor)
    with pytest.raises(StartupError, match=f"tensor '{name}': row 21 has an infinite or NaN .* Q8_0 block.*corrupt"):
        loaded(files, planned(files))


@pytest.mark.parametrize("size", [160, 100])
def test_a_tensor_of_another_shape_is_refused(tmp_path: Path, size: int) -> None:
    files = write(tmp_path)
    files.config["intermediate_size"] = size
    with pytest.raises(StartupError, match=r"has shape \(\d+, \d+\), the model needs \(\d+, \d+\)"):
        loaded(files, planned(files))


def test_a_file_that_ends_early_is_refused(tmp_path: Path) -> None:
    files = write(tmp_path)
    plan, path = planned(files), files.weight_files[0]
    path.write_bytes(path.read_bytes()[:-2048])
    with pytest.raises(StartupError, match="truncated"):
        loaded(files, plan)
