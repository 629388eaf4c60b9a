"""`TransformersDecoder`: any decoder of transformers over the paged KV cache, for architectures without a class here.

transformers builds the model and loads its weights, as it also renames and fuses them; its linear layers then become
our packed ones. `forward` runs the base model on the rows of a step, as one sequence without a mask: the backend knows
which rows belong together. `logits` runs the whole model with a stub as its base, because some families scale or cap
there. The library is optional: only `registry` imports this module.
"""

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any, ClassVar

import torch
import transformers
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.utils import logging as hf_logging

from octavo_engine.layers.layer import BuildContext
from octavo_engine.layers.linear import Linear
from octavo_engine.layers.linear_method import DenseMethod, LinearSpec
from octavo_engine.models.model import Inputs, Model
from octavo_engine.models.transformers_attention import NAME, PagedAttention, UnsupportedAttention, record_specs
from octavo_engine.models.transformers_support import check_specs, find_family, refusal, with_dimensions
from octavo_engine.ops.attention import AttentionSpec, ForwardContext, LayerKVSpec
from octavo_engine.settings.records import ModelConfig
from octavo_engine.wire.errors import StartupError, first_line

_LOGGER = logging.getLogger(__name__)
#: Types of RoPE whose frequencies transformers derives from the longest sequence of a batch.
_MOST_MODULES = 2**17
_META = torch.device("meta")
_VARIABLE_ROPES = ("dynamic", "longrope")


class RowLinear(Linear):
    """A packed layer in place of an `nn.Linear`, for inputs [1, tokens, in_features]. `wide`: fp32 outputs."""

    def __init__(self, module: nn.Linear, build: BuildContext, *, tied: bool, wide: bool) -> None:
        out, size = module.weight.shape
        spec = LinearSpec(in_features=size, outs=(out,), names=("",), bias=module.bias is not None, wide=wide)
        method = DenseMethod(spec, build, tied=module.weight.detach() if tied else None)
        with torch.no_grad():
            if method.weight is not None and not tied:
                method.weight.copy_(module.weight)
            if method.bias is not None:
                method.bias.copy_(module.bias)
        super().__init__(spec, build, method=method)

    def __call__(self, x: Float[Tensor, "*batch in_features"]) -> Float[Tensor, "*batch out_features"]:
        rows = x.flatten(0, -2)
        out = self.wide(rows) if self.spec.wide else super().__call__(rows)
        return out.view(*x.shape[:-1], -1)


class FixedRope(nn.Module):
    """A RoPE module that sees the longest sequence in each step, so that its frequencies never change."""

    def __init__(self, rope: nn.Module, max_model_len: int) -> None:
        super().__init__()
        self.rope, self.last = rope, max_model_len - 1

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **keywords: Any) -> Any:
        positions = torch.cat((position_ids, position_ids.new_full((1, 1), self.last)), 1)
        return tuple(part[:, :-1] for part in self.rope(x, positions, *args, **keywords))


