"""Division of memory: the longest request by the limit, the KV cache by flags and free memory, errors with a remedy."""

from typing import Any

import pytest
from octavo_engine.devices.memory import GIB, MIB, PROCESS_BYTES, MemoryInfo
from octavo_engine.runner.kv_cache_size import (
    KVSize,
    ModelMemory,
    default_kv_bytes,
    fits_limit,
    fitting_len,
    set_kv_bytes,
    size_kv,
)
from octavo_engine.settings.config import EngineConfig
from octavo_engine.wire.errors import StartupError


def model(config: EngineConfig, *, weights: int = 0, block: int = MIB) -> ModelMemory:
    kv_bytes = set_kv_bytes(config, block)
    return ModelMemory(weights_bytes=weights, bytes_per_block=block, set_kv_bytes=kv_bytes)


def size(*, max_model_len: int = 1000, available: int = 8 * GIB, weights: int = 0, **flags: Any) -> KVSize:
    config = EngineConfig(**flags)
    memory = MemoryInfo(total_bytes=16 * GIB, available_bytes=available)
    return size_kv(config, model(config, weights=weights), memory, max_model_len=max_model_len)


@pytest.mark.parametrize(
    ("flags", "blocks", "host_blocks"),
    [
        ({}, 4096, 0),
        ({"available": 4 * GIB}, 2048, 0),
        ({"weights": 4 * GIB}, 2048, 0),
        ({"kv_cache_memory_bytes": 100 * MIB + 5}, 100, 0),
        ({"num_gpu_blocks_override": 70}, 70, 0),
        ({"num_gpu_blocks_override": 70, "kv_cache_memory_bytes": GIB}, 70, 0),
        ({"swap_space": 0.5, "kv_cache_memory_bytes": GIB}, 1024, 512),
        ({"swap_space": 4}, 2048, 4096),
        ({"block_size": 32, "kv_cache_memory_bytes": 32 * MIB}, 32, 0),
        ({"available": 70 * MIB}, 63, 0),
        ({"gpu_memory_utilization": 0.25}, 4 * 1024 - 384, 0),
        ({"gpu_memory_utilization": 0.25, "weights": GIB}, 3 * 1024 - 384, 0),
        ({"gpu_memory_utilization": 1.0}, int(0.9 * 8 * 1024), 0),
    ],
    ids=str,
)
def test_the_cache_is_sized_by_flags_and_memory(flags: dict[str, Any], blocks: int, host_blocks: int) -> None:
    assert size(**flags) == KVSize(num_blocks=blocks, num_host_blocks=host_blocks, kv_bytes=blocks * MIB)


@pytest.mark.parametrize(
    ("rest_gib", "engines", "kv_gib"),
    [(0, 1, 0), (-3, 1, 0), (6, 1, 3), (8, 1, 4), (12, 1, 4), (16, 1, 4), (40, 1, 10), (40, 5, 2)],
)
def test_the_default_grows_with_the_memory(rest_gib: int, engines: int, kv_gib: int) -> None:
    assert default_kv_bytes(rest_gib * GIB, engines) == kv_gib * GIB


