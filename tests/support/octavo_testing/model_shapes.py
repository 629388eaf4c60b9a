"""The `config.json` of small models that users often serve first, for tests of memory that load no weights.

Values are those of the checkpoints on the hub. Only keys that decide shapes, lengths and positions are kept, and Phi's
longrope factors, which have no effect on shapes, are all 1.
"""

import json
from pathlib import Path
from typing import Any

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
_LLAMA3: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
_GEMMA3_1B: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "bos_token_id": 2,
    "eos_token_id": [1, 106],
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "vocab_size": 262144,
}
_GEMMA3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "eos_token_id": [1, 106],
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
}
_PHI4_MINI: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "bos_token_id": 199999,
    "eos_token_id": 199999,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "num_attention_heads": 24,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"type": "longrope", "long_factor": [1.0] * 48, "short_factor": [1.0] * 48},
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 200064,
}


def _qwen3(hidden: int, intermediate: int, heads: int, **others: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_attention_heads": heads}
    return {**_QWEN3, **sizes, **others}


def _llama3(hidden: int, intermediate: int, heads: int, layers: int, factor: float, **others: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_attention_heads": heads}
    rope = {"rope_type": "llama3", "factor": factor, "high_freq_factor": 4.0, "low_freq_factor": 1.0}
    scaling = {"rope_scaling": {**rope, "original_max_position_embeddings": 8192}}
    return {**_LLAMA3, **sizes, **scaling, "num_hidden_layers": layers, **others}


#: Name on the hub -> `config.json`.
MODEL_CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": _qwen3(1024, 3072, 16),
    "Qwen3-1.7B": _qwen3(2048, 6144, 16),
    "Qwen3-4B": _qwen3(2560, 9728, 32, num_hidden_layers=36),
    "Qwen3-8B": _qwen3(4096, 12288, 32, num_hidden_layers=36, tie_word_embeddings=False),
    "Llama-3.2-1B": _llama3(2048, 8192, 32, 16, 32.0, head_dim=64),
    "Llama-3.2-3B": _llama3(3072, 8192, 24, 28, 32.0, head_dim=128),
    "Llama-3.1-8B": _llama3(4096, 14336, 32, 32, 8.0, tie_word_embeddings=False),
    "Phi-4-mini": _PHI4_MINI,
    "Gemma-3-1B": _GEMMA3_1B,
    "Gemma-3-4B": _GEMMA3_4B,
}


def write_shapes(name: str, folder: Path) -> Path:
    """Write the `config.json` of a model, without weights: load it with `load_format` "dummy". Returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL_CONFIGS[name]))
    return folder
