"""Sizing of the KV cache: flags, defaults, and errors with a remedy."""

from typing import Any

import pytest
from octavo_engine.config import EngineConfig
from octavo_engine.runner.memory import GIB, MIB, KVSize, MemoryInfo, size_kv
from octavo_engine.wire.errors import StartupError


def size(*, max_model_len: int = 1000, available: int = 8 * GIB, default: int = GIB, **config: Any) -> KVSize:
    return size_kv(
        EngineConfig(**config),
        max_model_len=max_model_len,
        bytes_per_block=MIB,
        memory=MemoryInfo(total_bytes=16 * GIB, available_bytes=available),
        default_kv_bytes=default,
    )


@pytest.mark.parametrize(
    ("config", "blocks", "host_blocks"),
    [
        ({}, 1024, 0),
        ({"kv_cache_memory_bytes": 100 * MIB + 5}, 100, 0),
        ({"num_gpu_blocks_override": 70}, 70, 0),
        ({"num_gpu_blocks_override": 70, "kv_cache_memory_bytes": GIB}, 70, 0),
        ({"swap_space": 0.5}, 1024, 512),
        ({"block_size": 32, "kv_cache_memory_bytes": 32 * MIB}, 32, 0),
    ],
    ids=str,
)
def test_the_cache_is_sized_by_flags_and_memory(config: dict[str, Any], blocks: int, host_blocks: int) -> None:
    assert size(**config) == KVSize(num_blocks=blocks, num_host_blocks=host_blocks, kv_bytes=blocks * MIB)


def test_exactly_one_full_sequence_is_enough() -> None:
    assert size(max_model_len=1008, num_gpu_blocks_override=63).num_blocks == 63
    with pytest.raises(StartupError):
        size(max_model_len=1009, num_gpu_blocks_override=63)


@pytest.mark.parametrize(
    ("config", "parts"),
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
        ({"default": 0, "available": 0}, ["0.0 MiB of memory are available", "--kv-cache-memory-bytes"]),
    ],
    ids=str,
)
def test_a_cache_too_small_for_one_sequence_is_refused(config: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(StartupError) as failure:
        size(**config)
    for part in parts:
        assert part in str(failure.value)
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize("config", [{"kv_cache_memory_bytes": 9 * GIB}, {"swap_space": 7.5}], ids=str)
def test_more_than_the_available_memory_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(StartupError, match=r"8\.00 GiB of memory are available: lower"):
        size(**config)


def test_a_tiny_model_gets_a_bounded_number_of_blocks() -> None:
    kv = size_kv(
        EngineConfig(max_num_seqs=4),
        max_model_len=64,
        bytes_per_block=64,
        memory=MemoryInfo(total_bytes=16 * GIB, available_bytes=8 * GIB),
        default_kv_bytes=4 * GIB,
    )
    assert kv.num_blocks == 1 << 16
