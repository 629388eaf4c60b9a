"""The Jinja environment of chat templates: what transformers gives them, in the immutable sandbox.

A template comes with the weights: it can't reach attributes, files or modules, and `RangeBudget` bounds its loops, so
that a bad one costs a request, not the server. Its text is for a model, not for a browser: nothing is escaped.
"""

import json
from datetime import datetime
from typing import Any, NoReturn, TypeVar

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateRuntimeError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class RaisedByTemplate(TemplateRuntimeError):
    """The template itself refuses the conversation."""


class _GenerationBlock(Extension):
    """`{% generation %}` marks, for training, what the assistant says; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class RangeBudget:
    """`range` for one rendering: all of its ranges together have at most `limit` items."""

    def __init__(self, limit: int) -> None:
        self._limit = self._left = limit

    def __call__(self, *args: int) -> range:
        items = range(*args)
        self._left -= len(items)
        if self._left < 0:
            raise SecurityError(f"its ranges have more than {self._limit} items together")
        return items


Kind = TypeVar("Kind", bound=ImmutableSandboxedEnvironment)


def template_environment() -> ImmutableSandboxedEnvironment:
    return environment_of(ImmutableSandboxedEnvironment)


def environment_of(kind: type[Kind]) -> Kind:
    environment = kind(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock])
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise RaisedByTemplate(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
