"""Reads the settings and the header of a LoRA adapter: a folder that peft has saved. It imports no torch.

Every setting and every tensor that the engine would not apply is refused, so that an adapter never answers differently
than in training. Errors are StartupErrors in one line with the folder, the value and a remedy.
"""

import logging
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo_engine.sources.file_selection import ADAPTER_FILES
from octavo_engine.sources.json_file import read_json_object
from octavo_engine.sources.progress import Advance, ignore_progress
from octavo_engine.sources.safetensors_header import SafeTensor, read_safetensors
from octavo_engine.wire.errors import StartupError

logger = logging.getLogger(__name__)

SETTINGS_FILE, TENSORS_FILE = ADAPTER_FILES
PICKLED_FILE = "adapter_model.bin"
_PREFIX = "base_model.model."
_PARTS = {"a": ".lora_A.weight", "b": ".lora_B.weight"}
_FLOATS = ("F64", "F32", "F16", "BF16")
#: Values of `init_lora_weights` that leave the base model's weights as they are.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
#: Settings that must be unset, and what they train or change.
_UNSUPPORTED = {
    "use_dora": "magnitudes (DoRA)",
    "lora_bias": "biases",
    "modules_to_save": "whole modules",
    "trainable_token_indices": "embeddings of tokens",
    "target_parameters": "parameters outside linear layers",
    "layer_replication": "copies of layers",
    "alora_invocation_tokens": "a part of the prompt only",
    "use_qalora": "groups of inputs (QALoRA)",
    "use_bdlora": "block-diagonal matrices",
    "kasa_config": "singular values (KaSA)",
    "arrow_config": "a choice between adapters",
    "monteclora_config": "distributions of weights",
}
#: Limits of sizes that an adapter's author chooses, because adapters are read while requests run.
MAX_FILE_BYTES = 4 * 2**20  # the settings, and the tensors' header
MAX_MODULE_CHARS, MAX_PATTERN_CHARS = 128, 256
MAX_WORK = 2**21  # ways to match a pattern at one place of a name
MAX_MATCHING_S = 2  # CPU time
MAX_VALUE = 2**31
_ATOM = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?:", re.DOTALL)
#: Matches a group that is repeated, or that begins with `(?`: under `(?x)`, a comment may hide a repetition.
_COSTLY_GROUP = re.compile(r"\)\s*[*+{]|\(\?")
_RETRAIN = "train it with plain LoRA, or merge it into the checkpoint and serve the result"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterModule:
    """The term of one module: `scale` times `b` [out_features, rank] times `a` [rank, in_features]."""

    name: str
    rank: int
    scale: float
    a: SafeTensor
    b: SafeTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFiles:
    """An adapter on disk. `modules`: by the module's name in the base model."""

    folder: Path
    modules: Mapping[str, AdapterModule]

    @property
    def tensors_file(self) -> Path:
        return self.folder / TENSORS_FILE

    def check_rank(self, max_rank: int) -> None:
        largest = max(self.modules.values(), key=lambda module: module.rank, default=None)
        if largest is not None and largest.rank > max_rank:
            raise self.error(
                f"'{largest.name}' has rank {largest.rank}; the limit is --max-lora-rank {max_rank}: raise it to at "
                f"least {largest.rank}."
            )

    def error(self, reason: str) -> StartupError:
        return StartupError(f"adapter {self.folder}: {reason}")


def read_adapter(folder: Path, advance: Advance = ignore_progress) -> AdapterFiles:
    """Read settings and header. Raises StartupError for an adapter that is broken or needs more than plain LoRA."""
    files = AdapterFiles(folder=folder, modules={})
    if not folder.is_dir():
        raise files.error("there is no such folder: give the folder that peft's save_pretrained has written.")
    logger.info("adapter %s: reading its files", folder)  # before a read that may hang
    settings = read_json_object(folder / SETTINGS_FILE, max_bytes=MAX_FILE_BYTES, advance=advance)
    _check_settings(files, settings)
    if (folder / PICKLED_FILE).is_file() and not files.tensors_file.is_file():
        raise files.error(
            f"it has {PICKLED_FILE}, a pickled file, which could run code: save it with safe_serialization=True as "
            f"{TENSORS_FILE}."
        )
    pairs: dict[str, dict[str, SafeTensor]] = {}
    header = read_safetensors(files.tensors_file, max_header_bytes=MAX_FILE_BYTES, advance=advance)
    for tensor in header.values():
        module, part = _split_name(files, tensor)
        pairs.setdefault(module, {})[part] = tensor
    if not pairs:
        raise files.error(f"{TENSORS_FILE} has no tensors: train the adapter, then save it again.")
    patterns = {key: _Patterns(files, settings, key) for key in ("rank_pattern", "alpha_pattern")}
    modules = (_module(files, settings, patterns, name, parts) for name, parts in sorted(pairs.items()))
    return AdapterFiles(folder=folder, modules={module.name: module for module in modules})


def _check_settings(files: AdapterFiles, settings: Mapping[str, Any]) -> None:
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise files.error(f"peft_type is {kind!r}, but only 'LORA' is supported: {_RETRAIN}.")
    for name, trained in _UNSUPPORTED.items():
        if settings.get(name):
            raise files.error(f"{name}={settings[name]!r} trains {trained}, which is not supported: {_RETRAIN}.")
    if settings.get("bias") not in (None, "none"):
        raise files.error(f"bias={settings['bias']!r} trains biases, which is not supported: {_RETRAIN}.")
    start = settings.get("init_lora_weights", True)
    if start not in _PLAIN_STARTS:
        raise files.error(
            f"init_lora_weights={start!r} changes the base model's weights: convert it to plain LoRA by peft's "
            "save_pretrained(path_initial_model_for_weight_conversion=...)."
        )


