"""`Model`: the runner's interface to a model of any architecture: forward, logits, KV specs, loading.

Each layer lists the checkpoint tensors that it loads, with shapes, as weight slots. A tensor without a slot, with
another shape, or missing from the checkpoint raises StartupError, which names the tensor.
"""

from collections.abc import Callable, Iterable, Set
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from octavo_engine.devices.step_inputs import Tower
from octavo_engine.layers.attention import SelfAttention
from octavo_engine.layers.embedding import Embedding
from octavo_engine.layers.head import LogitsHead
from octavo_engine.layers.layer import BuildContext, Layer, WeightSlot
from octavo_engine.layers.linear import Linear
from octavo_engine.layers.linear_method import LinearSpec
from octavo_engine.layers.shard import split_outputs
from octavo_engine.ops.attention import ForwardContext, LayerKVSpec
from octavo_engine.ops.group_tensor import GroupFormat, GroupTensor
from octavo_engine.ops.native_quantised import QuantisedFormat, QuantisedTensor
from octavo_engine.ops.stages import Stages
from octavo_engine.settings.records import ModelConfig
from octavo_engine.wire.errors import StartupError

#: Token ids, or embedding rows. If a vision tower also returns rows for the first layers, these are concatenated to the
#: embeddings: [tokens, hidden * (1 + layers)].
Inputs = Int[Tensor, " tokens"] | Float[Tensor, "tokens inputs"]
#: A position of each token, or three coordinates: time, row, column.
Positions = Int[Tensor, " tokens"] | Int[Tensor, "axes tokens"]


