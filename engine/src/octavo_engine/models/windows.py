"""Which layers see only a sliding window, from `layer_types` or the older fields that transformers makes it from."""

from collections.abc import Callable

from octavo_engine.config import ModelConfig


def layer_types(config: ModelConfig, is_sliding: Callable[[int], bool]) -> tuple[str, ...]:
    """`is_sliding`: the architecture's rule where the checkpoint doesn't list its layers."""
    listed = config.hf.get("layer_types")
    if listed:
        return tuple(listed)
    return tuple("sliding_attention" if is_sliding(idx) else "full_attention" for idx in range(config.num_layers))


def windows(types: tuple[str, ...], window: int | None) -> tuple[int | None, ...]:
    return tuple(window if kind == "sliding_attention" else None for kind in types)
