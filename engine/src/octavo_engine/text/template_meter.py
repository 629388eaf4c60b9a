"""Bounds the time and the memory of a chat template while it runs.

`sandbox.meter_tree` adds calls to a parsed template: at each item of a loop, and at each value that is written,
joined, sliced or listed. `MeteredEnvironment` intercepts operators, calls and filters. All of them take steps and bytes
from the `Meter` of the rendering: bytes before an operation whose result can be much larger than its operands, and
after all other operations. Every value that the template makes counts, also after it is freed.
"""

import json
import re
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sized
from functools import partial, wraps
from inspect import signature
from typing import Any

from jinja2 import pass_context
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

METER = "octavo meter"  # a variable that no template can name
MAX_STEPS = 1_000_000
MAX_BYTES = 48 << 20
MAX_CPU_S = 1.0
_MAX_INT_BITS = 4096
_PIECE_BYTES = 64  # of a short string or an entry of a list
_ENTRY_BYTES = 160  # of a container in `Meter._weights`
_ENTRY_WEIGHT = 256  # characters that are read as fast as one more object
_WEIGHT_PER_BYTE = 64  # container weight per charged byte: one operation may read all of it
_WEIGHT_PER_SORTED_BYTE = 4
_MAX_REVERSE_SEARCH = 1 << 28  # text length times needle length: Python searches backwards in quadratic time
_ITEMS_PER_STEP = 4096  # of a value in memory; the items of a range are made one by one
_SCALARS = (int, float, type(None))
_CONTAINERS = (list, tuple, dict, set, frozenset)
#: Filters that do not make a text of a list, and so read less of it than all its items.
_LIST_FILTERS = frozenset(
    (
        *("attr", "batch", "count", "d", "default", "dictsort", "first", "groupby", "items", "join", "last", "length"),
        *("list", "map", "max", "min", "random", "reject", "rejectattr", "reverse", "round", "select", "selectattr"),
        *("slice", "sort", "sum", "unique"),
    )
)
#: Filters that first convert any value to text, and whose result can be much larger than this text.
_TEXT_FILTERS = frozenset(("e", "escape", "forceescape", "replace", "title", "urlize", "wordcount"))
_SORTING_FILTERS = frozenset(("dictsort", "groupby", "max", "min", "sort", "unique"))
#: Filters that make a text of each character of a text.
_CHARACTER_FILTERS = _SORTING_FILTERS | {"batch", "list", "slice"}
#: Filters that may look up an attribute of each item, such as "function.name", in Python code -> its place among the
#: arguments; "map" takes it only by its name.
_ATTRIBUTE_PLACES = {
    **dict.fromkeys(("groupby", "rejectattr", "selectattr", "sum"), 0),
    **dict.fromkeys(("max", "min", "unique"), 1),
    "sort": 2,
    "map": None,
}
_MAX_ATTRIBUTE_PARTS = 8
_MAX_ATTRIBUTE_CHARS = 4096  # limit for names of attributes: Python copies a name that it does not find
_MAX_SEPARATOR = 64  # most characters of a separator for JSON
#: Codecs written in C, and error handlers, whose result is about as large as the text; "punycode" takes quadratic time.
_CODECS = frozenset(("utf-8", "utf8", "ascii", "latin-1", "latin1", "strict", "ignore", "replace"))
_WIDE_FORMAT = re.compile(r"\d{5,}|\{[^{}]*:[^{}]*\{|%[-+ #0-9.]*\*")


