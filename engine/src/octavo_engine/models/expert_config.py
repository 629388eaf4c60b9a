"""The experts of a model, from its `config.json`; absent keys get the architecture's defaults."""

from typing import Any

from octavo_engine.layers.moe import MoESpec
from octavo_engine.settings.records import ModelConfig
from octavo_engine.sources.model_config import ConfigNumbers
from octavo_engine.wire.errors import StartupError

_MOST_EXPERTS = 2**17  # in all layers together
#: Keys for the number of experts: in published files, and in transformers 5.
_NUM_EXPERTS = ("num_experts", "num_local_experts")


def moe_spec(
    config: ModelConfig,
    *,
    num_experts: int,
    top_k: int,
    inner: tuple[str, int],
    shared: tuple[str, int] | None = None,
    **fields: Any,
) -> MoESpec:
    """Build the spec of a layer. Raises StartupError for impossible numbers.

    `num_experts` and `top_k` are defaults; `inner` and `shared` are the keys of the experts' sizes, with defaults.
    """
    numbers = ConfigNumbers.of(config)
    num_experts = numbers.optional(_NUM_EXPERTS, num_experts)
    top_k = numbers.optional(("num_experts_per_tok",), top_k)
    if top_k > num_experts:
        raise StartupError(
            f"{config.name}: num_experts_per_tok is {top_k}, but the model has {num_experts} experts: "
            f"use at most {num_experts}."
        )
    if num_experts * config.num_layers > _MOST_EXPERTS:
        raise StartupError(
            f"{config.name}: {config.num_layers} layers of {num_experts} experts each are more than {_MOST_EXPERTS} "
            "experts: correct config.json."
        )
    return MoESpec(
        num_experts=num_experts,
        top_k=top_k,
        inner_size=numbers.optional(inner[:1], inner[1]),
        shared_size=numbers.optional(shared[:1], shared[1]) if shared else None,
        **fields,
    )


def qwen_experts(config: ModelConfig, spec: MoESpec) -> tuple[MoESpec | None, ...]:
    """Return the experts per layer: `decoder_sparse_step` and `mlp_only_layers` make some layers dense."""
    step = ConfigNumbers.of(config).optional(("decoder_sparse_step",), 1)
    dense = config.hf.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise StartupError(
            f"{config.name}: mlp_only_layers in config.json must be a list of layers, got {dense!r:.60}."
        )
    return tuple(None if idx in dense or (idx + 1) % step else spec for idx in range(config.num_layers))
