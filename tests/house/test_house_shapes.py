"""jaxtyping's import hook checks the tensor shapes in signatures while tests run."""

import re
from collections.abc import Callable
from pathlib import Path

import octavo_engine
import pytest
import torch
from jaxtyping import Float, Int, TypeCheckError
from octavo_engine.ops.native_quantised import QUANTISED_FORMATS
from octavo_engine.ops.norm import add_rms_norm, rms_norm, rms_weight
from octavo_engine.sampling.logprobs import prompt_logprobs
from octavo_engine.weights.quantised_layers import signed_blocks
from octavo_shapes import ShapeError, check_shapes
from torch import Tensor

ENGINE = Path(octavo_engine.__file__).parent
#: A function of each package, called with a shape or type that its signature excludes.
WRONG_CALLS: dict[str, Callable[[], object]] = {
    "ops.norm.rms_norm": lambda: rms_norm(torch.ones(2, 8, dtype=torch.int64), rms_weight(torch.ones(8), eps=1e-6)),
    "sampling.logprobs.prompt_logprobs": lambda: prompt_logprobs(torch.ones(1, 2, 8), [0], 0),
    "weights.quantised_layers.signed_blocks": lambda: signed_blocks(
        torch.ones(2, 3, 31, dtype=torch.int8), torch.ones(2, 3, dtype=torch.float16), QUANTISED_FORMATS["Q8_0"]
    ),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_the_engine_s_own_functions_are_checked(name: str) -> None:
    with pytest.raises(TypeCheckError, match=rf"octavo_engine\.{re.escape(name)}\.") as raised:
        WRONG_CALLS[name]()
    assert isinstance(root_cause(raised.value), ShapeError)


def root_cause(error: BaseException) -> BaseException:
    return error if error.__cause__ is None else root_cause(error.__cause__)


def test_the_check_lists_every_package_that_annotates_shapes(pytestconfig: pytest.Config) -> None:
    annotating = {path.relative_to(ENGINE).parts[0] for path in ENGINE.rglob("*.py") if "jaxtyping" in path.read_text()}
    *listed, _ = pytestconfig.getoption("jaxtyping_packages").split(",")
    assert {f"octavo_engine.{package}" for package in annotating} <= set(listed)
    assert {"sampling", "weights", "ops"} <= annotating


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
