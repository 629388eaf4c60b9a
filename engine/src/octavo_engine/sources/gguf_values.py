"""The metadata of one GGUF architecture, by keys without their prefix, and the config keys of all architectures.

Floats are returned as their shortest decimal: GGUF stores 1e-5 as a float32, which reads as 9.999999747378752e-06.
"""

import math
import struct
from collections import Counter
from typing import Any

from octavo_engine.sources.gguf_header import GGUFFile
from octavo_engine.wire.errors import StartupError

_KEYS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_REQUIRED = ("context_length", "block_count", "embedding_length", "attention.head_count")


class GGUFValues:
    """The metadata of one architecture, by key without its prefix."""

    def __init__(self, header: GGUFFile, architecture: str) -> None:
        self.header = header
        self._prefix = architecture + "."
        for key in _REQUIRED:
            self.require(key)

    def get(self, key: str, default: Any = None) -> Any:
        value = self.header.metadata.get(self._prefix + key)
        if value is None:
            return default
        return shortest_float(value) if isinstance(value, float) else value

    def require(self, key: str) -> Any:
        """Return a value. Raises StartupError if the file lacks it."""
        value = self.get(key)
        if value is None:
            raise StartupError(f"{self.header.path}: GGUF metadata lacks {self._prefix}{key}.")
        return value

    def has_tensor(self, name: str) -> bool:
        return name in self.header.tensors

    def common(self) -> dict[str, Any]:
        config = {ours: self.get(key) for key, ours in _KEYS.items() if self.get(key) is not None}
        for key, value in config.items():
            if isinstance(value, list):
                config[key] = self._same_everywhere(key, value)
        config["tie_word_embeddings"] = not self.has_tensor("output.weight")
        config["vocab_size"] = self._vocab_size()
        config["torch_dtype"] = self._dtype()
        return config

    def _same_everywhere(self, key: str, values: list[Any]) -> Any:
        if len(set(values)) != 1:
            raise StartupError(f"{self.header.path}: {key} differs between layers, which is not supported.")
        return values[0]

    def _vocab_size(self) -> int:
        embedding = self.header.tensors.get("token_embd.weight")
        if embedding is None:
            raise StartupError(f"{self.header.path}: has no tensor 'token_embd.weight', so the model is incomplete.")
        if len(embedding.shape) != 2:
            raise StartupError(
                f"{self.header.path}: tensor 'token_embd.weight' has shape {embedding.shape}, not 2 sizes."
            )
        return embedding.shape[0]

    def _dtype(self) -> str:
        """Return the dtype that holds most weights without loss: quantised blocks have float16 scales."""
        elements = Counter[str]()
        for tensor in self.header.tensors.values():
            elements[tensor.type.name] += math.prod(tensor.shape)
        return {"F32": "float32", "BF16": "bfloat16"}.get(elements.most_common(1)[0][0], "float16")


def shortest_float(value: float) -> float:
    """Return the shortest decimal that is the same float32."""
    packed = struct.pack("<f", value)
    candidates = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next((c for c in candidates if struct.pack("<f", c) == packed), value)
