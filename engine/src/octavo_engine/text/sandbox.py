"""The Jinja environment of chat templates: Jinja's immutable sandbox with the functions of transformers.

A template comes with the weights and is not trusted: it cannot access attributes, files or modules, and its work is
bounded (`template_meter`, `RangeBudget`), so that a bad template fails a request, not the server. Its output is for a
model, so nothing is HTML-escaped.
"""

from datetime import datetime
from typing import NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateRuntimeError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from octavo_engine.text.template_meter import MeteredEnvironment

_MAX_FORMAT = 256


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


def template_environment() -> MeteredEnvironment:
    environment = MeteredEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock])
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise RaisedByTemplate(message)


def _strftime_now(format: str) -> str:
    """Return the time in a format, which must be short: the C library can pad a number to a width that makes the result
    256 times as long."""
    if len(format) > _MAX_FORMAT:
        raise SecurityError(f"the format of strftime_now has more than {_MAX_FORMAT} characters")
    return datetime.now().strftime(format)
