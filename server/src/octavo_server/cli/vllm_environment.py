"""Environment variables of `vllm serve` that `octavo serve` and `octavo route` read, and the check of their values."""

import os

from octavo_engine.log_format import LOGGING_LEVELS
from octavo_engine.settings.arg_types import seconds
from octavo_engine.settings.declare import Setting, all_settings
from octavo_engine.settings.vllm import ENGINE_VARIABLES, LOGGING_LEVEL, unused_variables
from octavo_engine.wire.errors import StartupError

from octavo_server.config import ServerConfig

READY_TIMEOUT_VARIABLE = "VLLM_ENGINE_READY_TIMEOUT_S"
READY_TIMEOUT = Setting(text="Most seconds until the engine is ready.", parse=seconds, env=(READY_TIMEOUT_VARIABLE,))
ADAPTERS_VARIABLE = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
_DECLARED = {name for declared in all_settings(ServerConfig) for name in declared.env if name.startswith("VLLM_")}
SERVER_VARIABLES = ENGINE_VARIABLES | {READY_TIMEOUT_VARIABLE, ADAPTERS_VARIABLE} | _DECLARED


def unused_server_variables() -> list[str]:
    """Log lines about variables of vLLM without effect: one line, or none. Raises StartupError for a wrong level."""
    level = os.environ.get(LOGGING_LEVEL, "INFO")
    if level.upper() not in LOGGING_LEVELS:
        raise StartupError(f"${LOGGING_LEVEL} is {level!r}: set it to one of {', '.join(LOGGING_LEVELS)}, or unset it.")
    return unused_variables(os.environ, SERVER_VARIABLES)


def allows_adapter_updates() -> bool:
    return os.environ.get(ADAPTERS_VARIABLE, "").strip().lower() in ("1", "true")
