"""Builds a `ModelConfig` from a checkpoint's files: fills in defaults and accepts both spellings of each key.

For the architectures of Octavo's classes, the rules are those of transformers 4 and 5; for all others,
`models.registry` asks transformers to complete the config. If keys are missing, head_dim and the number of KV heads
follow from the number of heads. dtype may be `torch_dtype` or `dtype`, and RoPE `rope_theta` + `rope_scaling` or
`rope_parameters`. Of a multimodal config, the text part is used, and `vision` keeps the whole config. Fields exist for
values that the engine needs; layers read other values from `hf`, which has no nesting.
"""

import re
from typing import Any

from octavo_engine.settings.records import ModelConfig, VisionConfig
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.sources.safetensors_header import read_safetensors
from octavo_engine.wire.errors import StartupError

#: Largest whole numbers, far above those of real models. Products of sizes fit into 64 bits.
LIMITS = {
    "num_hidden_layers": 2**11,
    "hidden_size": 2**20,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "head_dim": 2**14,
    "num_experts": 2**14,
    "max_position_embeddings": 2**31,
    "original_max_position_embeddings": 2**31,
    "sliding_window": 2**31,
}
_OTHER_LIMIT, _REAL_LIMIT = 2**24, 2.0**53
DIMENSIONS = (
    *("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"),
    "max_position_embeddings",
)
#: The architectures of `models.registry`, which this module cannot import: they need torch.
OWN = re.compile(
    r"(GPT2|OPT|Gemma[23]|Gemma3Text|Llama|Mistral|Mixtral|Olmoe|Phi3|Qwen[23](Moe)?)(ForCausalLM|LMHeadModel|Model)"
)
#: Keys by their usual name, then by GPT-2's and OPT's names.
_HIDDEN = ("hidden_size", "n_embd")
_LAYERS = ("num_hidden_layers", "n_layer")
_HEADS = ("num_attention_heads", "n_head")
_CONTEXT = ("max_position_embeddings", "n_positions", "n_ctx")

#: For each family that takes images, by `model_type`: the accepted types of its vision tower, the default one first,
#: and transformers' default of `image_token_id`.
VISION_FAMILIES: dict[str, tuple[tuple[str, ...] | None, int]] = {
    "idefics3": (None, 128_257),
    "internvl": (None, 151_667),
    "llava": (("clip_vision_model", "pixtral"), 32_000),
    "mistral3": (("pixtral",), 10),
    "qwen2_5_vl": (None, 151_655),
    "qwen2_vl": (None, 151_655),
    "qwen3_vl": (None, 151_655),
    "smolvlm": (None, 128_257),
}
#: Qwen-VL, whose published configs may lack nesting: the default number of RoPE frequencies of each coordinate, and
#: whether the coordinates' frequencies are interleaved.
QWEN_FAMILIES: dict[str, tuple[list[int], bool]] = {
    "qwen2_5_vl": ([16, 24, 24], False),
    "qwen2_vl": ([16, 24, 24], False),
    "qwen3_vl": ([24, 20, 20], True),
}
#: Types of the families' text parts, if a config omits them; for all other families, the type is that of Llama.
_DEFAULT_TEXT = {"internvl": "qwen2", "mistral3": "mistral", **{family: f"{family}_text" for family in QWEN_FAMILIES}}
_TEXT_ARCHITECTURES = {"Gemma3ForConditionalGeneration": "Gemma3ForCausalLM"}
#: Architectures of text parts by their `model_type`.
_VISION_TEXT = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
}
_HEADS_OF_TEXT = ("lm_head.weight", "language_model.lm_head.weight")
_QWEN2: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
}
_QWEN2_VL: dict[str, Any] = {
    "vocab_size": 152_064,
    "hidden_size": 8192,
    "intermediate_size": 29_568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-5,
    "max_window_layers": 80,
    "rope_theta": 1_000_000.0,
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
}
#: transformers' defaults, which nested configs omit.
_NESTED_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    "llama": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "mistral": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen2": _QWEN2,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen2_vl_text": _QWEN2_VL,
    "qwen3": _QWEN2 | {"head_dim": 128},
    "qwen3_vl_text": _QWEN2 | {"head_dim": 128, "max_position_embeddings": 128_000, "rope_theta": 500_000.0},
}
#: Types of RoPE that a family has under other names.
_RENAMED_ROPES: dict[Any, dict[str, str]] = {"phi3": {"su": "longrope", "yarn": "longrope"}}
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_SUPPORTED_DTYPES = ("float32", "float16", "bfloat16")