class _Rows(nn.Module):
    """The base model of `logits`, which returns the rows that it gets."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> MoeModelOutputWithPast:
        return MoeModelOutputWithPast(last_hidden_state=inputs_embeds)


class TransformersDecoder(Model):
    loads_lazily: ClassVar[bool] = True
    supports_adapters: ClassVar[bool] = False
    waits_for_device: ClassVar[bool] = True  # the code of a family may

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(with_dimensions(config), build)
        self.family, self.family_config = find_family(config)
        self._adopt(self._on_meta(torch.bfloat16), replace(build, device=_META, dtype=torch.bfloat16))
        self.specs = self._record_specs("its code fails on torch's meta device", _META)
        check_specs(config.architecture, self.family_config, self.specs, build.max_model_len)
        planned = self._on_meta(build.dtype)
        self._shapes = _checkpoint_shapes(planned)
        self._adopt(planned, replace(build, device=_META))
        self._check_logits()

    def forward(
        self, inputs: Inputs, positions: Int[Tensor, " tokens"], ctx: ForwardContext
    ) -> Float[Tensor, "tokens hidden"]:
        name = "inputs_embeds" if inputs.is_floating_point() else "input_ids"
        rows = {name: inputs[None], "position_ids": positions[None]}
        output = self.base(**rows, use_cache=False, octavo=PagedAttention(self.specs, ctx))
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows vocab"]:
        logits: Tensor = self.causal_lm(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits.float()

    def kv_specs(self) -> list[LayerKVSpec]:
        return [spec.kv for spec in self.specs]

    def named_shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Load the weights, all of which transformers gets at once: a value is a tensor, or `[...]` reads it."""
        name = self.config.architecture
        _LOGGER.info("%s is run by transformers %s, slower than a class of Octavo", name, transformers.__version__)
        try:
            with without_progress_bar():
                loaded: Any = self.family.from_pretrained(
                    None,
                    config=self.family_config,
                    state_dict=dict(weights),
                    dtype=self.build.dtype,
                    attn_implementation=NAME,
                    ignore_mismatched_sizes=True,
                    output_loading_info=True,
                )
        except (RuntimeError, ValueError) as error:
            raise StartupError(f"transformers cannot load the weights of {name}: {first_line(error)}") from error
        model, report = loaded
        self._refuse_wrong_weights(report)
        self._adopt(model.to(self.build.device), self.build)

    def finish_loading(self, check: Callable[[], None] = lambda: None) -> None:
        super().finish_loading(check)
        if self._record_specs("its first step fails", self.build.device) != self.specs:
            raise refusal(self.config.architecture, "its attention on this device is another one than planned")

    def weights_bytes(self) -> int:
        return super().weights_bytes() + sum(x.nbytes for x in (*self.parameters(), *self.buffers()))

    def _record_specs(self, failure: str, device: torch.device) -> list[AttentionSpec]:
        try:
            return record_specs(self.base, device)
        except UnsupportedAttention as error:
            raise refusal(self.config.architecture, f"it {error}") from error
        except Exception as error:
            raise refusal(self.config.architecture, f"{failure}: {first_line(error)}") from error

    def _on_meta(self, dtype: torch.dtype) -> PreTrainedModel:
        """Build the model on the meta device, with a RoPE that does not look at the values of positions."""
        config = deepcopy(self.family_config)
        for rope in _rope_parameters(config):
            if rope.get("rope_type") in _VARIABLE_ROPES:
                rope["rope_type"] = "default"
        try:
            with _META, _bounded_modules():
                model: PreTrainedModel = self.family._from_config(  # type: ignore[no-untyped-call]
                    config, dtype=dtype, attn_implementation=NAME
                )
        except Exception as error:
            raise refusal(self.config.architecture, f"it cannot be built: {first_line(error)}") from error
        return model

    def _adopt(self, model: PreTrainedModel, build: BuildContext) -> None:
        """Take over the model: replace its linear layers and variable RoPEs, and its base in `logits`."""
        head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        embedding = model.get_input_embeddings()
        for parent in list(model.modules()):
            for name, module in list(parent.named_children()):
                if type(module) is nn.Linear and module.weight.dtype == build.dtype:
                    tied = module.weight is embedding.weight
                    setattr(parent, name, RowLinear(module, build, tied=tied, wide=module is head))
                elif _has_variable_rope(module):
                    setattr(parent, name, FixedRope(module, build.max_model_len))
        self.base = model.base_model
        setattr(model, model.base_model_prefix, _Rows())
        self.causal_lm = model

    def _check_logits(self) -> None:
        """Compute the shape of logits on the meta device. Raises StartupError."""
        rows = torch.empty(2, self.config.hidden_size, dtype=self.build.dtype, device="meta")
        try:
            with torch.inference_mode():
                shape = tuple(self.logits(rows).shape)
        except Exception as error:
            raise refusal(self.config.architecture, f"its code for logits fails: {first_line(error)}") from error
        if shape != (2, self.config.vocab_size):
            raise refusal(self.config.architecture, f"its logits have shape {shape} for 2 rows")

    def _refuse_wrong_weights(self, report: dict[str, Any]) -> None:
        for name, shape, expected in sorted(report["mismatched_keys"]):
            raise StartupError(f"tensor '{name}' has shape {tuple(shape)}, the model needs {tuple(expected)}.")
        for name in sorted(report["missing_keys"]):
            others = len(report["missing_keys"]) - 1
            more = f", and {others} more tensors" if others else ""
            missing = f"missing tensor '{name}' of shape {self._shapes.get(name)}{more}"
            raise StartupError(f"{missing}: check that all weight files are there.")
        for name in sorted(report["unexpected_keys"]):
            if not self._may_ignore(name):
                raise StartupError(f"unexpected tensor '{name}': {self.config.architecture} has no such weight.")


@contextmanager
def _bounded_modules() -> Iterator[None]:
    """Raise ValueError once a model has too many modules, whichever number of its config is wrong."""
    count = itertools.count()

    def check(*_: Any) -> None:
        if next(count) == _MOST_MODULES:
            raise ValueError(f"its config.json asks for more than {_MOST_MODULES} modules")

    handle = register_module_module_registration_hook(check)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def without_progress_bar() -> Iterator[None]:
    """Hide the progress bar of transformers, as the caller shows its own."""
    is_shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if is_shown:
            hf_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _has_variable_rope(module: nn.Module) -> bool:
    kinds = getattr(module, "rope_type", None)  # of all layers, or by layer type
    return any(kind in _VARIABLE_ROPES for kind in (kinds.values() if isinstance(kinds, dict) else [kinds]))


def _rope_parameters(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Return the RoPE parameters: one dictionary, or one per layer type."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope, *(value for value in rope.values() if isinstance(value, dict))]


def _checkpoint_shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    tied = model.all_tied_weights_keys
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied}
