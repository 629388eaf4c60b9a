"""Rotary position embedding: a table of cosines and sines up to `max_model_len`, read once per step for all layers."""

import torch
from jaxtyping import Int
from torch import Tensor

from octavo_engine.layers.layer import BuildContext, Layer
from octavo_engine.layers.rope_frequencies import RopeSpec, inverse_frequencies
from octavo_engine.ops.gather import gather_rows
from octavo_engine.ops.rope import Rotation


class RotaryEmbedding(Layer):
    def __init__(self, spec: RopeSpec, build: BuildContext) -> None:
        super().__init__()
        frequencies, factor = inverse_frequencies(spec, build.max_model_len)
        if build.device.type == "meta":  # arithmetic on meta tensors would import torch's compiler, for over a second
            shape = (build.max_model_len, 4 * len(frequencies))
            self.table = torch.empty(shape, dtype=build.dtype, device="meta")
            return
        # Computed on the CPU, so that every device gets the same bits.
        angles = torch.arange(build.max_model_len).float()[:, None] * frequencies
        cos, sin = angles.cos() * factor, angles.sin() * factor
        both = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1).flatten(1)
        self.table = both.to(build.device, build.dtype)  # [max_model_len, 2 * rotary_dim]

    def __call__(self, positions: Int[Tensor, " tokens"]) -> Rotation:
        cos, sin = gather_rows(self.table, positions).view(-1, 2, 1, self.table.shape[1] // 2).unbind(1)
        return Rotation(cos, sin)

    def weights_bytes(self) -> int:
        return self.table.numel() * self.table.dtype.itemsize
