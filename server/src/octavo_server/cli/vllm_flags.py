"""Flags of `vllm serve` for which Octavo has no setting: accepted, if no output depends on them, or refused.

`octavo_engine.settings.vllm` lists the engine's, this module the HTTP server's. The start logs those without effect.
The environment variables of `vllm serve` that `octavo serve` and `octavo route` read are listed here too.
"""

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo_engine.log_format import LOGGING_LEVELS
from octavo_engine.settings.arg_types import seconds
from octavo_engine.settings.declare import Setting, all_settings
from octavo_engine.settings.speculative import unused_fields
from octavo_engine.settings.vllm import (
    ALWAYS_ON,
    ENGINE_ARGUMENTS,
    ENGINE_VARIABLES,
    LOGGING_LEVEL,
    OLD_SWITCH,
    SETTING,
    SWITCH,
    VllmArgument,
    describe_unused,
    find_unused,
    unused_variables,
)
from octavo_engine.wire.errors import StartupError

from octavo_server.config import ServerConfig

_NO_PLUGIN: dict[str, Any] = {"missing": "the server runs no code of others."}
_OFF = VllmArgument(fulfilled=(False,), is_switch=True)

SERVER_ARGUMENTS: dict[str, VllmArgument] = {
    **dict.fromkeys(("enable_prompt_tokens_details", "enable_request_id_headers"), ALWAYS_ON),
    "enable_server_load_tracking": ALWAYS_ON,
    "disable_log_requests": replace(ALWAYS_ON, note="--enable-log-requests logs requests"),
    **dict.fromkeys(("enable_log_deltas", "enable_offline_docs", "enable_flash_late_interaction"), SWITCH),
    **dict.fromkeys(("log_error_stack", "cohere_is_reasoning_model"), SWITCH),
    **dict.fromkeys(("h11_max_incomplete_event_size", "h11_max_header_count", "cohere_format"), SETTING),
    **dict.fromkeys(("data_parallel_supervisor_port", "dp_supervisor_probe_interval_s"), SETTING),
    **dict.fromkeys(("dp_supervisor_probe_timeout_s", "dp_supervisor_probe_failure_threshold"), SETTING),
    "disable_frontend_multiprocessing": OLD_SWITCH,
    "middleware": VllmArgument(is_list=True, **_NO_PLUGIN),
    "tool_parser_plugin": VllmArgument(fulfilled=("",), **_NO_PLUGIN),
    "tool_server": VllmArgument(missing="the server runs no tools.", remedy="run tools in the client."),
    "log_config_file": VllmArgument(missing="loggers can't be configured.", remedy="see --log-format."),
    "enable_ssl_refresh": replace(_OFF, missing="certificates are read at the start.", remedy="restart to renew them."),
    "fingerprint_mode": VllmArgument(fulfilled=("full",), missing="system_fingerprint has one form."),
    "fingerprint_value": VllmArgument(missing="system_fingerprint has one form."),
    "tokens_only": replace(_OFF, missing="all endpoints are served."),
    "grpc": replace(_OFF, missing="the API is HTTP."),
}

TABLE: Mapping[str, VllmArgument] = ENGINE_ARGUMENTS | SERVER_ARGUMENTS
READY_TIMEOUT_VARIABLE = "VLLM_ENGINE_READY_TIMEOUT_S"
READY_TIMEOUT = Setting(text="Most seconds until the engine is ready.", parse=seconds, env=(READY_TIMEOUT_VARIABLE,))
ADAPTERS_VARIABLE = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
_DECLARED = {name for declared in all_settings(ServerConfig) for name in declared.env if name.startswith("VLLM_")}
SERVER_VARIABLES = ENGINE_VARIABLES | {READY_TIMEOUT_VARIABLE, ADAPTERS_VARIABLE} | _DECLARED


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the tables that the parser doesn't have yet."""
    group = parser.add_argument_group(
        "vLLM's other flags",
        "Flags of `vllm serve` that change no output here are accepted, and the log names them once. Others are "
        "refused with the reason.",
    )
    taken = parser._option_string_actions
    missing = {name: argument for name, argument in TABLE.items() if _flag(name) not in taken}
    parser.set_defaults(vllm_arguments=frozenset(missing))
    for name, argument in missing.items():
        flags = [_flag(name), *argument.flags]
        if argument.is_switch:
            group.add_argument(*flags, action=argparse.BooleanOptionalAction, help=argparse.SUPPRESS)
        else:
            nargs = "+" if argument.is_list else None
            group.add_argument(*flags, type=json_or_text, nargs=nargs, help=argparse.SUPPRESS)


def vllm_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The engine's arguments that were given, for `resolve_config`."""
    return _given(args, ENGINE_ARGUMENTS)


def check_server_arguments(args: argparse.Namespace) -> None:
    """Raises StartupError for a flag of the HTTP server with a refused value."""
    list(find_unused(SERVER_ARGUMENTS, _given(args, SERVER_ARGUMENTS)))


def unused_flags(args: argparse.Namespace) -> list[str]:
    """Log lines about flags that were accepted without effect."""
    unused = [*unused_fields(args.speculative_config), *find_unused(TABLE, _given(args, TABLE))]
    return describe_unused(unused, as_flags=True)


def _given(args: argparse.Namespace, table: Mapping[str, VllmArgument]) -> dict[str, Any]:
    added: frozenset[str] = args.vllm_arguments
    return {n: value for n in table if n in added and (value := getattr(args, n)) is not None}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def unused_server_variables() -> list[str]:
    """Log lines about variables of vLLM without effect: one line, or none. Raises StartupError for a wrong level."""
    level = os.environ.get(LOGGING_LEVEL, "INFO")
    if level.upper() not in LOGGING_LEVELS:
        raise StartupError(f"${LOGGING_LEVEL} is {level!r}: set it to one of {', '.join(LOGGING_LEVELS)}, or unset it.")
    return unused_variables(os.environ, SERVER_VARIABLES)


def allows_adapter_updates() -> bool:
    return os.environ.get(ADAPTERS_VARIABLE, "").strip().lower() in ("1", "true")
