"""The Jinja environment of chat templates: Jinja's immutable sandbox with the functions of transformers.

A template comes with the weights and is not trusted: it cannot access attributes, files or modules, and its work is
bounded (`template_meter`, `RangeBudget`), so that a bad template fails a request, not the server. Its output is for a
model, so nothing is HTML-escaped.
"""

from datetime import datetime
from typing import NoReturn, cast

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateRuntimeError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.visitor import NodeTransformer

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
    """Format the time. The format must be short, because the C library can pad numbers, which makes the result up to
    256 times as long."""
    if len(format) > _MAX_FORMAT:
        raise SecurityError(f"the format of strftime_now has more than {_MAX_FORMAT} characters")
    return datetime.now().strftime(format)


def meter_tree(tree: nodes.Template) -> nodes.Template:
    """Add calls of the meter to a parsed template."""
    return _Metering().visit(tree)  # type: ignore[no-any-return]


class _Metering(NodeTransformer):
    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(cast(nodes.Expr, node.iter), "octavo_iterate")
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_filtered(child, "octavo_write") for child in node.nodes]
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        for operand in node.ops:
            operand.expr = _filtered(operand.expr, "octavo_read")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno, environment=node.environment)
        return _filtered(parts, "join")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "octavo_keep") if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "octavo_keep")

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return self.visit_List(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "octavo_keep") if node.ctx == "load" else node


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno, environment=node.environment)
