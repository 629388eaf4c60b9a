"""jaxtyping's import hook checks the tensor shapes in signatures while tests run."""

import pytest
import torch
from jaxtyping import Float, Int, TypeCheckError
from octavo_engine.ops.norm import add_rms_norm, rms_norm, rms_weight
from octavo_shapes import ShapeError, check_shapes
from torch import Tensor


def test_the_engine_s_own_functions_are_checked() -> None:
    weight = rms_weight(torch.ones(8), eps=1e-6)
    with pytest.raises(TypeCheckError, match="rms_norm"):
        rms_norm(torch.ones(2, 8, dtype=torch.int64), weight)


def test_a_dimension_has_one_size_within_a_call() -> None:
    weight = rms_weight(torch.ones(8), eps=1e-6)
    add_rms_norm(torch.ones(2, 8), torch.ones(2, 8), weight)
    with pytest.raises(TypeCheckError, match="residual"):
        add_rms_norm(torch.ones(1, 8), torch.ones(2, 8), weight)


def test_an_optional_array_is_checked_unless_it_is_none() -> None:
    @check_shapes
    def count(ids: Int[Tensor, " tokens"] | None) -> int:
        return 0 if ids is None else len(ids)

    assert count(None) == 0
    assert count(torch.zeros(3, dtype=torch.int64)) == 3
    with pytest.raises(ShapeError, match=r"ids is torch.int64 \(1, 3\)"):
        count(torch.zeros(1, 3, dtype=torch.int64))


def test_return_values_are_checked() -> None:
    @check_shapes
    def first(x: Float[Tensor, "rows 4"]) -> Float[Tensor, "4"]:
        return x

    with pytest.raises(ShapeError, match="its result"):
        first(torch.zeros(2, 4))


def test_a_function_without_arrays_is_not_wrapped() -> None:
    def plain(x: int) -> int:
        return x

    assert check_shapes(plain) is plain
