"""Gemma 3 (text): Gemma 2 with head norms instead of soft caps, five local layers per global one, a RoPE per kind."""

from octavo_engine.layers.rope import RopeSpec, rope_spec
from octavo_engine.models.decoder import Decoder, DecoderSpec, layer_types
from octavo_engine.models.gemma2 import gemma_like
from octavo_engine.settings.records import ModelConfig
from octavo_engine.sources.model_config import ConfigNumbers, rope_parameters

GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0


def _ropes(config: ModelConfig) -> tuple[RopeSpec, RopeSpec]:
    """Return the global and the local RoPE. Before transformers 5 the scaling applied only to global layers."""
    local = {"rope_type": "default", "rope_theta": config.hf.get("rope_local_base_freq", LOCAL_THETA)}
    given = rope_parameters({"rope_theta": GLOBAL_THETA, **config.hf})
    whole = given.get("full_attention", given)
    return rope_spec(config, whole), rope_spec(config, given.get("sliding_attention", local))


class Gemma3(Decoder):
    @staticmethod
    def spec_of(config: ModelConfig) -> DecoderSpec:
        numbers = ConfigNumbers.of(config)
        pattern = numbers.optional(("sliding_window_pattern",), 6)
        types = layer_types(config, lambda idx: (idx + 1) % pattern != 0)
        return gemma_like(
            config,
            types,
            ropes=_ropes(config),
            rope_idx=tuple(int(kind == "sliding_attention") for kind in types),
            head_norm=True,
            final_softcap=numbers.nullable_real("final_logit_softcapping", None),
        )