def test_exactly_one_full_sequence_is_enough() -> None:
    assert size(max_model_len=1008, num_gpu_blocks_override=63).num_blocks == 63
    with pytest.raises(StartupError):
        size(max_model_len=1009, num_gpu_blocks_override=63)


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (
            {"kv_cache_memory_bytes": 10 * MIB},
            [
                "10.0 MiB",
                "63.0 MiB",
                "--max-model-len to at most 160",
                f"--kv-cache-memory-bytes to at least {63 * MIB}",
            ],
        ),
        ({"num_gpu_blocks_override": 3}, ["3 blocks", "--max-model-len to at most 48", "--num-gpu-blocks-override to"]),
        ({"available": 0}, ["only 0.0 MiB of 16.00 GiB", "63.0 MiB", "end other programs"]),
        ({"available": 10 * MIB}, ["only 10.0 MiB", "1000 tokens 63.0 MiB", "--max-model-len to at most 160"]),
        ({"available": GIB, "weights": 2 * GIB}, ["weights 2.00 GiB", "only 1.00 GiB", "smaller model"]),
        ({"kv_cache_memory_bytes": 9 * GIB}, ["KV cache 9.00 GiB", "only 8.00 GiB", "lower --kv-cache-memory-bytes"]),
        ({"swap_space": 7.99}, ["swap space 7.99 GiB", "only 8.00 GiB"]),
    ],
    ids=str,
)
def test_a_start_without_enough_memory_is_refused(flags: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(StartupError) as failure:
        size(**flags)
    for part in parts:
        assert part in str(failure.value)
    assert "\n" not in str(failure.value)
    assert failure.value.code == "OutOfMemory"


def test_a_tiny_model_gets_a_bounded_number_of_blocks() -> None:
    config = EngineConfig(max_num_seqs=4)
    memory = MemoryInfo(total_bytes=16 * GIB, available_bytes=8 * GIB)
    assert size_kv(config, model(config, block=64), memory, max_model_len=64).num_blocks == 1 << 16


def longest(total_gib: float, *, wanted: int = 131_072, engines: int = 1, **flags: Any) -> int:
    """Return the length that a model with 8 GiB of weights and 128 KiB a token gets."""
    config = EngineConfig(**flags)
    memory = MemoryInfo(total_bytes=int(total_gib * GIB), available_bytes=0, num_engines=engines)
    return fitting_len(config, model(config, weights=8 * GIB, block=2 * MIB), memory, longest=wanted)


@pytest.mark.parametrize(
    ("length", "tokens"),
    [
        (longest(24), 32_768),
        (longest(24.1), 32_768),
        (longest(12.375), 16_384),
        (longest(12), 14_336),
        (longest(24, wanted=20_000), 20_000),
        (longest(80), 131_072),
        (longest(80, engines=4), 35_840),
        (longest(24, kv_cache_memory_bytes=GIB), 8192),
        (longest(24, num_gpu_blocks_override=3), 48),
        (longest(24, gpu_memory_utilization=0.5), 29_696),
        (longest(24, swap_space=12), 14_336),
        (longest(8.5), 512),
    ],
)
def test_the_length_follows_the_limit(length: int, tokens: int) -> None:
    assert length == tokens


@pytest.mark.parametrize("flags", [{}, {"gpu_memory_utilization": 0.9}, {"swap_space": 1}], ids=str)
def test_a_limit_without_room_for_the_cache_is_refused(flags: dict[str, Any]) -> None:
    with pytest.raises(StartupError, match=r"8\.40 GiB of memory.*8\.00 GiB.*smaller model") as failure:
        longest(8.4, **flags)
    assert failure.value.code == "OutOfMemory"


@pytest.mark.parametrize(
    ("flags", "engines", "fits"),
    [
        ({}, 1, True),
        ({}, 2, False),
        ({"kv_cache_memory_bytes": 8 * GIB}, 1, False),
        ({"swap_space": 6}, 1, False),
        ({"max_model_len": 60_000}, 1, True),
        ({"max_model_len": 64_000}, 1, False),
        ({"gpu_memory_utilization": 0.5}, 1, False),
    ],
    ids=str,
)
def test_the_limit_bounds_weights_cache_and_swap_space(flags: dict[str, Any], engines: int, fits: bool) -> None:
    config = EngineConfig(**flags)
    memory = MemoryInfo(total_bytes=16 * GIB, available_bytes=0, num_engines=engines)
    needs = model(config, weights=8 * GIB, block=2 * MIB)
    assert fits_limit(config, needs, memory, max_model_len=config.max_model_len or 30_000) is fits


def test_the_process_itself_needs_memory() -> None:
    config = EngineConfig(kv_cache_memory_bytes=GIB)
    memory = MemoryInfo(total_bytes=2 * GIB + PROCESS_BYTES, available_bytes=0)
    assert fits_limit(config, model(config, weights=GIB), memory, max_model_len=1)
    assert not fits_limit(config, model(config, weights=GIB + 1), memory, max_model_len=1)
