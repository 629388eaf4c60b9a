"""`TransformersDecoder`: any decoder of transformers over the paged KV cache, for architectures without a class here.

transformers builds the model without memory, and our layers take the place of its modules. `forward` runs the base
model on the rows of a step, as one sequence without a mask: the backend knows which rows belong together. `logits` runs
the whole model with a stub as its base, because some families scale or cap there. The library is optional: only
`registry` imports this module.
"""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar

import torch
import transformers
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from octavo_engine.devices.memory import size
from octavo_engine.layers.layer import BuildContext, WeightSlot
from octavo_engine.models.model import Inputs, Model
from octavo_engine.models.transformers_attention import NAME, PagedAttention, UnsupportedAttention, record_attention
from octavo_engine.models.transformers_latents import expands_latents, find_latents
from octavo_engine.models.transformers_layers import (
    FixedRope,
    RowExperts,
    WeightIsReadError,
    linears_of,
    replace_layers,
    restore,
    tie_head,
)
from octavo_engine.models.transformers_ranks import divide, record_calls
from octavo_engine.models.transformers_support import (
    bounded_modules,
    check_specs,
    find_family,
    refusal,
    with_dimensions,
)
from octavo_engine.models.transformers_trial import ModelPart
from octavo_engine.models.transformers_weights import (
    CheckpointNames,
    allocate,
    keep_wide_types,
    own_tensors,
    plain_slots,
)
from octavo_engine.ops.attention import AttentionSpec, ForwardContext, LayerKVSpec
from octavo_engine.ops.recording import WaitWatch
from octavo_engine.settings.records import ModelConfig
from octavo_engine.wire.errors import StartupError, first_line

_LOGGER = logging.getLogger(__name__)
_META = torch.device("meta")
_FAILS_ON_META = "its code fails on torch's meta device"


