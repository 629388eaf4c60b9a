"""`GraphedModel`: a model that is replaced when an engine wakes up, and the graphs of its steps."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from octavo_engine.devices.device import Device
from octavo_engine.devices.step_inputs import (
    FillIn,
    PlacedStep,
    RunnableModel,
    StepArrays,
    StepInputs,
    StepLimits,
    Tower,
)
from octavo_engine.models.model import Model
from octavo_engine.ops.attention import AttentionBackend, ForwardContext, LayerKVSpec
from octavo_engine.runner.image_encoder import ImageEncoder


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """`reload` loads the model again after its weights were released, or raises StartupError.

    `images`: None if the model takes no images. `cache_scales`: scales of K and V in an FP8 cache, by layer number.
    """

    model: Model
    reload: Callable[[], Model]
    fingerprint: str = ""  # of the weights
    images: ImageEncoder | None = None
    cache_scales: Mapping[int, tuple[float, float]] = field(default_factory=dict)

    def kv_specs(self) -> list[LayerKVSpec]:
        """Return the layers' KV specs, with the K and V scales of the checkpoint, or 1 if the checkpoint has none."""
        model = self.model
        layers = zip(model.build.stages.share(model.config.num_layers), model.kv_specs(), strict=True)
        scales = ((spec, *self.cache_scales.get(layer, (1.0, 1.0))) for layer, spec in layers)
        return [replace(spec, k_scale=k_scale, v_scale=v_scale) for spec, k_scale, v_scale in scales]


class GraphedModel:
    """`model` is None while the weights are released. `enforce_eager`: all steps run without graphs."""

    def __init__(self, model: RunnableModel, device: Device, limits: StepLimits, *, enforce_eager: bool) -> None:
        self._device, self._limits, self._is_eager = device, limits, enforce_eager
        self.replace(model)

    def replace(self, model: RunnableModel | None) -> None:
        """Replace the model, with the graphs of its steps, which hold addresses of its weights."""
        self.model = model
        self.renew_graphs()

    def renew_graphs(self) -> None:
        """Free all graphs; call it also before the memory of the KV cache is released."""
        has_graphs = self.model is not None and not self._is_eager
        self._graphs = self._device.step_graphs(self._loaded, self._limits) if has_graphs else None

    def capture_graphs(self, backend: AttentionBackend, fill_in: FillIn) -> None:
        """Capture the graphs of steps, if the device uses graphs, so that no request waits for a capture."""
        if self._graphs is not None:
            self._graphs.capture_all(backend, fill_in)

    def place(self, arrays: StepArrays) -> PlacedStep | None:
        """Copy a step's inputs to a graph, which must then run the step; return None if no graph fits the step."""
        return None if self._graphs is None else self._graphs.place(arrays)

    def forward(self, inputs: StepInputs, backend: AttentionBackend, *, may_replay: bool) -> Tensor:
        """Compute the hidden rows of a step. `may_replay`: a graph may be used."""
        if inputs.replay is not None:
            return inputs.replay()
        context = ForwardContext(batch=inputs.attention, backend=backend)
        hidden = self._graphs.run(inputs, context) if self._graphs is not None and may_replay else None
        if hidden is None:
            backend.begin_step(inputs.attention)
            hidden = self._loaded.forward(inputs.input_ids, inputs.positions, context)
        return hidden

    def embed(self, token_ids: Tensor) -> Tensor:
        return self._loaded.embed(token_ids)

    @property
    def tower(self) -> Tower:
        tower = self._loaded.tower
        assert tower is not None, "images are prepared for a model without a tower"
        return tower

    def logits(self, hidden: Tensor) -> Tensor:
        return self._loaded.logits(hidden)

    @property
    def _loaded(self) -> RunnableModel:
        assert self.model is not None, "a plan runs while the weights are released"
        return self.model
