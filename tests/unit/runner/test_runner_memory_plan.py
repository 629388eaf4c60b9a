"""`--dtype auto` chooses bf16 if float32 does not fit into the memory of the machine or container."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo_engine.devices.device import CpuDevice
from octavo_engine.devices.memory import GIB, PROCESS_BYTES, MemoryInfo
from octavo_engine.models import transformers_support
from octavo_engine.runner.checkpoint import read_checkpoint
from octavo_engine.runner.memory_plan import MEDIA_WORKER_BYTES, MemoryPlan, plan_memory
from octavo_engine.settings.config import EngineConfig
from octavo_engine.sources.model_config import load_model_config
from octavo_engine.sources.resolve import resolve_files, resolve_model
from octavo_engine.wire.errors import StartupError
from octavo_testing.tiny_models import VOCAB, make_tiny
from octavo_testing.vision_checkpoints import VISION, write_vision_files

KV_BYTES = 1 << 20


class LimitedDevice(CpuDevice):
    """A CPU in a container that multiplies float32 faster."""

    def __init__(self, total_bytes: int) -> None:
        super().__init__()
        self.total_bytes = total_bytes

    def default_dtype(self, model: Any) -> torch.dtype:
        return torch.float32

    def memory(self, num_ranks: int = 1) -> MemoryInfo:
        return MemoryInfo(total_bytes=self.total_bytes, available_bytes=1 << 40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("models"))


def plan(folder: Path, total_bytes: int, **flags: Any) -> MemoryPlan:
    config = EngineConfig(**{"model": str(folder), "dtype": "auto", "kv_cache_memory_bytes": KV_BYTES, **flags})
    return plan_memory(config, LimitedDevice(total_bytes), load_model_config(resolve_model(str(folder))))


def test_float32_is_chosen_where_it_fits(folder: Path) -> None:
    assert plan(folder, GIB).dtype == torch.float32


def test_bfloat16_is_chosen_where_float32_does_not_fit(folder: Path) -> None:
    assert plan(folder, PROCESS_BYTES + KV_BYTES).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "flags", [{"kv_cache_memory_bytes": GIB}, {"swap_space": 1.0}, {"num_gpu_blocks_override": 1_000_000}], ids=str
)
def test_cache_and_swap_space_count(folder: Path, flags: dict[str, Any]) -> None:
    assert plan(folder, GIB, **flags).dtype == torch.bfloat16


def test_a_requested_type_is_used(folder: Path) -> None:
    assert plan(folder, PROCESS_BYTES, dtype="float32").dtype == torch.float32


def test_the_length_is_the_models_the_users_or_what_fits(folder: Path) -> None:
    assert plan(folder, GIB).max_model_len == 128
    assert plan(folder, GIB, max_model_len=50).max_model_len == 50
    assert plan(folder, GIB, num_gpu_blocks_override=7).max_model_len == 112


def test_a_share_beyond_the_free_memory_is_cut_with_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    flags: dict[str, Any] = {"kv_cache_memory_bytes": None, "gpu_memory_utilization": 1.0}
    assert plan(folder, 1 << 39, **flags).kv.num_blocks == 1 << 16
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    caplog.clear()
    plan(folder, 1 << 42, **flags)
    assert [record.levelname for record in caplog.records if record.levelno >= logging.WARNING] == ["WARNING"]
    assert "1024.00 GiB of 4096.00 GiB" in caplog.text


def plan_smolvlm(folder: Path, total_bytes: int = 1 << 40, *, num_layers: int = 1, **flags: Any) -> MemoryPlan:
    """Plan for a model without weights in its folder."""
    files = VISION["smolvlm"]
    text = {"model_type": "llama", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    tower = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": num_layers, "num_attention_heads": 2}
    hf = files.hf | {"model_type": "smolvlm", "architectures": ["SmolVLMForConditionalGeneration"]}
    hf |= {"vision_config": tower | files.hf["vision_config"], "text_config": text, "image_token_id": VOCAB}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf))
    write_vision_files(folder, files)
    flags = {"mm_processor_cache_gb": 1 / 64} | flags
    flags |= {"load_format": "dummy", "dtype": "float32", "media_workers": 2}
    config = EngineConfig(model=str(folder), max_num_batched_tokens=70, **flags)
    return plan_memory(config, LimitedDevice(total_bytes), read_checkpoint(config, resolve_files(config)).config)


@pytest.mark.parametrize(("flags", "num_tokens", "num_rows"), [({}, 68, 70), ({"max_model_len": 60}, 60, 70)])
def test_the_plan_counts_the_encoding_of_the_largest_image_and_rows(
    tmp_path: Path, flags: dict[str, Any], num_tokens: int, num_rows: int
) -> None:
    """17 tiles of 16 patches; four patches make a token. The layer's largest tensors are those of its MLP.

    The images before their encoding, and the processes that decode them, count, too.
    """
    layer, pixels = 4 * 32 + 2 * 128, 2 * 3 * 8 * 8
    planned = plan_smolvlm(tmp_path, kv_cache_memory_bytes=KV_BYTES, **flags)
    encoded_bytes = num_tokens * 4 * (layer + pixels) * 4 + num_rows * 64 * 4
    assert planned.model.images_bytes == encoded_bytes + GIB // 64 + 2 * MEDIA_WORKER_BYTES


def test_the_images_take_memory_from_the_kv_cache(tmp_path: Path) -> None:
    planned = plan_smolvlm(tmp_path, gpu_memory_utilization=0.5, total_bytes=2 * GIB)
    taken = planned.model.weights_bytes + planned.model.images_bytes + PROCESS_BYTES
    assert GIB - taken - planned.model.bytes_per_block < planned.kv.kv_bytes <= GIB - taken


def test_an_error_of_a_plan_names_the_images(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"images 272\.8 MiB and"):
        plan_smolvlm(tmp_path, kv_cache_memory_bytes=1 << 41)


@pytest.mark.parametrize("cache_gb", [0, 1.0])
def test_an_error_says_how_images_take_less_memory(tmp_path: Path, cache_gb: float) -> None:
    """Without a cache, images that wait for their encoding take as much as one of 1 GiB may."""
    remedy = r"or set --mm-processor-cache-gb 0\.1"
    with pytest.raises(StartupError, match=remedy):
        plan_smolvlm(tmp_path, GIB, mm_processor_cache_gb=cache_gb)
    with pytest.raises(StartupError, match=remedy):
        plan_smolvlm(tmp_path, kv_cache_memory_bytes=1 << 41, mm_processor_cache_gb=cache_gb)


def test_a_vision_tower_of_too_many_layers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a limit, the layers fill the memory. (A lower limit than 2^18 makes the test fast.)"""
    monkeypatch.setattr(transformers_support, "_MOST_MODULES", 500)
    with pytest.raises(StartupError, match=r"vision tower: its config\.json asks for more than 500 modules"):
        plan_smolvlm(tmp_path, num_layers=10**7)
