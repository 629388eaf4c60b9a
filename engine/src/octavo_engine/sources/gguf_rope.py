"""Converts the RoPE parameters of a GGUF file to Hugging Face's keys.

llama.cpp stores llama3 and longrope scaling as tensors of one factor per frequency (`rope_freqs`,
`rope_factors_long/short`). Hugging Face's `longrope` divides each frequency by its factor, which is the meaning of
these tensors: so both become `longrope`, for llama3 with an explicit attention factor of 1.
"""

import struct
from typing import Any

from octavo_engine.sources.gguf_header import GGUFFile
from octavo_engine.sources.gguf_values import GGUFValues
from octavo_engine.wire.errors import StartupError

DEFAULT_THETA = 10000.0


def rope_config(values: GGUFValues) -> dict[str, Any]:
    config: dict[str, Any] = {"rope_theta": values.get("rope.freq_base", DEFAULT_THETA)}
    scaling = _rope_factors(values) or _rope_scaling(values)
    if scaling:
        config["rope_scaling"] = scaling
    return config


def _rope_scaling(values: GGUFValues) -> dict[str, Any] | None:
    kind, factor = values.get("rope.scaling.type"), values.get("rope.scaling.factor")
    if factor is None and values.get("rope.scale_linear"):
        kind, factor = "linear", values.get("rope.scale_linear")
    if kind in (None, "none") or not factor or factor == 1.0:
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise StartupError(f"{values.header.path}: RoPE scaling {kind!r} without its factor tensors is not supported.")
    scaling = {"rope_type": "yarn", "factor": factor}
    names = {
        "original_context_length": "original_max_position_embeddings",
        "yarn_attn_factor": "attention_factor",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    }
    scaling |= {ours: values.get(f"rope.scaling.{key}") for key, ours in names.items()}
    return {key: value for key, value in scaling.items() if value is not None}


def _rope_factors(values: GGUFValues) -> dict[str, Any] | None:
    tensors = values.header.tensors
    short = tensors.get("rope_freqs.weight") or tensors.get("rope_factors_short.weight")
    long = tensors.get("rope_freqs.weight") or tensors.get("rope_factors_long.weight")
    if short is None or long is None:
        return None
    context = values.get("context_length")
    original = values.get("rope.scaling.original_context_length", context)
    scaling = {
        "rope_type": "longrope",
        "short_factor": _read_floats(values.header, short.name),
        "long_factor": _read_floats(values.header, long.name),
        "original_max_position_embeddings": original,
        "factor": context / original,
    }
    attention_factor = 1.0 if short is long else values.get("rope.scaling.attn_factor")
    return scaling if attention_factor is None else {**scaling, "attention_factor": attention_factor}


def _read_floats(header: GGUFFile, name: str) -> list[float]:
    tensor = header.tensors[name]
    if tensor.type.name != "F32" or len(tensor.shape) != 1:
        raise StartupError(f"{header.path}: tensor {name!r} is {tensor.type.name} {tensor.shape}, not a row of F32.")
    with header.path.open("rb") as file:
        file.seek(tensor.offset)
        return list(struct.unpack(f"<{tensor.shape[0]}f", file.read(tensor.num_bytes)))