def _split_name(files: AdapterFiles, tensor: SafeTensor) -> tuple[str, str]:
    """Return the module and "a" or "b"."""
    name = tensor.name.removeprefix(_PREFIX)
    if ".lora_embedding_" in name or re.search(r"(embed_tokens|wte|lm_head)\.(base_layer\.)?weight$", name):
        raise files.error(
            f"it has the tensor '{tensor.name}', so it trains embeddings or has a grown vocabulary, which is not "
            f"supported: {_RETRAIN}."
        )
    if tensor.dtype not in _FLOATS:
        raise files.error(f"tensor '{tensor.name}' has the type {tensor.dtype}: use one of {', '.join(_FLOATS)}.")
    for part, suffix in _PARTS.items():
        if name.endswith(suffix):
            return name.removesuffix(suffix), part
    raise files.error(f"it has the tensor '{tensor.name}', which is no part of plain LoRA: {_RETRAIN}.")


def _module(
    files: AdapterFiles,
    settings: Mapping[str, Any],
    patterns: Mapping[str, "_Patterns"],
    name: str,
    parts: dict[str, SafeTensor],
) -> AdapterModule:
    if missing := [suffix for part, suffix in _PARTS.items() if part not in parts]:
        raise files.error(f"the tensor '{_PREFIX}{name}{missing[0]}' is missing: save the adapter again.")
    if len(name) > MAX_MODULE_CHARS:
        raise files.error(f"the name of the module '{name[:MAX_MODULE_CHARS]}…' exceeds {MAX_MODULE_CHARS} characters.")
    a, b = parts["a"], parts["b"]
    rank = _number(files, settings, "r", patterns["rank_pattern"], name)
    for tensor, dim in ((a, 0), (b, 1)):
        if len(tensor.shape) != 2 or tensor.shape[dim] != rank:
            raise files.error(
                f"tensor '{tensor.name}' has shape {tensor.shape}, but {SETTINGS_FILE} gives it rank {rank:g}: the two "
                "files do not belong together; save the adapter again."
            )
    alpha = _number(files, settings, "lora_alpha", patterns["alpha_pattern"], name)
    scale = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    return AdapterModule(name=name, rank=int(rank), scale=scale, a=a, b=b)


def _number(files: AdapterFiles, settings: Mapping[str, Any], key: str, patterns: "_Patterns", module: str) -> float:
    """Return a module's value: as in peft, the value of the first pattern that matches the end of the module's name."""
    value = patterns.value_of(module)
    value = settings.get(key) if value is None else value
    least = 1 if key == "r" else -MAX_VALUE
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= MAX_VALUE:
        raise files.error(f"{SETTINGS_FILE}: {key} of '{module}' is {value!r}, but must be a number.")
    return value


class _Patterns:
    """The values of `rank_pattern` or `alpha_pattern`. Python's `re` holds the GIL while it matches, which stops the
    whole engine, so only patterns that end quickly for every name are accepted."""

    def __init__(self, files: AdapterFiles, settings: Mapping[str, Any], key: str) -> None:
        self._files, self._key = files, key
        self._end_s = time.thread_time() + MAX_MATCHING_S
        given = settings.get(key) or {}
        if not isinstance(given, dict):
            raise files.error(f"{SETTINGS_FILE}: {key} is {given!r}, but must be an object of patterns and numbers.")
        self._values = [(self._compiled(pattern), value) for pattern, value in given.items()]

    def value_of(self, module: str) -> Any:
        for pattern, value in self._values:
            self._check_time()
            if pattern.match(module):
                return value
        return None

    def _compiled(self, pattern: str) -> "re.Pattern[str]":
        self._check_time()
        if len(pattern) > MAX_PATTERN_CHARS or _work_of(pattern) > MAX_WORK:
            raise self._files.error(
                f"{SETTINGS_FILE}: {self._key} has the pattern {pattern[:MAX_PATTERN_CHARS]!r}, which may run for "
                "long: write the names of the modules, without repeated groups and options."
            )
        try:
            return re.compile(rf"(.*\.)?({pattern})$")
        except re.error as error:
            raise self._files.error(
                f"{SETTINGS_FILE}: {self._key} has the invalid pattern {pattern!r}: {error}."
            ) from None

    def _check_time(self) -> None:
        if time.thread_time() > self._end_s:
            raise self._files.error(
                f"{SETTINGS_FILE}: {self._key} takes longer than {MAX_MATCHING_S} s: use fewer patterns of names."
            )


def _work_of(pattern: str) -> float:
    """Return an upper bound of the number of ways in which a pattern can match at one position of a module's name."""
    parts = _ATOM.sub(lambda atom: "(" if atom[0] == "(?:" else "a", pattern)
    if _COSTLY_GROUP.search(parts):
        return math.inf
    num_groups, num_repeats = parts.count("("), sum(map(parts.count, "*+?{"))
    num_choices = (parts.count("|") / max(num_groups, 1) + 1) ** max(num_groups, 1)
    return float(num_choices * MAX_MODULE_CHARS**num_repeats)
