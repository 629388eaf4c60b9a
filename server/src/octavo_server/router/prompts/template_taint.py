"""Texts that a template may copy but not look at, and the Jinja environment that sees to it.

A template is run with a `TaintedStr` in place of each content. Joining it with other text and stripping it at its ends
is all that it allows; whatever else would depend on the characters raises `TemplateInspectsContent`. So where a
rendering goes through, no content had a part in what the template did, and every conversation with the same roles is
rendered alike.

Functions written in C read a string without asking it. Hence filters, tests and calls are watched, and the operators
that would reach such a function (`~`, `%`, `in`) are made calls. A string that was put together unseen, by a macro or a
block, is known by the marks in it, which no template or client has any business with.
"""

import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from octavo_engine.text.sandbox import environment_of, template_environment

OPEN, CLOSE = "\ue0f2", "\ue0f3"
#: Stands for white space that a content may begin or end with.
EDGE = "\x1f"


class TemplateInspectsContent(Exception):
    """What the template does may depend on what a message says."""


def _refuse(*_: object, **__: object) -> NoReturn:
    raise TemplateInspectsContent


class TaintedStr(str):
    """Text with the marks of contents in it, none of which is empty or all white space."""

    __slots__ = ()

    def __str__(self) -> str:
        return self

    def __bool__(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return False if type(other) is str and not other else _refuse()

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __add__(self, other: str) -> str:
        return TaintedStr(str.__add__(self, other))

    def __radd__(self, other: str) -> str:
        return TaintedStr(str.__add__(other, self))

    def strip(self, chars: str | None = None) -> str:
        return TaintedStr(str.strip(self)) if chars is None else _refuse()

    def lstrip(self, chars: str | None = None) -> str:
        return TaintedStr(str.lstrip(self)) if chars is None else _refuse()

    def rstrip(self, chars: str | None = None) -> str:
        return TaintedStr(str.rstrip(self)) if chars is None else _refuse()


_HARMLESS = {"__new__", "__doc__", "__getattribute__", "__sizeof__"}
for _name in {*vars(str), "__hash__", "__rmod__", "__html__"} - _HARMLESS:
    if _name not in vars(TaintedStr) or _name == "__hash__":  # which a class with __eq__ has, as None
        setattr(TaintedStr, _name, _refuse)


def content_mark(index: int) -> TaintedStr:
    return TaintedStr(f"{EDGE}{OPEN}{index}{CLOSE}{EDGE}")


def _holds(value: object) -> bool:
    """Whether a content is in it, however deep."""
    if isinstance(value, str):
        return isinstance(value, TaintedStr) or OPEN in value
    if isinstance(value, Mapping):
        return any(map(_holds, value.values()))
    return isinstance(value, list | tuple) and any(map(_holds, value))


def _marked(value: Any) -> Any:
    return TaintedStr(value) if type(value) is str and OPEN in value else value


def _written(value: Any) -> Any:
    """What is written is plain text, which whoever puts texts together may look at."""
    return "".join((value, "")) if isinstance(value, TaintedStr) else value


def _joined(*parts: object) -> str:
    text = "".join(map(str, parts))
    return str(_marked(text))


def _in(item: object, container: Any) -> bool:
    if _holds(item) or (isinstance(container, str) and _holds(container)):
        raise TemplateInspectsContent
    return item in container


def _mod(left: Any, right: Any) -> Any:
    if _holds(left) or _holds(right):
        raise TemplateInspectsContent
    return left % right


_OPERATORS = {"octavo_joined": _joined, "octavo_in": _in, "octavo_mod": _mod}
_TAKE_ANYTHING = (*_OPERATORS.values(), Namespace, dict)
#: What Jinja itself adds to a call, for functions that ask for it.
_SCOPE = ("_loop_vars", "_block_vars")


class _OperatorsAsCalls(NodeTransformer):
    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        return self._call("octavo_joined", *node.nodes)

    def visit_Mod(self, node: nodes.Mod) -> nodes.Node:  # noqa: N802
        return self._call("octavo_mod", node.left, node.right)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        if not any(operand.op in ("in", "notin") for operand in node.ops):
            return self.generic_visit(node)
        if len(node.ops) > 1:
            raise TemplateInspectsContent
        call = self._call("octavo_in", node.expr, node.ops[0].expr)
        return call if node.ops[0].op == "in" else nodes.Not(call)

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:  # noqa: N802
        node.filter = nodes.Filter(node.filter, "octavo_marked", [], [], None, None)
        return self.generic_visit(node)

    def visit_FilterBlock(self, node: nodes.Node) -> nodes.Node:  # noqa: N802
        raise TemplateInspectsContent

    visit_CallBlock = visit_FilterBlock  # noqa: N815
    visit_ScopedEvalContextModifier = visit_FilterBlock  # noqa: N815

    def _call(self, name: str, *arguments: nodes.Expr) -> nodes.Expr:
        known = [self.visit(argument) for argument in arguments]
        return nodes.Call(nodes.Name(name, "load"), known, [], None, None)


#: Filters that only hand on what they get, or ask by operators that `TaintedStr` refuses.
_FILTERS = frozenset(
    {"trim", "default", "d", "list", "first", "last", "length", "count", "map", "string", "items", "reverse"}
    | {"selectattr", "rejectattr", "select", "reject", "octavo_marked"}
)
#: What a text is, whatever it says.
_TEXT_IS = {
    **dict.fromkeys(("defined", "string", "iterable", "sequence"), True),
    **dict.fromkeys(("undefined", "none", "mapping", "number", "integer", "float", "boolean", "callable"), False),
    **dict.fromkeys(("true", "false"), False),
}


class ShownDates(threading.local):
    """What templates asked of the clock in this thread since `shown` was emptied: format -> text. Renderings in several
    threads share nothing, so that none waits for another."""

    def __init__(self) -> None:
        self.shown: dict[str, str] = {}


class OpaqueEnvironment(ImmutableSandboxedEnvironment):
    """Made by `opaque_environment`."""

    dates: ShownDates

    def parse(self, source: str, name: str | None = None, filename: str | None = None) -> nodes.Template:
        """Raises TemplateInspectsContent."""
        tree: nodes.Template = _OperatorsAsCalls().visit(super().parse(source, name, filename))
        for node in tree.find_all(nodes.Node):
            node.set_environment(self)
        return tree

    def call(self, context: Context, function: Any, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *(value for name, value in kwargs.items() if name not in _SCOPE)]
        if _holds(given) and not isinstance(function, Macro) and not any(function is one for one in _TAKE_ANYTHING):
            raise TemplateInspectsContent
        return _marked(super().call(context, function, *args, **kwargs))


def is_nondeterministic(source: str) -> bool:
    """Whether a template gives another text each time: no two of its prompts are the same."""
    tree = template_environment().parse(source)
    filters, names = tree.find_all(nodes.Filter), tree.find_all(nodes.Name)
    return any(node.name == "random" for node in filters) or any(node.name == "lipsum" for node in names)


def opaque_environment() -> OpaqueEnvironment:
    environment = environment_of(OpaqueEnvironment)
    environment.filters = {name: _watched_filter(name, call) for name, call in environment.filters.items()}
    environment.filters |= {"octavo_marked": _marked, "random": _refuse}
    environment.tests = {name: _watched_test(name, call) for name, call in environment.tests.items()}
    environment.globals |= {**_OPERATORS, "lipsum": _refuse}
    environment.finalize = _written
    environment.dates = ShownDates()
    now: Any = environment.globals["strftime_now"]

    def strftime_now(format: str) -> str:
        shown: str = environment.dates.shown.setdefault(format, now(format))
        return shown

    environment.globals["strftime_now"] = strftime_now
    return environment


def _watched_filter(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if name not in _FILTERS and (_holds(args) or _holds(kwargs)):
            raise TemplateInspectsContent
        return _marked(call(*args, **kwargs))

    return watched


def _watched_test(name: str, call: Any) -> Callable[..., Any]:
    @functools.wraps(call)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if not (_holds(args) or _holds(kwargs)):
            return call(*args, **kwargs)
        if name not in _TEXT_IS or len(args) > 1 or kwargs:
            raise TemplateInspectsContent
        return _TEXT_IS[name] if isinstance(args[0], str) else call(*args)

    return watched
