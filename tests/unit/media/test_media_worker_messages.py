"""Answers of a process that decodes images are data of a few types: other bytes are refused."""

import numpy as np
import pytest
from msgspec import MsgspecError, msgpack
from octavo_engine.media.worker import Array, Processed, _from_numpy, _to_numpy, decode_answer, encode


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int32", "int64", "float32", "float64"])
def test_arrays_keep_type_shape_and_values(dtype: str) -> None:
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)[:, ::2]
    answer = decode_answer(encode(Processed({"pixels": _from_numpy(array)})))
    found = _to_numpy(answer.arrays["pixels"])
    assert found.dtype == array.dtype
    assert np.array_equal(found, array)


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\xc1",
        msgpack.encode({"type": "Other"}),
        msgpack.encode({"type": "Processed", "arrays": {"pixels": {"dtype": "O", "shape": [1], "data": b"x"}}}),
        msgpack.encode({"type": "Processed", "arrays": {"pixels": {"dtype": "uint8", "shape": ["x"], "data": b"x"}}}),
        msgpack.encode({"type": "Processed", "arrays": [1]}),
    ],
)
def test_other_answers_are_refused(sent: bytes) -> None:
    with pytest.raises(MsgspecError):
        decode_answer(sent)


@pytest.mark.parametrize(("shape", "data"), [((2,), b"x"), ((-1, 7), b"x"), ((1 << 40, 1 << 40), b"x"), ((1,), b"")])
def test_a_shape_that_does_not_fit_the_data_is_refused(shape: tuple[int, ...], data: bytes) -> None:
    with pytest.raises(ValueError, match=r"reshape|buffer|array"):
        _to_numpy(Array("uint8", shape, memoryview(data)))
