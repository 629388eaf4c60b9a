"""Records the kernel calls of a computation, to replay them without the Python code that runs between them.

While a computation is recorded, its outputs come from a pool whose memory stays, so that the addresses in the calls
stay valid. A guard watches torch's operators: each one that computes is listed, too, and a replay writes its results
to the memory of the first ones. The calls replace the computation only if no operator depends on values that Python
code reads, or on memory that the recording does not know. The guard cannot see kernels' inputs that torch makes
without its dispatcher, such as `torch.from_numpy`: code that calls kernels must not pass temporary memory of its own.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from ctypes import c_float, c_void_p
from dataclasses import dataclass
from functools import cache, partial
from mmap import mmap
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from octavo_engine.ops.recording_pool import Pool

Kernel = Callable[..., None]

_MOST_CALLS = 1024  # of one array of native calls
_CALL = np.dtype([("kernel", "i8"), ("arguments", "i8", 11), ("scale", "f4")], align=True)  # `struct RecordedCall`
_ATEN = torch.ops.aten
_EMPTY = {getattr(_ATEN, name).default for name in ("empty_like", "empty_strided", "new_empty", "new_empty_strided")}
#: Functions of torch that take half the time of the overloads with `out` that they call.
_FUNCTIONS = {getattr(_ATEN, name): getattr(torch, name) for name in ("add", "cat", "mul", "neg", "sub")}
_COPIES = {_ATEN._to_copy.default, _ATEN.clone.default}
_INDEXING = {_ATEN.index.Tensor, _ATEN.index_put.default, _ATEN.index_put_.default}
_SHOWING_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_READING = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__}


class NativeCalls:
    """Calls of native kernels; one call of `octavo_replay` repeats a run of them.

    The list has its own memory mapping: on the C heap it fragmented the memory of logits, which cost a gigabyte.
    """

    def __init__(self, replay: Kernel) -> None:
        self._replay = replay
        self._calls = np.frombuffer(mmap(-1, _MOST_CALLS * _CALL.itemsize), _CALL)
        self._address = int(self._calls.ctypes.data)
        self.count = 0

    def append(self, kernel: Any, arguments: tuple[Any, ...]) -> None:
        call, self.count = self._calls[self.count], self.count + 1
        typed = list(zip(arguments, kernel.argtypes, strict=True))
        numbers = [x or 0 for x, kind in typed if kind is not c_float]
        call["kernel"], call["arguments"][: len(numbers)] = ctypes.cast(kernel, c_void_p).value, numbers
        call["scale"] = sum(x for x, kind in typed if kind is c_float)

    def replay(self, first: int, count: int) -> None:
        self._replay(self._address + first * _CALL.itemsize, count)


@dataclass(slots=True)
class _Run:
    """Native calls that follow one another."""

    calls: NativeCalls
    first: int
    count: int = 0

    def __call__(self) -> None:
        self.calls.replay(self.first, self.count)


class Recording:
    """Kernel calls in order. `refused`: the first operator that cannot be replayed, if any. `has_exchanged`: a call was
    a collective operation. `num_operators`: calls of torch."""

    def __init__(self) -> None:
        self.refused: str | None = None
        self.has_exchanged = False
        self.num_operators = 0
        self._parts: list[Callable[[], object]] = []
        self._calls: NativeCalls | None = None

    def refuse(self, operator: str) -> None:
        self.refused = self.refused or operator

    def append(self, kernel: Kernel, arguments: tuple[Any, ...], replay: Kernel | None) -> None:
        if replay is None:
            self.has_exchanged = True
            self._parts.append(partial(kernel, *arguments))
            return
        if self._calls is None or self._calls.count == _MOST_CALLS:
            self._calls = NativeCalls(replay)
        run = self._parts[-1] if self._parts else None
        if not isinstance(run, _Run) or run.calls is not self._calls:
            run = _Run(self._calls, self._calls.count)
            self._parts.append(run)
        self._calls.append(kernel, arguments)
        run.count += 1

    def append_operator(self, call: Callable[[], object]) -> None:
        self.num_operators += 1
        self._parts.append(call)

    def replay(self) -> None:
        for part in self._parts:
            part()


_current: ContextVar[Recording | None] = ContextVar("recording", default=None)


def recordable(kernel: Kernel, replay: Kernel | None = None) -> Kernel:
    """Wrap a kernel so that each call is also listed in the recording in progress.

    `replay`: the `octavo_replay` of a native kernel's library.
    """

    def call(*arguments: Any) -> None:
        recording = _current.get()
        if recording is not None:
            recording.append(kernel, arguments, replay)
        kernel(*arguments)

    return call


@contextmanager
def record(pool: Pool, *inputs: Tensor) -> Iterator[Recording]:
    """Record the kernel calls of the block. `inputs`: tensors beside the pool's that keep their addresses."""
    recording = Recording()
    token = _current.set(recording)
    try:
        with _ReadWatch(recording), _Guard(recording, pool, {_address(x) for x in inputs} - {0}):
            yield recording
    finally:
        _current.reset(token)


class _ReadWatch(TorchFunctionMode):
    """Refuses methods that show values to Python code without torch's dispatcher."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _READING:
            self._recording.refuse(f"Tensor.{func.__name__}")
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls `_run` for each operator of torch that computes something itself."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with self:  # in inference mode, operators that only call others arrive whole
            result = func.decompose(*args, **kwargs)
        return self._run(func, args, kwargs) if result is NotImplemented else result

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError


class WaitWatch(_Operators):  # type: ignore[no-untyped-call]
    """Finds the first operator that makes the host wait for a GPU, in the block for which this is a context manager."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operator: str | None = None

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        is_copy = func in (_ATEN._to_copy.default, _ATEN.copy_.default)
        is_transfer = is_copy and any(x.device != result.device for x in args if isinstance(x, Tensor))
        if self.operator is None and (is_transfer or _shows_values(func, args)):
            self.operator = str(func)
        return result


