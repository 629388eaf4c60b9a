"""Builds an `EngineConfig` from `LLM(...)` keywords or `octavo serve` flags, under vLLM's names.

No argument is silently ignored: an unknown name, a value out of range and a feature that is not implemented each raise
an error that lists the accepted values. `vllm.py` has vLLM's other arguments; a log line names those without effect.
"""

import difflib
from collections.abc import Mapping
from typing import Any

from octavo_engine.settings.config import EngineConfig, num_ranks
from octavo_engine.settings.declare import all_settings
from octavo_engine.settings.lora import check_adapter_name, check_num_adapters
from octavo_engine.settings.speculative import speculation_setting, unused_fields
from octavo_engine.settings.vllm import (
    CALL_ARGUMENTS,
    EMBED,
    ENGINE_ARGUMENTS,
    OFFLINE_ARGUMENTS,
    UnusedArgument,
    VllmArgument,
    find_unused,
)
from octavo_engine.wire.errors import StartupError

_ARGUMENTS: Mapping[str, VllmArgument] = ENGINE_ARGUMENTS | OFFLINE_ARGUMENTS


def resolve_config(**arguments: Any) -> EngineConfig:
    """Build the configuration. Raises TypeError for an unknown name, StartupError for an unsupported value."""
    declared = {setting.name for setting in all_settings(EngineConfig)}
    arguments |= speculation_setting(arguments)
    for name in arguments:
        if name not in declared and name not in _ARGUMENTS:
            raise TypeError(_unknown(name, declared))
    unused_arguments(arguments)
    chosen = {name: value for name, value in arguments.items() if name in declared}
    config = EngineConfig(**chosen | _json_settings(arguments) | runner_setting(arguments))
    _check_lora(config)
    _check_async_scheduling(config)
    _check_hosts(config)
    return config


def _check_lora(config: EngineConfig) -> None:
    """Raise StartupError if adapters are given but not enabled, if there are too many, or if two have one name."""
    names = [module.name for module in config.lora_modules]
    if names and not config.enable_lora:
        raise StartupError(f"lora_modules names the adapter {names[0]!r}, which needs --enable-lora: add it.")
    check_num_adapters(len(names))
    for index, name in enumerate(names):
        check_adapter_name(name, taken=config.served_model_name or (config.model,))
        if name in names[:index]:
            raise StartupError(f"lora_modules has the name {name!r} twice: give each adapter a name of its own.")


def _check_async_scheduling(config: EngineConfig) -> None:
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if config.async_scheduling and (size := getattr(config, name)) > 1:
            raise StartupError(f"{name}={size} is not supported with async_scheduling yet: leave one of them out.")
    if config.speculative_config is not None and config.async_scheduling:  # the next step's drafts follow its tokens
        raise StartupError("async_scheduling does not work with speculative_config: leave one of them out.")


def _check_hosts(config: EngineConfig) -> None:
    size, nnodes, node_rank = num_ranks(config), config.nnodes, config.node_rank
    if size % nnodes:
        problem = f"nnodes={nnodes} does not divide the number of ranks, {size}: make it a divisor of {size}."
    elif node_rank >= nnodes:
        problem = (
            f"node_rank={node_rank} must be below nnodes={nnodes}: the first host has 0, the last one {nnodes - 1}."
        )
    elif config.headless and node_rank == 0:
        problem = "headless is for hosts other than the first, which serves the API: leave it out, or set node_rank."
    elif node_rank > 0 and not config.headless:
        problem = f"node_rank={node_rank} needs headless: only the first host serves; add --headless to octavo serve."
    else:
        return
    raise StartupError(problem)


def unused_arguments(arguments: Mapping[str, Any]) -> list[UnusedArgument]:
    """Return arguments of vLLM that are accepted but have no effect. Raises StartupError for a refused value."""
    own = EngineConfig.__dataclass_fields__.keys()
    others = {name: value for name, value in arguments.items() if name in _ARGUMENTS and name not in own}
    return [*unused_fields(arguments.get("speculative_config")), *find_unused(_ARGUMENTS, others)]


def _json_settings(arguments: Mapping[str, Any]) -> dict[str, bool]:
    """Return fields of `EngineConfig` that vLLM has in `structured_outputs_config`, or had as arguments once."""
    config = arguments.get("structured_outputs_config") or {}
    values = {}
    for name in ("disable_any_whitespace", "disable_additional_properties"):
        for value in (arguments.get(f"guided_decoding_{name}"), config.get(name)):
            if value is not None:
                values[name] = value
    return values


def check_call(arguments: dict[str, Any]) -> None:
    """Check extra keywords of an `LLM` method: TypeError for an unknown name, StartupError for an unsupported value."""
    for name in arguments:
        if name not in CALL_ARGUMENTS:
            raise TypeError(f"unexpected keyword argument {name!r}.")
    list(find_unused(CALL_ARGUMENTS, arguments))


def _unknown(name: str, known: set[str]) -> str:
    near = difflib.get_close_matches(name, known | set(_ARGUMENTS), n=3)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    return f"{name!r} is not an engine argument.{hint}"


def runner_setting(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return `runner` as `task` or `convert` set it. Raises StartupError if they contradict `runner`."""
    names = [name for name in ("task", "convert") if arguments.get(name) in EMBED]
    if not names:
        return {}
    if arguments.get("runner") == "generate":
        raise StartupError(f"runner='generate' and {names[0]}='embed' contradict each other: omit one of them.")
    return {"runner": "pooling"}
