"""AWQ's layers of the version gemm: `qweight` and `qzeros` are packed along the outputs, in an order of their own."""

from collections.abc import Mapping

from torch import Tensor

from octavo_engine.sources.quantised_config import QuantisedConfig
from octavo_engine.weights.layer_format import FLOATS, LayerFormat, LayerTensors, Shape, num_groups, unpack_ints

_PER_INT = 8
#: Places in an integer of the codes of eight successive outputs.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


def _shapes(config: QuantisedConfig, given: Mapping[str, Shape]) -> tuple[tuple[int, int], dict[str, Shape]]:
    size, columns = (*given["qweight"], 0, 0)[:2]
    groups, out = num_groups(config, size), columns * _PER_INT
    return (out, size), {"qweight": (size, columns), "qzeros": (groups, columns), "scales": (groups, out)}


def _read(config: QuantisedConfig, parts: Mapping[str, Tensor]) -> LayerTensors:
    packed = parts["qweight"]

    def unpack(outputs: slice) -> Tensor:
        return _unpack(packed[:, outputs.start // _PER_INT : -(-outputs.stop // _PER_INT)]).t()

    return LayerTensors(unpack=unpack, scales=parts["scales"].t(), zeros=_unpack(parts["qzeros"]).t())


def _unpack(packed: Tensor) -> Tensor:
    codes = unpack_ints(packed, 4)
    return codes.view(len(codes), -1, _PER_INT)[..., _PLACES].flatten(-2)


AWQ = LayerFormat(
    types={"qweight": ("I32",), "qzeros": ("I32",), "scales": FLOATS},
    scales="scales",
    zeros="qzeros",
    shapes=_shapes,
    read=_read,
)
