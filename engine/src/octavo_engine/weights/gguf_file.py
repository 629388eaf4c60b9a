"""Reads all tensors of a GGUF checkpoint, with Hugging Face's names and value conventions.

llama.cpp's conversion renames tensors and changes some: it interleaves the rows of llama's q and k (its RoPE rotates
adjacent dimensions, HF's rotates halves), adds Gemma's norm offset of 1 to the stored norms, and transposes GPT-2's
Conv1D. `ARCHITECTURES` lists the inverse of each change, which is applied when a tensor is read.
"""

import re
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo_engine.ops.group_tensor import GroupTensor
from octavo_engine.ops.native_quantised import QuantisedTensor
from octavo_engine.sources.gguf_header import GGUFTensor, read_gguf
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.weights.gguf_tensors import (
    interleaved_rows,
    read_gguf_blocks,
    read_gguf_groups,
    read_gguf_tensor,
)
from octavo_engine.wire.errors import StartupError

_STACK = re.compile(r"(blk\.\d+\.ffn_(?:gate|up|down))_exps\.weight")
_SHARED_GATE = re.compile(r"blk\.\d+\.ffn_gate_inp_shexp\.weight")
#: RoPE tables, which `sources/gguf_config.py` adds to the config.
_IN_CONFIG = re.compile(r"(rope_freqs|rope_factors_(long|short)|blk\.\d+\.(attn_rot_embd|rope_freqs))\.weight")
#: A layer's tensor; the second number is an expert's.
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)(?:\.(\d+))?\.(weight|bias)")

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_LLAMA = {**_ATTENTION, **_MLP, "ffn_norm": "post_attention_layernorm"}
_MIXTRAL = {**_LLAMA, "ffn_gate_inp": "block_sparse_moe.gate"}
_MIXTRAL_EXPERTS = {
    "ffn_gate": "block_sparse_moe.experts.{}.w1",
    "ffn_up": "block_sparse_moe.experts.{}.w3",
    "ffn_down": "block_sparse_moe.experts.{}.w2",
}
_MOE = {**_LLAMA, "ffn_gate_inp": "mlp.gate"}
_EXPERTS = {
    "ffn_gate": "mlp.experts.{}.gate_proj",
    "ffn_up": "mlp.experts.{}.up_proj",
    "ffn_down": "mlp.experts.{}.down_proj",
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA2 = {
    **_ATTENTION,
    **_MLP,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI3 = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
_GPT2_TOP = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_GPT2 = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFNames:
    """The names of one architecture. `experts`: names with a placeholder for the expert's number.

    `interleaved`: tensors whose rows are in llama.cpp's RoPE order.
    """

    block: dict[str, str]
    experts: dict[str, str] = field(default_factory=dict)
    top: dict[str, str] = field(default_factory=lambda: _TOP)
    layer_prefix: str = "model.layers"
    interleaved: frozenset[str] = frozenset()
    norm_offset: float = 0.0
    transposed: frozenset[str] = frozenset()


ARCHITECTURES: dict[str, GGUFNames] = {
    "llama": GGUFNames(block=_MIXTRAL, experts=_MIXTRAL_EXPERTS, interleaved=frozenset({"attn_q", "attn_k"})),
    "qwen2": GGUFNames(block=_LLAMA),
    "qwen2moe": GGUFNames(block={**_MOE, **_SHARED_EXPERT}, experts=_EXPERTS),
    "qwen3": GGUFNames(block={**_LLAMA, **_QK_NORM}),
    "qwen3moe": GGUFNames(block={**_MOE, **_QK_NORM}, experts=_EXPERTS),
    "olmoe": GGUFNames(block={**_MOE, **_QK_NORM}, experts=_EXPERTS),
    "gemma2": GGUFNames(block=_GEMMA2, norm_offset=1.0),
    "gemma3": GGUFNames(block={**_GEMMA2, **_QK_NORM}, norm_offset=1.0),
    "phi3": GGUFNames(block=_PHI3),
    "gpt2": GGUFNames(
        block=_GPT2,
        top=_GPT2_TOP,
        layer_prefix="transformer.h",
        transposed=frozenset({"attn_qkv", "attn_output", "ffn_up", "ffn_down"}),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A GGUF tensor's Hugging Face name and the inverse of its conversion. `heads`: 0 without interleaving."""

    hf_name: str
    heads: int = 0
    subtract: float = 0.0
    transpose: bool = False


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


def place_tensor(architecture: str, name: str, config: dict[str, Any]) -> Placement | None:
    """Return a tensor's placement; None for a RoPE table, which the config holds. Raises KeyError if it is unknown."""
    if _IN_CONFIG.fullmatch(name):
        return None
    names = ARCHITECTURES[architecture]
    match = _BLOCK.fullmatch(name)
    if match is None:
        stem, _, suffix = name.rpartition(".")
        return Placement(hf_name=f"{names.top[stem]}.{suffix}", subtract=_norm_offset(names, stem))
    layer, stem, expert, suffix = match.groups()
    hf_stem = names.block[stem] if expert is None else names.experts[stem].format(expert)
    return Placement(
        hf_name=f"{names.layer_prefix}.{layer}.{hf_stem}.{suffix}",
        heads=_num_heads(stem, config) if stem in names.interleaved else 0,
        subtract=_norm_offset(names, stem),
        transpose=suffix == "weight" and stem in names.transposed,
    )


def _num_heads(stem: str, config: dict[str, Any]) -> int:
    num_heads = int(config["num_attention_heads"])
    return num_heads if stem == "attn_q" else int(config.get("num_key_value_heads", num_heads))


def _norm_offset(names: GGUFNames, stem: str) -> float:
    return names.norm_offset if stem.endswith("norm") else 0.0
