"""The Jinja environment of chat templates: Jinja's immutable sandbox with the functions of transformers.

A template comes with the weights and is not trusted: it cannot access attributes, files or modules, and `RangeBudget`
bounds its loops, so that a bad template fails a request, not the server. Its output is for a model, so nothing is
HTML-escaped.
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
    """The template has rejected the conversation by calling `raise_exception`."""


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's text for training; here the block is replaced by its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class RangeBudget:
    """A `range` function for one rendering, whose ranges together have at most `limit` items."""

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