class _Guard(_Operators):  # type: ignore[no-untyped-call]
    """Takes the memory of all results from the pool, and lists the operators that compute.

    It refuses random numbers and operators that show values to Python code, read memory that it does not know, or
    write outside the pool.
    """

    def __init__(self, recording: Recording, pool: Pool, inputs: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording, self._pool, self._inputs = recording, pool, inputs
        self._constants: list[Tensor] = []
        self._aliases: dict[tuple[Any, ...], Tensor] = {}

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is _ATEN.empty.memory_format and _is_plain(kwargs) and 0 not in args[0]:
            return self._pool.empty(tuple(args[0]), kwargs.get("dtype") or torch.get_default_dtype())
        result = func(*args, **kwargs)
        is_resizable = func is _ATEN.empty.memory_format and 0 in args[0]  # memory of the pool is not
        if self._recording.refused is not None or func is _ATEN.detach_.default or is_resizable:
            return result
        if func is _ATEN.lift_fresh.default:  # a constant of Python code
            self._constants.append(result)  # so that no other tensor gets its address
            self._inputs.add(_address(result))
            return result
        sources = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        results = list(result) if isinstance(result, (list, tuple)) else [result]
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        is_plain = all(map(_is_strided, results)) and all(map(self._is_known, sources))
        if not is_plain or is_random or _shows_values(func, args):
            self._recording.refuse(str(func))
            return result
        changes_view = torch.Tag.inplace_view in func.tags
        if func._schema.is_mutable and not changes_view:
            self._list_writing(func, args, kwargs, results)
            return result
        if changes_view or {_address(x) for x in results} <= {_address(x) for x in sources}:
            return result
        placed = [self._place(x) for x in results]
        if func not in _EMPTY:
            self._recording.append_operator(self._writing(func, args, kwargs, placed))
        return placed[0] if isinstance(result, Tensor) else type(result)(placed)

    def _list_writing(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Tensor]) -> None:
        """List an operator that writes to its arguments, and returns some of them."""
        given = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | kwargs
        written = tree_leaves([given.get(each.name) for each in func._schema.arguments if each.is_write])
        if all(self._pool.contains(_address(x)) for x in (*written, *results) if isinstance(x, Tensor)):
            args, kwargs = tree_map_only(Tensor, self._alias, (args, kwargs))
            self._recording.append_operator(partial(func, *args, **kwargs))
        else:
            self._recording.refuse(str(func))

    def _writing(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], placed: list[Tensor]
    ) -> Callable[[], object]:
        """Return a call that writes the results to their first memory."""
        args, kwargs = tree_map_only(Tensor, self._alias, (args, kwargs))
        outs = [self._alias(x) for x in placed]
        if func in _COPIES:
            return partial(outs[0].copy_, args[0])
        overload = _with_out(func)
        if overload is not None:
            return partial(_FUNCTIONS.get(func.overloadpacket, overload), *args, **kwargs, out=outs[0])
        return partial(_write, outs, partial(func, *args, **kwargs))

    def _is_known(self, x: Tensor) -> bool:
        address = 0 if x.is_conj() or x.is_neg() else _address(x)
        return address in self._inputs or self._pool.contains(address)

    def _place(self, x: Tensor) -> Tensor:
        """Return a copy in the pool, of the same strides."""
        size = 1 + sum((count - 1) * stride for count, stride in zip(x.shape, x.stride(), strict=True))
        return self._pool.empty((max(0, size),), x.dtype).as_strided(x.shape, x.stride()).copy_(x)

    def _alias(self, x: Tensor) -> Tensor:
        """Return a tensor that has the memory of `x`, but does not keep it from being used again."""
        key = (x.data_ptr(), x.dtype, x.shape, x.stride())
        if key not in self._aliases:
            self._aliases[key] = self._pool.alias(x) if self._pool.contains(_address(x)) else x
        return self._aliases[key]


def _shows_values(func: Any, args: Sequence[Any]) -> bool:
    """Return True if an operator returns values of a tensor to Python code, or results whose shape depends on them."""
    if func in _INDEXING:  # only if an index is a mask
        return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    return not _SHOWING_VALUES.isdisjoint(func.tags)


@cache
def _with_out(func: Any) -> Any:
    """Return the overload of an operator that writes its only result to the argument `out`; None if there is none."""
    wanted = [(each.name, str(each.type)) for each in func._schema.arguments]
    for name in func.overloadpacket.overloads():
        overload = getattr(func.overloadpacket, name)
        given = [(each.name, str(each.type)) for each in overload._schema.arguments]
        if given == [*wanted, ("out", "Tensor")] and overload._schema.arguments[-1].is_out:
            return overload
    return None


def _write(outs: list[Tensor], call: Callable[[], Any]) -> None:
    result = call()
    for out, x in zip(outs, [result] if isinstance(result, Tensor) else result, strict=True):
        out.copy_(x)


def _is_plain(kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    return (device is None or device.type == "cpu") and kwargs.get("memory_format") is None


def _is_strided(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_cpu and x.layout is torch.strided and not x.is_quantized


def _address(x: Tensor) -> int:
    """Return the address of the tensor's storage; 0 if it has none, as in oneDNN's layout."""
    return x.untyped_storage().data_ptr() if x.layout is torch.strided else 0
