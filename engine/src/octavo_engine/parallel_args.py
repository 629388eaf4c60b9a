"""Checks the arguments of a model that several ranks compute: what is not supported with `tensor_parallel_size`."""

from octavo_engine.config import EngineConfig
from octavo_engine.wire.errors import StartupError


def check_parallel(config: EngineConfig) -> None:
    """Raise StartupError for an argument that is not supported with several ranks."""
    if config.tensor_parallel_size == 1:
        return
    unsupported = {
        "async_scheduling": bool(config.async_scheduling),
        "enable_lora": config.enable_lora,
    }
    for name, is_set in unsupported.items():
        if is_set:
            raise StartupError(
                f"tensor_parallel_size={config.tensor_parallel_size} is not supported with {name} yet: leave one of "
                "them out."
            )