class Meter:
    """The steps, bytes and CPU time that one rendering has left. `cpu_end_s` counts the CPU time of its thread."""

    def __init__(self) -> None:
        self.steps_left = MAX_STEPS
        self.bytes_left = MAX_BYTES
        self.cpu_end_s = time.thread_time() + MAX_CPU_S
        self._weights: dict[int, tuple[Any, int]] = {}  # by `id` of a container, which is kept so that the id stays its

    def step(self, count: int = 1) -> None:
        self.steps_left -= count
        if self.steps_left < 0:
            raise SecurityError(f"it takes more than {MAX_STEPS} steps")
        # Reading this clock is a system call; with large values, few steps can take long.
        must_read = count > 1 or self.steps_left % 16 == 15 or self.bytes_left < MAX_BYTES * 3 // 4
        if must_read and time.thread_time() > self.cpu_end_s:
            raise SecurityError(f"it takes longer than {MAX_CPU_S:g} s")

    def read(self, value: Any) -> None:
        """Take the steps of an operation that may read all items of a value."""
        if isinstance(value, range):
            self.step(1 + len(value))
        else:
            self.step(1 + len(value) // _ITEMS_PER_STEP if isinstance(value, (str, bytes, *_CONTAINERS)) else 1)

    def charge(self, num_bytes: int) -> None:
        self.bytes_left -= num_bytes
        if self.bytes_left < 0:
            raise SecurityError(f"its values take more than {MAX_BYTES >> 20} MiB")

    def keep(self, value: Any) -> Any:
        """Charge a value that was made, and return it."""
        made = getattr(value, "_Namespace__attrs") if isinstance(value, Namespace) else value  # noqa: B009
        if isinstance(made, (str, bytes)):
            self.charge(sys.getsizeof(made))
        elif isinstance(made, _CONTAINERS):
            self.charge(self.weight(made) // _WEIGHT_PER_BYTE)
        return value

    def weight(self, value: Any) -> int:
        """Return the work of visiting all nested items of a value; an item that is shared counts each time.

        Each container is charged once.
        """
        if isinstance(value, (str, bytes)):
            return len(value)
        if not isinstance(value, _CONTAINERS):
            return 0
        known = self._weights.get(id(value))
        if known is not None:
            return known[1]
        self.charge(sys.getsizeof(value) + _ENTRY_BYTES)
        items: Iterable[Any] = (*value.keys(), *value.values()) if isinstance(value, dict) else value
        weight = sum(_ENTRY_WEIGHT + self.weight(item) for item in items)
        self._weights[id(value)] = value, weight
        return weight

    def text(self, value: Any) -> str:
        """Charge the text of a value, before it is made."""
        self.step()
        self.charge(self.text_size(value))
        return str(value)

    def text_size(self, value: Any) -> int:
        if isinstance(value, (str, bytes)):
            return len(value)
        if isinstance(value, Namespace):
            value = getattr(value, "_Namespace__attrs")  # noqa: B009
        if isinstance(value, (*_SCALARS, range)) or not isinstance(value, Collection):
            return _PIECE_BYTES
        self.step(len(value))
        items: Iterable[Any] = (*value.keys(), *value.values()) if isinstance(value, Mapping) else value
        return sum(map(self.text_size, items))


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox, with metered operations. Constants are not folded, as that would happen at load."""

    intercepted_binops = frozenset(("+", "*", "**", "%", "//"))

    def __init__(self, **options: Any) -> None:
        super().__init__(optimized=False, **options)
        del self.globals["lipsum"], self.filters["pprint"]
        self.filters |= {"tojson": _to_json, "join": _join}
        self.filters = {name: _metered_filter(name, function) for name, function in self.filters.items()}
        tests: dict[str, Any] = self.tests
        self.tests = {name: _metered_test(function) for name, function in tests.items()}
        self.filters |= {"octavo_read": _read, "octavo_iterate": _iterate, "octavo_keep": _keep, "octavo_write": _write}

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = _meter(context)
        meter.step()
        meter.charge(_operator_growth(operator, left, right, meter))
        return meter.keep(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        meter = _meter(__context)
        method = getattr(__obj, "__wrapped__", __obj)  # of str.format, which the sandbox wraps
        owner = getattr(method, "__self__", None)
        meter.read(owner)
        if isinstance(owner, (str, bytes, int, *_CONTAINERS)):
            if method.__name__ == "join" and args:
                return _join(__context, args[0], owner)
            meter.charge(_growth(method.__name__, owner, _given(args, kwargs), meter))
        return meter.keep(super().call(__context, __obj, *args, **kwargs))


def _meter(context: Context) -> Meter:
    meter: Meter = context.parent[METER]
    return meter


class _MeteredItems:
    """An iterable with the original's length; each item takes a step."""

    def __init__(self, items: Any, meter: Meter) -> None:
        self._items = items
        self._meter = meter

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            self._meter.step()
            yield item

    def __len__(self) -> int:
        return len(self._items)


@pass_context
def _iterate(context: Context, items: Any) -> _MeteredItems:
    return _MeteredItems(items, _meter(context))


@pass_context
def _read(context: Context, value: Any) -> Any:
    _meter(context).read(value)
    return value


@pass_context
def _keep(context: Context, value: Any) -> Any:
    return _meter(context).keep(value)


@pass_context
def _write(context: Context, value: Any) -> Any:
    meter = _meter(context)
    meter.step()
    meter.charge(meter.text_size(value))
    return value


@pass_context
def _join(context: Context, value: Iterable[Any], d: Any = "", attribute: Any = None) -> str:
    meter = _meter(context)
    separator = meter.text(d)
    if attribute is not None:
        value = context.environment.call_filter("map", value, kwargs={"attribute": attribute}, context=context)
    parts = []
    for item in value:
        meter.charge(len(separator))
        parts.append(meter.text(item))
    return separator.join(parts)


@pass_context
def _to_json(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as transformers does. An indentation can be much larger than the value, so pieces are charged."""
    make = partial(json.JSONEncoder, ensure_ascii=ensure_ascii, separators=separators, sort_keys=sort_keys)
    meter, pieces = _meter(context), []
    if separators is not None and meter.text_size(separators) > _MAX_SEPARATOR:
        raise SecurityError(f"the separators of tojson have more than {_MAX_SEPARATOR} characters")
    if indent is None:
        return make().encode(value)
    meter.charge(_int_size(indent))
    for piece in make(indent=indent).iterencode(value):
        meter.charge(len(piece))
        pieces.append(piece)
    return "".join(pieces)


def _metered_test(function: Callable[..., Any]) -> Callable[..., Any]:
    is_given_environment = hasattr(function, "jinja_pass_arg")

    @pass_context
    @wraps(function)
    def run(context: Context, *args: Any, **kwargs: Any) -> Any:
        meter = _meter(context)
        for value in args:
            meter.read(value)
        return function(*((context.environment,) if is_given_environment else ()), *args, **kwargs)

    return run


def _metered_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    passed = getattr(function, "jinja_pass_arg", None)
    copies_items = name in _SORTING_FILTERS and name != "dictsort"  # which takes mappings only

    @pass_context
    @wraps(function)
    def run(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        meter = _meter(context)
        meter.read(value)
        text = meter.text(value) if name in _TEXT_FILTERS and not isinstance(value, str) else value
        meter.charge(_growth(name, text, _given(args, kwargs), meter))
        if name in _CHARACTER_FILTERS and isinstance(value, (str, bytes)):
            meter.charge(len(value) * _PIECE_BYTES)
        if name not in _LIST_FILTERS and not isinstance(text, (str, bytes)):
            meter.charge(meter.text_size(text))
        if copies_items and not isinstance(value, (str, bytes, range, *_CONTAINERS)):
            value = [*value]
        if name in _ATTRIBUTE_PLACES:
            _take_attribute(meter, value, _attribute(name, args, kwargs))
        given = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
        first = () if passed is None else (given[passed.name],)
        if name in _SORTING_FILTERS:
            _charge_keys(context, value, signature(function).bind(*first, value, *args, **kwargs).arguments)
        result = function(*first, value, *args, **kwargs)
        if isinstance(result, Iterator):
            return _each_metered(result, meter)
        return result if result is value else meter.keep(result)

    return run


def _each_metered(items: Iterator[Any], meter: Meter) -> Iterator[Any]:
    for item in items:
        meter.step()
        yield item


def _charge_keys(context: Context, value: Any, given: Mapping[str, Any]) -> None:
    """Charge the keys by which a filter sorts: the items, or one or more attributes of each; the filter may copy all
    keys in lower case. `given`: arguments by name."""
    meter, attribute = _meter(context), given.get("attribute")
    names = attribute.split(",") if isinstance(attribute, str) else [attribute]
    for name in names:
        lookup = {"attribute": name, "default": given.get("default")}
        keys = value if name is None else [*context.environment.call_filter("map", value, None, lookup, context)]
        meter.charge(meter.weight(keys) // _WEIGHT_PER_SORTED_BYTE)


def _attribute(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    place = _ATTRIBUTE_PLACES[name]
    return kwargs.get("attribute", None if place is None or place >= len(args) else args[place])


def _take_attribute(meter: Meter, value: Any, attribute: Any) -> None:
    """Charge one step for each item whose attribute is looked up; an iterator's items are charged when yielded."""
    if isinstance(attribute, str):
        if attribute.count(".") + attribute.count(",") >= _MAX_ATTRIBUTE_PARTS:
            raise SecurityError(f"an attribute has more than {_MAX_ATTRIBUTE_PARTS} parts")
        if len(attribute) > _MAX_ATTRIBUTE_CHARS:
            raise SecurityError(f"an attribute has more than {_MAX_ATTRIBUTE_CHARS} characters")
    if attribute is not None and isinstance(value, Sized):
        meter.step(1 + len(value))


def _operator_growth(operator: str, left: Any, right: Any, meter: Meter) -> int:
    """Bytes of an operator's result, if it can be much larger than its operands."""
    if operator == "%":
        return _growth("format", left, (right,), meter) if isinstance(left, (str, bytes)) else 0
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * max(right, 1) if operator == "**" else left.bit_length() + right.bit_length()
        return MAX_BYTES + 1 if bits > _MAX_INT_BITS else 0
    if operator == "*":
        number, items = (left, right) if isinstance(left, int) else (right, left)
        if isinstance(number, int) and isinstance(items, Sized):
            size = meter.weight(items) // _WEIGHT_PER_BYTE
            return max(number, 0) * (sys.getsizeof(items) + size)
    return 0


def _given(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return all arguments, of those by keyword `old` before `new`, and `sep` before `maxsplit`."""
    return *args, *(kwargs[name] for name in sorted(kwargs, reverse=True))


def _growth(name: str, value: Any, args: tuple[Any, ...], meter: Meter) -> int:
    """Return the bytes of the result of a filter or method, if the result can be much larger than the arguments."""
    if name in ("center", "ljust", "rjust", "zfill", "batch", "slice", "to_bytes", "round"):
        return sum(map(_int_size, args))
    if name == "from_bytes" or (name == "sum" and any(isinstance(arg, _CONTAINERS) for arg in args)):
        raise SecurityError(f"{name} of these arguments is not supported")
    if name in ("encode", "decode") and not _CODECS.issuperset(args):
        raise SecurityError(f"{name} is supported with one of {', '.join(sorted(_CODECS))} only")
    if name in ("format", "format_map"):
        return _format_growth(value, args, meter)
    return _text_growth(name, value, args, meter) if isinstance(value, (str, bytes)) else 0


def _text_growth(name: str, value: Any, args: tuple[Any, ...], meter: Meter) -> int:
    size, longest = len(value), max((_longest(arg, meter) for arg in args), default=0)
    count: Callable[[Any], int] = value.count
    if name == "int":
        return 0 if size < _MAX_INT_BITS else MAX_BYTES + 1
    if name == "expandtabs":
        return count("\t" if isinstance(value, str) else b"\t") * max(map(_int_size, args), default=8)
    if name == "indent":
        return (count("\n") + 1) * (max(map(_int_size, args), default=4) + longest)
    if name == "replace" and len(args) > 1:  # of texts, or of values that become texts
        kind = bytes if isinstance(value, bytes) else str  # `value` may be a text of Jinja's, marked as escaped
        old, new = (arg if isinstance(arg, kind) else meter.text(arg) for arg in args[:2])
        return count(old) * len(new) if isinstance(old, kind) else 0
    if name in ("rfind", "rindex", "rpartition", "rsplit") and size * longest > _MAX_REVERSE_SEARCH:
        return MAX_BYTES + 1
    if name in ("split", "rsplit", "splitlines"):
        separator = args[0] if args and isinstance(args[0], type(value)) else None
        return _PIECE_BYTES * (count(separator) if separator else size // 2)
    if name in ("wordwrap", "wordcount", "translate", "urlize", "title"):
        return size * (_PIECE_BYTES + longest)
    return 5 * size if name in ("e", "escape", "forceescape") else 0


def _format_growth(value: Any, args: tuple[Any, ...], meter: Meter) -> int:
    text = value.decode("latin-1") if isinstance(value, bytes) else str(value)
    if _WIDE_FORMAT.search(text):
        raise SecurityError("a format has a width of more than four digits, or one that is an argument")
    num_fields, widths = text.count("%") + text.count("{"), map(int, re.findall(r"[0-9]+", text))
    return num_fields * sum(map(meter.text_size, args)) + sum(widths)


def _longest(value: Any, meter: Meter) -> int:
    """Length of the longest text in an argument, or of the text that it becomes."""
    if isinstance(value, dict):
        return max((_longest(each, meter) for each in value.values()), default=0)
    return meter.text_size(value) if isinstance(value, (str, bytes, *_CONTAINERS)) else 0


def _int_size(value: Any) -> int:
    return min(abs(value), MAX_BYTES + 1) if isinstance(value, int) else 0
