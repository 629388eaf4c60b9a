"""The GPU's kernels on CPU tensors, in Triton's interpreter."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from octavo_engine.devices.cuda_graphs import Bucket
from octavo_engine.devices.device import CpuDevice
from octavo_engine.ops import triton_devices
from octavo_engine.ops.attention import AttentionBackend, LayerKVSpec
from octavo_engine.ops.cuda_backend import CudaBackend

from octavo_testing.decode_pairs import GraphedDevice


@contextmanager
def triton_kernels() -> Iterator[None]:
    """Let engines that start meanwhile compute with the Triton kernels."""

    def backend(self: CpuDevice, specs: list[LayerKVSpec], block_size: int, dtype: torch.dtype) -> CudaBackend:
        return CudaBackend(specs, block_size, dtype, self.torch_device, num_programs=5)

    kernels = patch.object(CpuDevice, "attention_backend", backend)  # GPU machines lack pytest
    with kernels, patch.object(triton_devices, "DEVICES", {"cpu"}):
        yield


@contextmanager
def one_launch_at_a_time() -> Iterator[None]:
    """Let threads take turns with kernels, as the interpreter has global state."""
    lock, launch = threading.Lock(), interpreter.GridExecutor.__call__

    def call(self: Any, *args: Any, **options: Any) -> None:
        with lock:
            launch(self, *args, **options)

    with patch.object(interpreter.GridExecutor, "__call__", call):
        yield


_FLOATS = {tl.float8e4nv: torch.float8_e4m3fn, tl.float16: torch.float16, tl.float32: torch.float32}


@contextmanager
def exact_e4m3() -> Iterator[None]:
    """Let the interpreter convert from and to e4m3 as a GPU does: it loses carries, and NaN becomes a number."""
    convert = interpreter._convert_float

    def exactly(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if tl.float8e4nv not in (source, target):
            return convert(values, source, target, rounding)
        given = torch.from_numpy(np.ascontiguousarray(values)).view(_FLOATS[source]).float()
        if target == tl.float8e4nv:
            return given.clamp(-448, 448).to(_FLOATS[target]).view(torch.uint8).numpy()
        return given.to(_FLOATS[target]).numpy()

    with patch.object(interpreter, "_convert_float", exactly):
        yield


class TritonGraphs(GraphedDevice):
    """A CPU with the graphs of a GPU and its kernels, in the interpreter."""

    buckets = (Bucket(1, 1), Bucket(20, 4, 20))

    def attention_backend(self, specs: list[LayerKVSpec], block_size: int, dtype: torch.dtype) -> AttentionBackend:
        return CudaBackend(specs, block_size, dtype, self.torch_device, num_programs=5)
