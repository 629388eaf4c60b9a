"""The GPU's kernels on CPU tensors, in Triton's interpreter."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
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


class TritonGraphs(GraphedDevice):
    """A CPU with the graphs of a GPU and its kernels, in the interpreter."""

    buckets = (Bucket(1, 1), Bucket(20, 4, 20))

    def attention_backend(self, specs: list[LayerKVSpec], block_size: int, dtype: torch.dtype) -> AttentionBackend:
        return CudaBackend(specs, block_size, dtype, self.torch_device, num_programs=5)
