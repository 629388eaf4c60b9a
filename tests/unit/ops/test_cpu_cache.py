"""Copy and swap of cache blocks: opaque bytes, all layers, the same for every backend."""

import resource
from functools import partial
from pathlib import Path

import pytest
import torch
from octavo_engine.ops.attention import LayerKVSpec
from octavo_engine.ops.cpu_attention import CpuBackend
from octavo_engine.ops.cpu_cache import lazy_zeros
from octavo_engine.ops.cuda_backend import CudaBackend
from octavo_engine.ops.reference import ReferenceBackend

SPECS = [LayerKVSpec(num_kv_heads=2, head_dim=8), LayerKVSpec(num_kv_heads=1, head_dim=16, window=4)]


Backend = CpuBackend | ReferenceBackend | CudaBackend


@pytest.fixture(params=["cpu", "reference", "cuda"])
def backend(request: pytest.FixtureRequest) -> Backend:
    cuda = partial(CudaBackend, device="cpu", num_programs=5)
    kinds = {"cpu": CpuBackend, "reference": ReferenceBackend, "cuda": cuda}
    made: Backend = kinds[request.param](SPECS, 4, torch.bfloat16)
    made.allocate(6)
    rows = torch.randint(0, 60, (6, made.bytes_per_block()), dtype=torch.uint8)
    made.swap_in([(i, i) for i in range(6)], rows)
    return made


def contents(backend: Backend) -> torch.Tensor:
    host = torch.zeros(6, backend.bytes_per_block(), dtype=torch.uint8)
    backend.swap_out([(i, i) for i in range(6)], host)
    return host


def test_bytes_per_block_counts_every_layer(backend: Backend) -> None:
    assert backend.bytes_per_block() == 2 * 4 * (2 * 8 + 1 * 16) * 2


def test_copy_moves_whole_blocks_of_all_layers(backend: Backend) -> None:
    before = contents(backend)
    backend.copy_blocks([(0, 4), (2, 5), (0, 1)])
    after = contents(backend)
    assert torch.equal(after, before[[0, 0, 2, 3, 0, 2]])


def test_a_block_survives_a_swap_out_and_in_to_another_block(backend: Backend) -> None:
    before = contents(backend)
    host = torch.zeros(3, backend.bytes_per_block(), dtype=torch.uint8)
    backend.swap_out([(3, 0), (1, 2)], host)
    backend.copy_blocks([(0, 3), (0, 1)])
    backend.swap_in([(0, 5), (2, 4)], host)
    assert torch.equal(contents(backend), before[[0, 0, 2, 0, 1, 3]])


def test_empty_lists_of_pairs_are_accepted(backend: Backend) -> None:
    before = contents(backend)
    backend.copy_blocks([])
    backend.swap_out([], before.clone())
    backend.swap_in([], before.clone())
    assert torch.equal(contents(backend), before)


def test_unused_blocks_cost_no_memory() -> None:
    before = resident_bytes()
    tensor = lazy_zeros((1 << 12, 1 << 16), torch.bfloat16)  # 512 MiB
    tensor[-1, -1] = 1
    assert tensor[0, 0] == 0
    assert tensor[-1, -1] == 1
    assert resident_bytes() - before < 64 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
