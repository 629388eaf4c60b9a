"""Reads how a checkpoint of the library compressed-tensors was quantised."""

from octavo_engine.sources.packed_config import PackedConfig, QuantizationSettings

_LAYOUTS = {"pack-quantized": (4, 8), "int-quantized": (8,)}
_STRATEGIES = ("group", "channel")
_OTHERS = "use a checkpoint without it, or an unquantised one"


def read_compressed_config(settings: QuantizationSettings) -> PackedConfig:
    """Check the settings. Raises StartupError with value and remedy."""
    layout = settings.get("format")
    groups = settings.get("config_groups") or {}
    group = next(iter(groups.values())) if isinstance(groups, dict) and len(groups) == 1 else None
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        remedy = "use a checkpoint whose layers have equal settings"
        raise settings.refuse(f"config_groups of {list(groups)} are not supported", remedy)
    layout = group.get("format") or layout
    if layout not in _LAYOUTS:
        raise settings.refuse(f"format={layout!r} is not supported", f"use one of {', '.join(_LAYOUTS)}")
    for key in ("kv_cache_scheme", "transform_config", "sparsity_config"):
        if settings.get(key):
            raise settings.refuse(f"{key} is not supported", _OTHERS)
    weights = settings.of(group["weights"])
    if weights.get("type", default="int") != "int":
        raise settings.refuse(f"weights of the type {weights.get('type')!r} are not supported", "use type int")
    strategy = weights.get("strategy") or ("channel" if weights.get("group_size") is None else "group")
    if strategy not in _STRATEGIES:
        raise settings.refuse(f"strategy={strategy!r} is not supported", f"use one of {', '.join(_STRATEGIES)}")
    return PackedConfig(
        method="compressed-tensors",
        layout=layout,
        bits=weights.bits(_LAYOUTS[layout]),
        group_size=weights.group_size() if strategy == "group" else None,
        symmetric=bool(weights.get("symmetric", default=True)),
        activation_bits=_activation_bits(settings, group),
        ignored=settings.names("ignore"),
    )


def _activation_bits(settings: QuantizationSettings, group: dict[str, object]) -> int | None:
    """Return the bits of the activations for which the checkpoint was made; None if they are not quantised."""
    activations = group.get("input_activations")
    if not activations:
        return None
    input_settings = settings.of(activations) if isinstance(activations, dict) else None
    if input_settings is None or input_settings.get("type", default="int") != "int":
        raise settings.refuse(f"input_activations={activations!r} are not supported", _OTHERS)
    return input_settings.bits((4, 8))
