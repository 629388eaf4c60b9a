"""The GPU's backend without a GPU: swapping goes through pinned memory only, and a shape without a tile is named.

The device `meta` stands for the GPU; copies are only watched.
"""

from typing import Any

import pytest
import torch
from octavo_engine.ops import cuda_backend
from octavo_engine.ops.attention import LayerKVSpec
from octavo_engine.ops.cuda_backend import CudaBackend
from octavo_engine.wire.errors import StartupError
from octavo_testing.attention_cases import SeqShape, make_spec, run_history_and_step
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.errors import OutOfResources

COPIES = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}


class Bus(TorchDispatchMode):
    """Refuses copies between a device and host memory that is not pinned, and copies that wait for the device."""

    def __init__(self, pinned: Tensor) -> None:
        super().__init__()
        self.pinned, self.num_bytes = pinned.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in args if isinstance(x, Tensor)]
        devices = {x.device.type for x in tensors}
        if kwargs.get("device") is not None:  # of `Tensor.to`
            devices.add(torch.device(kwargs["device"]).type)
        if func not in COPIES or len(devices) == 1:
            return func(*args, **kwargs)
        host = next((x for x in tensors if x.is_cpu), None)
        assert host is not None, "the copy makes pageable memory"
        assert host.untyped_storage().data_ptr() == self.pinned, "the host's part of the copy is pageable"
        assert host.is_contiguous(), "the host's part of the copy is in pieces, which a device copies one by one"
        assert args[2:] == (True,), "the copy waits for the device"
        self.num_bytes += host.nbytes
        return args[0]


@pytest.mark.parametrize("num_blocks", [1, 7])
def test_swaps_copy_whole_rows_of_pinned_memory(num_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_backend, "_STAGING_BYTES", 3 * 2048)
    specs = [LayerKVSpec(num_kv_heads=2, head_dim=4), LayerKVSpec(num_kv_heads=1, head_dim=8)]
    backend = CudaBackend(
        specs, 16, torch.float32, "meta", num_programs=5, copy=lambda numbers: torch.empty_like(numbers, device="meta")
    )
    backend.allocate(8)
    host = torch.zeros((9, backend.bytes_per_block()), dtype=torch.uint8)
    pairs = [(i, num_blocks - i) for i in range(num_blocks)]
    with Bus(host) as bus:
        backend.swap_out(pairs, host)
        assert bus.num_bytes == num_blocks * backend.bytes_per_block()
        backend.swap_in(pairs, host)
        assert bus.num_bytes == 2 * num_blocks * backend.bytes_per_block()
        backend.copy_blocks([(0, 1), (2, 3)])


def test_the_bus_refuses_pageable_copies() -> None:
    """The copies that swaps did before: the double must see them."""
    host, device = torch.zeros(2, 8), torch.zeros(2, 8, device="meta")
    with Bus(host):
        host[0].copy_(device[0], non_blocking=True)
        for pageable in (
            lambda: device.to("cpu"),
            lambda: torch.zeros(8).to("meta"),
            lambda: device[0].copy_(torch.zeros(8), non_blocking=True),
            lambda: host[0].copy_(device[0]),
            lambda: host[:, :2].copy_(device[:, :2], non_blocking=True),
        ):
            with pytest.raises(AssertionError):
                pageable()


@pytest.mark.parametrize("kernel", ["paged_attention", "decode_attention"])
@pytest.mark.parametrize("dim", [512, 1024])
def test_a_head_size_that_no_tile_takes_is_named_with_the_limit(
    kernel: str, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OutOfResources(270336, 232448, "shared memory")

    for name in ("write_kv", "paged_attention", "decode_attention"):
        monkeypatch.setattr(cuda_backend, name, refuse if name == kernel else lambda *arguments, **options: None)
    spec = make_spec(heads=6, kv_heads=2, dim=dim)
    backend = CudaBackend([spec.kv], 16, torch.float32, "cpu", num_programs=1)
    with pytest.raises(StartupError) as raised:
        run_history_and_step(backend, spec, [SeqShape(0, 2)], 16, torch.float32)
    text = str(raised.value)
    assert "\n" not in text
    for part in (f"size {dim}", "3 query heads", "float32", "270336", "232448", "shared memory", "--device cpu"):
        assert part in text
