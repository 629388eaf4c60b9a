"""Cuts a GGUF tensor of all experts into one tensor per expert. Only header entries change, so every type is supported.

llama.cpp stores the matrices of a layer's experts as one tensor, `blk.0.ffn_gate_exps.weight`. The parts have the names
that its first files with experts used, `blk.0.ffn_gate.3.weight`.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from octavo_engine.sources.gguf_header import GGUFTensor
from octavo_engine.wire.errors import StartupError

_STACK = re.compile(r"(blk\.\d+\.ffn_(?:gate|up|down))_exps\.weight")
_SHARED_GATE = re.compile(r"blk\.\d+\.ffn_gate_inp_shexp\.weight")


def cut_by_expert(path: Path, tensor: GGUFTensor, num_experts: int) -> Iterator[GGUFTensor]:
    """Yield the header entries of a tensor's experts; if the tensor does not hold experts, its own entry."""
    stack = _STACK.fullmatch(tensor.name)
    if stack is None:
        yield _as_matrix(tensor) if _SHARED_GATE.fullmatch(tensor.name) else tensor
        return
    if len(tensor.shape) != 3 or tensor.shape[0] != num_experts:
        raise StartupError(
            f"{path}: tensor {tensor.name!r} has shape {tensor.shape}, but the metadata declares {num_experts} experts."
        )
    num_bytes = tensor.num_bytes // num_experts
    for expert in range(num_experts):
        yield replace(
            tensor,
            name=f"{stack[1]}.{expert}.weight",
            shape=tensor.shape[1:],
            offset=tensor.offset + expert * num_bytes,
            num_bytes=num_bytes,
        )


def _as_matrix(tensor: GGUFTensor) -> GGUFTensor:
    """Restore the row dimension of 1 that llama.cpp's conversion drops."""
    return replace(tensor, shape=(1, tensor.shape[-1]))
