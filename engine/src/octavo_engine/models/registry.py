"""Architectures that a class of Octavo runs, by name in `config.json`; transformers runs all others."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch

from octavo_engine.devices.step_inputs import Tower
from octavo_engine.layers.attention_heads import check_heads
from octavo_engine.layers.layer import BuildContext
from octavo_engine.models.gemma2 import Gemma2
from octavo_engine.models.gemma3 import Gemma3
from octavo_engine.models.gpt2 import GPT2
from octavo_engine.models.llama import Llama
from octavo_engine.models.mistral import Mistral
from octavo_engine.models.mixtral import Mixtral
from octavo_engine.models.model import Model
from octavo_engine.models.olmoe import OLMoE
from octavo_engine.models.opt import OPT
from octavo_engine.models.phi3 import Phi3
from octavo_engine.models.qwen2 import Qwen2
from octavo_engine.models.qwen2_moe import Qwen2MoE
from octavo_engine.models.qwen3 import Qwen3
from octavo_engine.models.qwen3_moe import Qwen3MoE
from octavo_engine.ops.group_tensor import WeightFormat
from octavo_engine.ops.rank_group import Group
from octavo_engine.ops.stages import Stages
from octavo_engine.settings.records import ModelConfig, ModelImpl, VisionConfig
from octavo_engine.wire.errors import StartupError

ARCHITECTURES: dict[str, type[Model]] = {
    "GPT2LMHeadModel": GPT2,
    "Gemma2ForCausalLM": Gemma2,
    "Gemma3ForCausalLM": Gemma3,
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": Mistral,
    "MixtralForCausalLM": Mixtral,
    "OPTForCausalLM": OPT,
    "OlmoeForCausalLM": OLMoE,
    "Phi3ForCausalLM": Phi3,
    "Qwen2ForCausalLM": Qwen2,
    "Qwen2MoeForCausalLM": Qwen2MoE,
    "Qwen3ForCausalLM": Qwen3,
    "Qwen3MoeForCausalLM": Qwen3MoE,
}


#: The names of the same models without a head, as `AutoModel` saves them.
_WITHOUT_HEAD = {
    f"{name.removesuffix('ForCausalLM').removesuffix('LMHeadModel')}Model": model
    for name, model in ARCHITECTURES.items()
} | {"Gemma3TextModel": Gemma3}


def build_model(
    config: ModelConfig,
    *,
    impl: ModelImpl = "auto",
    dtype: torch.dtype,
    device: torch.device | str,
    max_model_len: int,
    block_formats: Mapping[str, WeightFormat] | None = None,
    quantise_to: WeightFormat | None = None,
    group: Group | None = None,
    stages: Stages | None = None,
) -> Model:
    """Build a model with empty weights; call `load_weights` and `finish_loading` next.

    `impl`: a class of Octavo, or transformers'; "auto": transformers' if there is no class of Octavo. `block_formats`,
    `quantise_to`, `group`, `stages`: as in `BuildContext`. Raises StartupError for an architecture, a
    length or a number of ranks that is not supported.
    """
    build = BuildContext(
        dtype=dtype,
        device=torch.device(device),
        max_model_len=max_model_len,
        block_formats=block_formats or {},
        quantise_to=quantise_to,
        group=group or Group(),
        stages=stages or Stages(),
    )
    check_ranks(config, impl, build.group.size, build.stages.size)
    own = _find_class(config, impl)
    if own is not None:
        model = own(config, build)
        model.tower = None if config.vision is None else _build_tower(config.vision, build)
        return model
    decoder: Model = _import(config, "transformers_decoder").TransformersDecoder(config, build)
    return decoder


def is_own(config: ModelConfig, impl: ModelImpl) -> bool:
    """Return True if a class of Octavo runs the model, False if transformers runs it. Raises StartupError."""
    return _find_class(config, impl) is not None


def complete_config(config: ModelConfig, impl: ModelImpl) -> ModelConfig:
    """Return the config with the dimensions of an architecture that transformers runs. Raises StartupError.

    `impl`: as for `build_model`, which completes the config itself.
    """
    if is_own(config, impl):
        return config
    completed: ModelConfig = _import(config, "transformers_support").with_dimensions(config)
    return completed


def _find_class(config: ModelConfig, impl: ModelImpl) -> type[Model] | None:
    """Return the class of Octavo that runs a model, None if transformers runs it. Raises StartupError."""
    own = ARCHITECTURES.get(config.architecture)
    if config.pooling is not None:
        own = own or _WITHOUT_HEAD.get(config.architecture)
        if own is None or impl == "transformers":
            raise StartupError(
                f"architecture '{config.architecture}' makes no embeddings in this version: use a model of one of "
                f"{', '.join(sorted((*ARCHITECTURES, *_WITHOUT_HEAD)))}, without --model-impl transformers."
            )
    if own is not None and impl != "transformers":
        return own
    if impl == "octavo":
        raise StartupError(
            f"architecture '{config.architecture}' is not one of Octavo's ({', '.join(sorted(ARCHITECTURES))}): omit "
            "--model-impl, so that transformers runs it."
        )
    return None


def check_ranks(config: ModelConfig, impl: ModelImpl, num_ranks: int, num_stages: int) -> None:
    """Raise StartupError if the model cannot be divided among so many stages, and each of these among its ranks."""
    if num_ranks == num_stages == 1:
        return
    if is_own(config, impl):
        check_heads(config.name, config.num_heads, config.num_kv_heads, num_ranks)
    elif num_stages > 1:
        raise StartupError(
            f"--pipeline-parallel-size {num_stages} is not supported where transformers runs the architecture "
            f"'{config.architecture}': use 1, or a model of one of {', '.join(sorted(ARCHITECTURES))}."
        )


def _build_tower(config: VisionConfig, build: BuildContext) -> Tower | None:
    """Build a model's vision tower; None without transformers, which text does not need."""
    try:
        module = import_module("octavo_engine.models.vision_tower")
    except ModuleNotFoundError:
        return None
    tower: Tower = module.VisionTower(config, build)
    return tower


def _import(config: ModelConfig, module: str) -> Any:
    """Import a module of this package that needs transformers, which is optional, and slow to import."""
    try:
        return import_module(f"octavo_engine.models.{module}")
    except ModuleNotFoundError as error:
        raise StartupError(
            f"architecture '{config.architecture}' needs transformers, which is not installed (no module "
            f"{error.name!r}): pip install 'octavo-engine[transformers]', or use one of the architectures "
            f"{', '.join(sorted(ARCHITECTURES))}."
        ) from error