class _Rows(nn.Module):
    """The base model of `logits`, which returns the rows that it gets."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> MoeModelOutputWithPast:
        return MoeModelOutputWithPast(last_hidden_state=inputs_embeds)


class TransformersDecoder(Model):
    calls_torch: ClassVar[bool] = True

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(with_dimensions(config), build)
        family, family_config = find_family(config)
        with suppress(StartupError):  # the family's code may read attributes of its norms or feed-forward blocks
            self._build(family, family_config, build, has_blocks=True)
            return
        self._build(family, family_config, build, has_blocks=False)

    def _build(
        self, family: type[PreTrainedModel], family_config: PreTrainedConfig, build: BuildContext, *, has_blocks: bool
    ) -> None:
        config = self.config
        model = self._on_meta(family, family_config)
        self.base_prefix = f"{model.base_model_prefix}."
        self.names = CheckpointNames(model)
        self._given_names = {self.names.renamed(given): given for given in build.block_formats}
        formats = {name: build.block_formats[given] for name, given in self._given_names.items()}
        build = replace(build, block_formats=formats)
        ropes = FixedRope.of_model(model)
        part = self._divide(model, build)
        with _refusing(config.architecture, "it cannot be built"), bounded_modules():
            replace_layers(model, self.names, build, part, has_blocks=has_blocks)
        self.specs = self._trace(model)
        if part.heads and part.heads != [(spec.num_heads, spec.kv.num_kv_heads) for spec in self.specs]:
            raise refusal(config.architecture, "the heads of a rank are others than planned")
        check_specs(config.architecture, family_config, self.specs, build.max_model_len)
        if part.latents:  # `config.json` states the size of a head's RoPE
            self.config = replace(self.config, num_kv_heads=1, head_dim=max(spec.kv.head_dim for spec in self.specs))
        own = own_tensors(model)
        if build.device != _META:
            with _refusing(config.architecture, "it cannot be allocated"):
                for rope in ropes:
                    rope.release()
                allocate(model, own, build.device)
                for rope in ropes:
                    rope.fix(build.max_model_len)
            tie_head(model, build)
        self._slots = plain_slots(own, part.rows)
        self._ignored = [*model.all_tied_weights_keys, *(model._keys_to_ignore_on_load_unexpected or ())]
        self.base = model.base_model
        setattr(model, model.base_model_prefix, _Rows())
        self.causal_lm = model

    def forward(
        self, inputs: Inputs, positions: Int[Tensor, " tokens"], ctx: ForwardContext
    ) -> Float[Tensor, "tokens hidden"]:
        name = "inputs_embeds" if inputs.is_floating_point() else "input_ids"
        rows = {name: inputs[None], "position_ids": positions[None]}
        output = self.base(**rows, use_cache=False, octavo=PagedAttention(self.specs, ctx))
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows vocab"]:
        logits = _logits(self.causal_lm, hidden)
        return logits[:, :0] if self.build.group.rank else logits

    def kv_specs(self) -> list[LayerKVSpec]:
        return [spec.kv for spec in self.specs]

    def in_files(self, names: Set[str]) -> frozenset[str]:
        own = super().in_files(names)
        return own | {given for name, given in self._given_names.items() if name in own}

    def renamed(self, given: str) -> str:
        name = self.names.renamed(given)
        return name if self._has_slot(name) else given

    def given(self, name: str) -> str:
        return self.names.given(name)

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        linears = [*chain.from_iterable(map(linears_of, self.modules()))]
        experts, others = (sum(isinstance(each, kind) for each in self.modules()) for kind in (RowExperts, nn.Linear))
        whole, ranks = [each for each in linears if each.spec.is_whole], self.build.group.size
        undivided = (
            f"; {len(whole)} of them, {size(sum(each.weights_bytes() for each in whole))}, on each of {ranks} ranks"
        )
        _LOGGER.info(
            "%s is run by transformers %s, slower than a class of Octavo: %d linear layers and %d blocks of experts "
            "are Octavo's (%s%s), %d linear layers and all else are transformers' own (%s)%s",
            *(self.config.architecture, transformers.__version__, len(linears), experts),
            *(size(super().weights_bytes()), undivided if ranks > 1 else "", others, size(self._own_bytes())),
            self._kv_note,
        )
        super().load_weights(self.names.convert(weights, self._has_slot))

    def finish_loading(self, check: Callable[[], None] = lambda: None) -> None:
        super().finish_loading(check)
        if self.build.group.size > 1:  # ranks end their loading at different times, and a step exchanges values
            return
        with _refusing(self.config.architecture, "its first step fails"), WaitWatch() as watch:
            specs = record_attention(self.base, self.build.device).specs
        self.waiting_operator = watch.operator
        if specs != self.specs:
            raise refusal(self.config.architecture, "its attention on this device is another one than planned")

    def weights_bytes(self) -> int:
        return super().weights_bytes() + self._own_bytes()

    def _own_bytes(self) -> int:
        return sum(x.nbytes for x in (*self.parameters(), *self.buffers()))

    @cached_property
    def _slot_names(self) -> frozenset[str]:
        return frozenset(slot.name for slot in self._weight_slots())

    def _has_slot(self, name: str) -> bool:
        return name in self._slot_names or self.base_prefix + name in self._slot_names

    def _weight_slots(self) -> Iterable[WeightSlot]:
        return chain(super()._weight_slots(), self._slots)

    def _may_ignore(self, name: str) -> bool:
        return super()._may_ignore(name) or any(re.search(each, self.names.renamed(name)) for each in self._ignored)

    def _on_meta(self, family: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
        """Build the model on the meta device, for inference."""
        dtype = self.build.dtype
        with _refusing(self.config.architecture, "it cannot be built"), _META, bounded_modules():
            model: PreTrainedModel = family._from_config(  # type: ignore[no-untyped-call]
                config, dtype=dtype, attn_implementation=NAME
            )
        keep_wide_types(model, dtype)
        model.eval()  # type: ignore[no-untyped-call]
        return model

    def _divide(self, model: PreTrainedModel, build: BuildContext) -> ModelPart:
        """Return this rank's part of the model. Raises StartupError."""
        part, self._kv_note = ModelPart(), ""
        if build.group.size > 1 or any(map(expands_latents, model.modules())):
            with _refusing(self.config.architecture, _FAILS_ON_META), _experts_on_meta(model):
                recorder, calls = record_calls(model)
                self._kv_note = find_latents(model, calls, build, part)
                if build.group.size > 1:
                    divide(model, self.config.name, build, recorder, calls, part)
        return part

    def _trace(self, model: PreTrainedModel) -> list[AttentionSpec]:
        """Run the model once without memory; return the attention of its layers. Raises StartupError.

        A linear layer whose weight the code of the family reads becomes transformers' own again.
        """
        name, base, hidden = self.config.architecture, model.base_model, self.config.hidden_size
        while True:
            try:
                with _refusing(name, _FAILS_ON_META), _experts_on_meta(model):
                    specs = record_attention(base, _META).specs
                setattr(model, model.base_model_prefix, _Rows())
                with _refusing(name, "its code for logits fails"), torch.inference_mode():
                    shape = tuple(_logits(model, torch.empty(2, hidden, dtype=self.build.dtype, device=_META)).shape)
            except WeightIsReadError as error:
                setattr(model, model.base_model_prefix, base)
                restore(model, error.layer)
                continue
            setattr(model, model.base_model_prefix, base)
            if shape != (2, self.config.vocab_size):
                raise refusal(name, f"its logits have shape {shape} for 2 rows")
            return specs


def _logits(causal_lm: PreTrainedModel, hidden: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows vocab"]:
    logits: Tensor = causal_lm(inputs_embeds=hidden[None], use_cache=False).logits[0]
    return logits.float()


@contextmanager
def _experts_on_meta(model: PreTrainedModel) -> Iterator[None]:
    """Let experts use products that the meta device has in all types; of the usual ones it has only bfloat16's."""
    usual = model.get_experts_implementation()
    model.set_experts_implementation("batched_mm")
    try:
        yield
    finally:
        model.set_experts_implementation(usual)


@contextmanager
def _refusing(architecture: str, failure: str) -> Iterator[None]:
    """Turn errors of transformers' code into a refusal that names the architecture, and what failed."""
    try:
        yield
    except (WeightIsReadError, StartupError, torch.OutOfMemoryError):
        raise
    except UnsupportedAttention as error:
        raise refusal(architecture, f"it {error}") from error
    except Exception as error:
        raise refusal(architecture, f"{failure}: {first_line(error)}") from error