class Model(nn.Module):
    #: The prefix that a checkpoint of the bare model, without a head, omits from its tensor names.
    base_prefix: str = "model."
    #: Endings of the names of unused tensors in old checkpoints.
    ignored: ClassVar[tuple[str, ...]] = ("rotary_emb.inv_freq",)

    #: `forward` calls operators of torch, so that recorded steps take more memory.
    calls_torch: ClassVar[bool] = False
    #: The first operator of `forward` for whose values the host waits: such steps cannot be captured as CUDA graphs.
    waiting_operator: str | None = None

    embedding: Embedding
    head: LogitsHead | None  # None: the model returns hidden rows, or this is a later stage
    tower: Tower | None = None  # None: the model takes no images

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__()
        self.config, self.build, self.head = config, build, None

    def forward(self, inputs: Inputs, positions: Positions, ctx: ForwardContext) -> Float[Tensor, "tokens hidden"]:
        """Return the hidden rows. The first of several stages returns a tensor that will receive the last stage's rows.

        `inputs`: token ids, or embedding rows, which are not modified; later stages ignore them.
        """
        raise NotImplementedError

    def constants(self) -> Iterable[Tensor]:
        """Return the tensors of all modules, which operators of torch may read in recorded steps."""
        held = ({**vars(each), **each._parameters, **each._buffers}.values() for each in self.modules())
        return (x for x in chain.from_iterable(held) if isinstance(x, Tensor))

    def logits(self, hidden: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows vocab"]:
        assert self.head is not None, "an embedding model has no logits"
        return self.head(hidden)

    def kv_specs(self) -> list[LayerKVSpec]:
        attentions = [module for module in self.modules() if isinstance(module, SelfAttention)]
        assert [a.spec.layer_idx for a in attentions] == list(
            range(len(self.build.stages.share(self.config.num_layers)))
        )
        return [attention.spec.kv for attention in attentions]

    def named_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of all tensors that a checkpoint must have; used for dummy weights."""
        return {slot.name: slot.shape for slot in self._weight_slots() if not slot.instead_of}

    def block_tensors(self) -> frozenset[str]:
        """Return the names of the tensors that stay in the blocks of the checkpoint."""
        return frozenset(slot.name for slot in self._weight_slots() if isinstance(slot.format, QuantisedFormat))

    def group_tensors(self) -> frozenset[str]:
        """Return the names of the tensors that stay in groups, as in the checkpoint."""
        return frozenset(slot.name for slot in self._weight_slots() if isinstance(slot.format, GroupFormat))

    def quantised_tensors(self) -> frozenset[str]:
        """Return the names of the tensors that are quantised while they are loaded."""
        return frozenset(slot.name for slot in self._weight_slots() if slot.quantises)

    def in_files(self, names: Set[str]) -> frozenset[str]:
        """Return names of modules or tensors both with and without `base_prefix`: checkpoints may use either form."""
        return frozenset(names | {name.removeprefix(self.base_prefix) for name in names})

    def renamed(self, given: str) -> str:
        """Return this model's name of a tensor from the checkpoint's name."""
        return given

    def given(self, name: str) -> str:
        """Return the checkpoint's name of a tensor from this model's name."""
        return name

    def load_weights(self, weights: Iterable[tuple[str, Tensor | QuantisedTensor | GroupTensor]]) -> None:
        """Load tensors one at a time, in any order; call `finish_loading` afterwards. Raises StartupError."""
        slots, elsewhere = {slot.name: slot for slot in self._weight_slots()}, self.modules_elsewhere
        loaded: set[str] = set()
        for given_name, tensor in weights:
            if module_of(given_name) in elsewhere:
                continue
            name = self.renamed(given_name)
            slot = slots.get(name) or slots.get(self.base_prefix + name)
            if slot is None and not self._may_ignore(given_name) and not _is_zero_bias(given_name, tensor):
                raise self._error(f"unexpected tensor '{given_name}': {self.config.architecture} has no such weight.")
            if slot is not None and slot.name not in loaded:
                self._load(slot, tensor)
                loaded |= {slot.name, *slot.instead_of}
            del tensor  # before the next one is read
        missing = [slot for slot in slots.values() if not slot.instead_of and slot.name not in loaded]
        if missing:
            name, others = self.given(missing[0].name), f", and {len(missing) - 1} more tensors" * (len(missing) > 1)
            raise self._error(
                f"missing tensor '{name}' of shape {missing[0].shape}{others}: check that all weight files are there."
            )

    def whole(self) -> "Model":
        """Return the model with the layers of all stages, without memory."""
        return type(self)(self.config, replace(self.build, device=torch.device("meta"), stages=Stages()))

    @cached_property
    def modules_elsewhere(self) -> frozenset[str]:
        """Return the names of the checkpoint's modules that other stages have, with and without `base_prefix`."""
        if self.build.stages.size == 1:
            return frozenset()
        names, own = ({module_of(slot.name) for slot in each._weight_slots()} for each in (self.whole(), self))
        return self.in_files(names - own)

    def finish_loading(self, check: Callable[[], None] = lambda: None) -> None:
        """Prepare the layers for their first step. `check`: called before each layer."""
        with torch.no_grad():
            for layer in self._layers():
                check()
                layer.finish_loading()

    def weights_bytes(self) -> int:
        tower = 0 if self.tower is None else self.tower.weights_bytes
        return tower + sum(layer.weights_bytes() for layer in self._layers())

    def embed(self, inputs: Inputs) -> Float[Tensor, "tokens hidden"]:
        """Return the embeddings of the inputs in a new tensor, since the residual stream is changed in place."""
        return inputs.to(self.build.dtype, copy=True) if inputs.is_floating_point() else self.embedding(inputs)

    def stage_rows(self, positions: Positions, count: int) -> list[Tensor]:
        """Allocate `count` tensors to receive the rows that the stage before sends."""
        return [self.build.empty(positions.shape[-1], self.config.hidden_size) for _ in range(count)]

    def make_head(
        self, name: str, embedding: Embedding, *, tied: bool, softcap: float | None = None
    ) -> LogitsHead | None:
        if self.config.pooling is not None:
            return None
        vocab, size = embedding.shape
        shard = split_outputs(self.build.group, embedding.rows)
        spec = LinearSpec(in_features=size, outs=(vocab,), names=(name,), wide=True, shard=shard)
        return LogitsHead(Linear(spec, self.build, tied=embedding.weight if tied else None), softcap=softcap)

    def _layers(self) -> Iterable[Layer]:
        return (module for module in self.modules() if isinstance(module, Layer))

    def _weight_slots(self) -> Iterable[WeightSlot]:
        return chain.from_iterable(layer.weight_slots() for layer in self._layers())

    def _may_ignore(self, name: str) -> bool:
        """Return True if the name is that of an unused tensor, or of a tied head's weight, which some files contain."""
        return name.endswith((*self.ignored, "lm_head.weight"))

    def _load(self, slot: WeightSlot, tensor: Tensor | QuantisedTensor | GroupTensor) -> None:
        if tuple(tensor.shape) != slot.shape:
            name, shape = self.given(slot.name), tuple(tensor.shape)
            raise self._error(f"tensor '{name}' has shape {shape}, the model needs {slot.shape}.")
        with torch.no_grad():
            slot.load(tensor)

    def _error(self, message: str) -> StartupError:
        return StartupError(f"{self.config.name}: {message}")


def module_of(tensor: str) -> str:
    """Return the name of the module that has a tensor."""
    return tensor.rpartition(".")[0]


def _is_zero_bias(name: str, tensor: Tensor | QuantisedTensor | GroupTensor) -> bool:
    """Return True for a bias that has no effect: tools for GPTQ write one for each layer."""
    return name.endswith(".bias") and isinstance(tensor, Tensor) and not tensor.any()
