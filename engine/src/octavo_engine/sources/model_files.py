"""`ModelFiles`: the files of one model, located but not loaded.

Tokenizer, config, weights and fingerprint read from this record, so that none of them searches folders itself.
`config` always has Hugging Face's keys: those of `config.json`, or the same keys made from GGUF metadata.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo_engine.sources.quantised_config import QuantisedConfig

LOAD_FORMATS = ("auto", "safetensors", "pt", "gguf", "dummy")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """`load_format` is resolved: never "auto". `weight_files` holds all shards in order, none for "dummy"."""

    name: str  # the model's name or URI as the user gave it
    root: Path
    load_format: str
    config: dict[str, Any]
    weight_files: tuple[Path, ...] = ()
    gguf: Path | None = None  # file (first shard) whose header has config and tokenizer
    quantisation: QuantisedConfig | None = None  # set if the checkpoint's layers are quantised
    generation: dict[str, Any] = field(default_factory=dict)
    tokenizer_json: Path | None = None
    tokenizer_config: dict[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    named_chat_templates: dict[str, str] = field(default_factory=dict)  # those with another name than "default"