def load_model_config(files: ModelFiles) -> ModelConfig:
    """Build the config. Raises StartupError if `config.json` lacks required values or contradicts itself.

    The dimensions of an architecture that is not one of Octavo's are 0, but for `vocab_size` where it can be read.
    """
    hf = flatten_config(files.config)
    vision = _vision(files)
    if vision is not None and files.load_format == "safetensors":
        hf["tie_word_embeddings"] = not _has_head(files)
    architecture, vocab = _architecture(files.name, hf), hf.get("vocab_size")
    unknown: dict[str, Any] = dict.fromkeys(DIMENSIONS, 0) | {"vocab_size": vocab if type(vocab) is int else 0}
    return ModelConfig(
        architecture=architecture,
        **own_dimensions(files.name, architecture, hf) if OWN.fullmatch(architecture) else unknown,
        dtype=_dtype(files, hf),
        hf=hf,
        generation=files.generation,
        eos_token_ids=_eos_token_ids(files.generation, hf),
        bos_token_id=files.generation.get("bos_token_id", hf.get("bos_token_id")),
        name=files.name,
        vision=vision,
    )


def own_dimensions(name: str, architecture: str, hf: dict[str, Any]) -> dict[str, Any]:
    """Return `DIMENSIONS` by the keys of Octavo's classes. GPT-2 and OPT have no keys for KV heads and head_dim."""
    numbers = ConfigNumbers(name, hf)
    num_heads, hidden_size = numbers.required(_HEADS), numbers.required(_HIDDEN)
    others = ConfigNumbers(name, {} if architecture.startswith(("GPT2", "OPT")) else hf)
    num_kv_heads = others.optional(("num_key_value_heads",), num_heads)
    if num_heads % num_kv_heads:
        raise StartupError(f"{name}: {num_heads} attention heads cannot share {num_kv_heads} KV heads.")
    head_dim = others.optional(("head_dim",), max(1, hidden_size // num_heads))
    vocab_size, num_layers = numbers.required(("vocab_size",)), numbers.required(_LAYERS)
    values = (vocab_size, hidden_size, num_layers, num_heads, num_kv_heads, head_dim, numbers.required(_CONTEXT))
    return dict(zip(DIMENSIONS, values, strict=True))


def flatten_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the text model's config: nested keys override outer keys; the architecture is the text-only one."""
    config = nested_config(config)
    text = config.get("text_config")
    if not isinstance(text, dict):
        return config
    outer = {key: value for key, value in config.items() if not key.endswith("_config")}
    if _is_vision_family(config):
        text = {**text, "model_type": text.get("model_type") or _DEFAULT_TEXT.get(config["model_type"], "llama")}
    kind, names = str(text.get("model_type")), config.get("architectures") or []
    defaults = _NESTED_DEFAULTS.get(kind, {})
    stated = {key: value for key, value in text.items() if value is not None or key in defaults.keys() - outer.keys()}
    flat = {**defaults, **outer, **stated}
    flat["architectures"] = [_TEXT_ARCHITECTURES.get(name, name) for name in names]
    if _is_vision_family(config):
        flat["architectures"] = [_VISION_TEXT[kind]] if kind in _VISION_TEXT else names
    return flat


def nested_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return a multimodal model's config with a `text_config`: Qwen2-VL and Qwen2.5-VL have its keys outside."""
    family = config.get("model_type")
    if family not in QWEN_FAMILIES or isinstance(config.get("text_config"), dict):
        return config
    is_outer = re.compile(r"architectures|model_type|(image|v\w+)_token_id|\w+_config").fullmatch
    outer = {key: value for key, value in config.items() if is_outer(key)}
    text = {key: value for key, value in config.items() if not is_outer(key)}
    return outer | {"text_config": text | {"model_type": f"{family}_text"}}


def _is_vision_family(config: dict[str, Any]) -> bool:
    return config.get("model_type") in VISION_FAMILIES


def _vision(files: ModelFiles) -> VisionConfig | None:
    """Return the settings of the vision tower. Raises StartupError for an unsupported tower or text part."""
    config, text = nested_config(files.config), flatten_config(files.config)
    if config.get("model_type") == "internvl_chat":
        raise StartupError(
            f"{files.name}: this checkpoint has its own code, which is never run: use the checkpoint of the same model "
            "whose name ends with '-hf', such as OpenGVLab/InternVL3-1B-hf."
        )
    if not isinstance(config.get("text_config"), dict):
        return None
    if not _is_vision_family(config):
        architecture = _architecture(files.name, text)
        if "vision_config" in config and not OWN.fullmatch(architecture):
            raise StartupError(
                f"{files.name}: architecture '{architecture}' is not supported: for images, use a model of type "
                f"{', '.join(VISION_FAMILIES)}; for text only, Gemma 3 also runs."
            )
        return None
    family = str(config["model_type"])
    towers, image_token_id = VISION_FAMILIES[family]
    found = (config.get("vision_config") or {}).get("model_type", towers and towers[0])
    if towers is not None and found not in towers:
        raise StartupError(
            f"{files.name}: a model of type {family!r} with a vision tower of type {found!r} is not supported yet: use "
            f"one with a tower of type {', '.join(towers)}."
        )
    if text["model_type"] not in _VISION_TEXT:
        raise StartupError(
            f"{files.name}: a model of type {family!r} with a text part of type {text['model_type']!r} is not "
            f"supported yet: use one with a text part of type {', '.join(_VISION_TEXT)}."
        )
    stated = {"image_token_id": config.get("image_token_id", config.get("image_token_index", image_token_id))}
    number = ConfigNumbers(files.name, stated).required(("image_token_id",))
    return VisionConfig(family=family, image_token_id=number, hf=config)


def _has_head(files: ModelFiles) -> bool:
    """Return whether the files have a logits head of their own: a nested config may not say whether it is tied."""
    return any(name in read_safetensors(path) for path in files.weight_files for name in _HEADS_OF_TEXT)


def rope_parameters(hf: dict[str, Any]) -> dict[str, Any]:
    """Return RoPE parameters in one form for all transformers versions: `rope_type`, `rope_theta`, the type's own keys.

    transformers 5 writes `rope_parameters`; for Gemma 3 it holds one such dictionary per layer type, which is
    returned in the same structure (keys "full_attention", "sliding_attention").
    """
    parameters = hf.get("rope_parameters")
    if isinstance(parameters, dict) and any(isinstance(value, dict) for value in parameters.values()):
        return {kind: _one_rope(hf, value or {}) for kind, value in parameters.items()}
    return _one_rope(hf, parameters or hf.get("rope_scaling") or {})


def _one_rope(hf: dict[str, Any], parameters: Any) -> dict[str, Any]:
    if not isinstance(parameters, dict):
        raise StartupError(f"RoPE parameters in config.json must be a JSON object, got {parameters!r:.60}.")
    rope = {"rope_theta": hf.get("rope_theta") or 10000.0, **parameters}
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    rope["rope_type"] = _RENAMED_ROPES.get(str(hf.get("model_type")), {}).get(str(kind), kind)
    family = str(hf.get("model_type")).removesuffix("_text")
    if family in QWEN_FAMILIES:
        sections, take_turns = QWEN_FAMILIES[family]
        rope = {"mrope_section": sections} | rope | {"mrope_interleaved": take_turns}
        rope["rope_type"] = "default" if kind == "mrope" else kind
    for key in ("original_max_position_embeddings", "partial_rotary_factor"):
        if key not in rope and hf.get(key) is not None:
            rope[key] = hf[key]
    return {key: value for key, value in rope.items() if key != "type"}


def context_length(config: ModelConfig) -> int:
    """Return the model's context length in tokens: `max_position_embeddings`, extended by RoPE scaling as in vLLM.

    It is 0 for a config that `models.registry` has not completed.
    """
    rope = rope_parameters(config.hf)
    rope = rope.get("full_attention", rope)
    is_scaled = rope.get("rope_type") in ("linear", "dynamic", "yarn") and rope.get("factor") is not None
    if not is_scaled or not config.max_position_embeddings or str(config.hf.get("model_type")).startswith("gemma3"):
        return config.max_position_embeddings
    numbers, length = ConfigNumbers(config.name, rope), config.max_position_embeddings
    if rope["rope_type"] == "yarn":
        length = numbers.optional(("original_max_position_embeddings",), length)
    scaled = {"max_position_embeddings": int(length * numbers.real("factor", 1.0))}
    return ConfigNumbers(config.name, scaled).required(_CONTEXT)


class ConfigNumbers:
    """The numbers of a `config.json`, all of which are positive. Raises StartupError for another value, and for one
    above its limit."""

    def __init__(self, name: str, hf: dict[str, Any]) -> None:
        self._name = name
        self._hf = hf

    @classmethod
    def of(cls, config: ModelConfig) -> "ConfigNumbers":
        return cls(config.name, config.hf)

    def required(self, keys: tuple[str, ...], *, lowest: int = 1) -> int:
        """Return the whole number of the first key that is there. The first of `keys` decides its limit."""
        key = next((key for key in keys if self._hf.get(key) is not None), keys[0])
        value, limit = self._hf.get(key), LIMITS.get(keys[0], _OTHER_LIMIT)
        if type(value) is not int or not lowest <= value <= limit:
            raise self._error(key, value, f"a whole number from {lowest} to {limit}")
        return value

    def optional(self, keys: tuple[str, ...], default: int, *, lowest: int = 1) -> int:
        return default if all(self._hf.get(key) is None for key in keys) else self.required(keys, lowest=lowest)

    def check_dimensions(self) -> None:
        for keys in (_HIDDEN, _LAYERS, _HEADS, _CONTEXT, ("vocab_size",)):
            self.required(keys)

    def window(self, absent: int | None) -> int | None:
        """Return the sliding window, None if the key is null. `absent`: the window if there is no key."""
        if "sliding_window" not in self._hf:
            return absent
        return None if self._hf["sliding_window"] is None else self.required(("sliding_window",))

    def real(self, key: str, default: float) -> float:
        value = default if self._hf.get(key) is None else self._hf[key]
        if type(value) not in (int, float) or not 0 < value <= _REAL_LIMIT:
            raise self._error(key, value, f"a number up to {_REAL_LIMIT:.0f}")
        return float(value)

    def nullable_real(self, key: str, absent: float | None) -> float | None:
        """Return the number, None if the key is null. `absent`: the number if there is no key."""
        return self.real(key, 0.0) if self._hf.get(key) is not None else None if key in self._hf else absent

    def _error(self, key: str, value: object, remedy: str) -> StartupError:
        problem = f"{key} in config.json must be a positive number, got {value!r:.60}"
        return StartupError(f"{self._name}: {problem}: use {remedy}.")


def _architecture(name: str, hf: dict[str, Any]) -> str:
    architectures = hf.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise StartupError(f"{name}: config.json must list an architecture (key `architectures`).")
    return str(architectures[0])


def _dtype(files: ModelFiles, hf: dict[str, Any]) -> str:
    """Return the config's dtype; by default that of the largest tensor in the first file, or float32.

    transformers has the same defaults.
    """
    stated = hf.get("dtype") or hf.get("torch_dtype")
    if isinstance(stated, str) and stated.removeprefix("torch.") in _SUPPORTED_DTYPES:
        return stated.removeprefix("torch.")
    if files.load_format == "safetensors" and files.weight_files:
        tensors = read_safetensors(files.weight_files[0]).values()
        largest = max(tensors, key=lambda tensor: tensor.num_bytes, default=None)
        return _DTYPES.get(largest.dtype, "float32") if largest else "float32"
    return "float32"


def _eos_token_ids(generation: dict[str, Any], hf: dict[str, Any]) -> tuple[int, ...]:
    """Return the ids that either file lists: chat models often list the token that ends a turn in only one."""
    ids: list[int] = []
    for value in (generation.get("eos_token_id"), hf.get("eos_token_id")):
        ids += value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(id_) is int for id_ in ids):
        raise StartupError(
            f"eos_token_id must be a token id or a list of token ids, got {ids!r:.60}: correct the file."
        )
    return tuple(dict.fromkeys(ids))
