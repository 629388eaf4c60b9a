"""Checks the arguments of a model that several ranks compute: what is not supported with `tensor_parallel_size`."""

from octavo_engine.config import EngineConfig
from octavo_engine.wire.errors import StartupError


def check_parallel(config: EngineConfig) -> None:
    """Raise StartupError for an argument that is not supported with several ranks."""
    if config.tensor_parallel_size > 1 and config.async_scheduling:
        raise StartupError(
            f"tensor_parallel_size={config.tensor_parallel_size} is not supported with async_scheduling yet: leave one "
            "of them out."
        )
