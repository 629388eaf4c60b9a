"""Reads all tensors of a GGUF checkpoint, with Hugging Face's names and value conventions."""

import re
from collections.abc import Callable, Container, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from octavo_engine.ops.group_tensor import GroupTensor
from octavo_engine.ops.native_quantised import QuantisedTensor
from octavo_engine.sources.gguf_header import GGUFTensor, read_gguf
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.weights.gguf_conversion import Placement, place_tensor
from octavo_engine.weights.gguf_tensors import (
    interleaved_rows,
    read_gguf_blocks,
    read_gguf_groups,
    read_gguf_tensor,
)
from octavo_engine.wire.errors import StartupError

_STACK = re.compile(r"(blk\.\d+\.ffn_(?:gate|up|down))_exps\.weight")
_SHARED_GATE = re.compile(r"blk\.\d+\.ffn_gate_inp_shexp\.weight")


def iter_gguf(
    files: ModelFiles,
    *,
    dtype: torch.dtype | None,
    blocks: Container[str] = (),
    groups: Container[str] = (),
    skipped: Container[str] = (),
    advance: Callable[[int], None],
) -> Iterator[tuple[str, Tensor | QuantisedTensor | GroupTensor]]:
    """Yield (name, tensor). `blocks`, `groups`: names of tensors that stay in blocks or groups. `skipped`: names of
    modules to omit."""
    for path, placed in _placed_tensors(files):
        with path.open("rb") as file:
            for info, where in placed:
                if where is None or where.hf_name.rpartition(".")[0] in skipped:
                    advance(info.num_bytes)
                    continue
                rows = interleaved_rows(info.shape[0], where.heads) if where.heads else None
                if where.hf_name in blocks or where.hf_name in groups:  # stored as [out, in], with unchanged values
                    read = read_gguf_blocks if where.hf_name in blocks else read_gguf_groups
                    yield where.hf_name, read(path, file, info, rows=rows, advance=advance)
                    continue
                tensor = read_gguf_tensor(path, file, info, dtype=dtype, rows=rows, advance=advance)
                if where.subtract:
                    tensor -= where.subtract
                yield where.hf_name, tensor.t() if where.transpose else tensor
                del tensor  # before the next one is read


def gguf_tensors(files: ModelFiles) -> dict[str, GGUFTensor]:
    """Return the header entries of the tensors by Hugging Face's names."""
    return {where.hf_name: info for _, placed in _placed_tensors(files) for info, where in placed if where is not None}


def _placed_tensors(files: ModelFiles) -> Iterator[tuple[Path, list[tuple[GGUFTensor, Placement | None]]]]:
    """Yield the tensors of each file in their order; the metadata of the first shard applies to all shards."""
    architecture = str(read_gguf(files.weight_files[0]).metadata["general.architecture"])
    num_experts = files.config.get("num_experts", 0)
    for path in files.weight_files:
        stored = sorted(read_gguf(path).tensors.values(), key=lambda tensor: tensor.offset)
        infos = chain.from_iterable(_cut_by_expert(path, tensor, num_experts) for tensor in stored)
        yield path, [(info, _placed(path, architecture, info, files)) for info in infos]


def _placed(path: Path, architecture: str, info: GGUFTensor, files: ModelFiles) -> Placement | None:
    try:
        where = place_tensor(architecture, info.name, files.config)
    except KeyError as error:
        raise StartupError(f"{path}: tensor {info.name!r} is unknown to the architecture {architecture!r}.") from error
    num_rows = info.shape[0] if info.shape else 1
    if where is not None and where.heads and num_rows % (2 * where.heads):
        raise StartupError(f"{path}: tensor {info.name!r}: {num_rows} rows don't split into {where.heads} heads.")
    return where


def _cut_by_expert(path: Path, tensor: GGUFTensor, num_experts: int) -> Iterator[GGUFTensor]:
    """Yield the header entries of a tensor's experts; if the tensor does not hold experts, its own entry.

    llama.cpp stores the matrices of a layer's experts as one tensor, `blk.0.ffn_gate_exps.weight`. The parts have the
    names that its first files with experts used, `blk.0.ffn_gate.3.weight`. Only header entries change, so every type
    is supported.
    """
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
