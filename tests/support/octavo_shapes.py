"""A check of the tensor shapes in signatures while tests run; jaxtyping's import hook wraps every function in it.

It reads only array annotations (`Float[Tensor, "tokens hidden"]`, optional or not): mypy checks all other types, and
run-time checkers fail on protocols. A dimension's name stands for one size within a call.
"""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, Union, get_args, get_origin

from jaxtyping import AbstractArray


class ShapeError(TypeError):
    pass


def check_shapes(function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)
    arrays = {name: kinds for name, p in signature.parameters.items() if (kinds := _array_kinds(p.annotation))}
    returned = _array_kinds(signature.return_annotation)
    if not arrays and not returned:
        return function

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        values = signature.bind(*args, **kwargs).arguments
        for name, kinds in arrays.items():
            if name in values:
                _check(function, name, values[name], kinds)
        result = function(*args, **kwargs)
        if returned:
            _check(function, "its result", result, returned)
        return result

    return checked


def _array_kinds(annotation: Any) -> tuple[Any, ...]:
    """Return the alternatives of an annotation if one of them is an array with a shape, else an empty tuple."""
    is_union = get_origin(annotation) in (Union, types.UnionType)
    kinds = get_args(annotation) if is_union else (annotation,)
    has_shape = any(isinstance(kind, type) and issubclass(kind, AbstractArray) for kind in kinds)
    return kinds if has_shape else ()


def _check(function: Callable[..., Any], name: str, value: Any, kinds: tuple[Any, ...]) -> None:
    if not isinstance(value, kinds):
        is_array = hasattr(value, "shape")
        found = f"{value.dtype} {tuple(value.shape)}" if is_array else repr(value)
        raise ShapeError(f"{function.__qualname__}: {name} is {found}, not {' or '.join(map(str, kinds))}")
