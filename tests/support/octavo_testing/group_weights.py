"""Engines that keep quantised weights in groups, as on a GPU, and random weights in groups."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from octavo_engine.devices.cuda_device import CudaDevice
from octavo_engine.devices.device import CpuDevice
from octavo_engine.ops.group_tensor import GroupFormat, GroupTensor

#: Name -> format of each kind of codes and offsets.
KINDS = {
    "int4": GroupFormat(name="int4", codes="int4", group_size=32),
    "int4 with zeros": GroupFormat(name="int4", codes="int4", group_size=64, offsets="zeros"),
    "int4 with minimums": GroupFormat(name="Q4_1", codes="int4", group_size=32, offsets="minimums"),
    "int8": GroupFormat(name="int8", codes="int8", group_size=64, scale_dtype=torch.bfloat16),
    "e4m3": GroupFormat(name="e4m3", codes="e4m3", group_size=32, scale_dtype=torch.float32),
    "table4": GroupFormat(name="nf4", codes="table4", group_size=64, scale_dtype=torch.float32),
}


@contextmanager
def groups_kept() -> Iterator[None]:
    """Let engines that start meanwhile keep groups in place of blocks."""
    with patch.object(CpuDevice, "keeps", CudaDevice.keeps):
        yield


def random_groups(kind: GroupFormat, out: int, size: int, seed: int = 0) -> GroupTensor:
    """Return random codes, none of which is NaN, and scales and offsets of such a size that weights are near 1."""
    draw = torch.Generator().manual_seed(seed)
    largest = {"int4": 8, "int8": 128, "e4m3": 448, "table4": 1}[kind.codes]
    codes = torch.randint(0, 256, (out, size // kind.codes_per_byte), generator=draw).to(torch.uint8)
    codes = codes & 0xFE if kind.codes == "e4m3" else codes
    shape = (size // kind.group_size, out)
    scales = (torch.rand(shape, generator=draw) + 0.5) / largest
    offsets = {
        "none": None,
        "zeros": torch.randint(0, 16, shape, generator=draw).to(torch.uint8),
        "minimums": torch.randn(shape, generator=draw).to(kind.scale_dtype),
    }[kind.offsets]
    table = torch.linspace(-1, 1, 16) if kind.codes == "table4" else None
    return GroupTensor(format=kind, codes=codes, scales=scales.to(kind.scale_dtype), offsets=offsets, table=table)
