"""AWQ's layers of the version gemm: `qweight` and `qzeros` are packed along the outputs, in an order of their own."""

from collections.abc import Mapping

import torch
from torch import Tensor

from octavo_engine.sources.quantised_config import QuantisedConfig
from octavo_engine.weights.layer_format import FLOATS, LayerFormat, LayerTensors, Shape, num_groups, transpose

_PER_INT = 8
#: The lowest bits in an integer of the codes of eight successive outputs.
_BITS = torch.tensor([0, 16, 4, 20, 8, 24, 12, 28], dtype=torch.int32)


def _shapes(config: QuantisedConfig, given: Mapping[str, Shape]) -> tuple[tuple[int, int], dict[str, Shape]]:
    size, columns = (*given["qweight"], 0, 0)[:2]
    groups, out = num_groups(config, size), columns * _PER_INT
    return (out, size), {"qweight": (size, columns), "qzeros": (groups, columns), "scales": (groups, out)}


def _read(config: QuantisedConfig, parts: Mapping[str, Tensor]) -> LayerTensors:
    packed = parts["qweight"]

    def unpack(outputs: slice) -> Tensor:
        return _unpack(packed[:, outputs.start // _PER_INT : -(-outputs.stop // _PER_INT)])

    return LayerTensors(unpack=unpack, scales=parts["scales"].t(), zeros=_unpack(parts["qzeros"]))


def _unpack(packed: Tensor) -> Tensor:
    """Return the codes of packed columns [inputs, outputs / 8] in uint8, [outputs, inputs]."""
    codes = transpose(packed).unsqueeze(1) >> _BITS.view(-1, 1)
    return codes.to(torch.uint8).bitwise_and_(15).flatten(0, 1).contiguous()  # torch may turn a single column


AWQ = LayerFormat(
    types={"qweight": ("I32",), "qzeros": ("I32",), "scales": FLOATS},
    scales="scales",
    zeros="qzeros",
    shapes=_shapes,
    read=_read,
)
