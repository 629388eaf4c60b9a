"""The flags about reading answers: how the model writes calls and reasoning, and whether it may call unasked."""

import argparse
from typing import TYPE_CHECKING

from octavo_engine.wire.errors import StartupError

from octavo_server.output_parsing.reasoning_formats import REASONING_PARSERS
from octavo_server.output_parsing.tool_call_formats import TOOL_PARSERS
from octavo_server.output_parsing.tool_use import ToolSettings

if TYPE_CHECKING:
    from octavo_engine.text.template import ChatTemplate


def add_tool_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("tools and reasoning")
    group.add_argument(
        "--enable-auto-tool-choice",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="let the model decide whether to call a tool; needs --tool-call-parser (default: off)",
    )
    names = ", ".join(TOOL_PARSERS)
    group.add_argument("--tool-call-parser", metavar="NAME", help=f"how the model writes calls: {names}")
    reasoning = ", ".join(REASONING_PARSERS)
    group.add_argument("--reasoning-parser", metavar="NAME", help=f"how the model writes reasoning: {reasoning}")


def template_warning(parser: str | None, template: "ChatTemplate | None") -> str | None:
    if parser is None or (template is not None and "tools" in template.source):
        return None
    return (
        f"--tool-call-parser {parser}: the chat template mentions no tools, so the model won't know of them. "
        "Pass --chat-template with one that does."
    )


def reasoning_parser_of(args: argparse.Namespace) -> str | None:
    """Raises StartupError."""
    name: str | None = args.reasoning_parser or None
    if name is not None and name not in REASONING_PARSERS:
        raise StartupError(f"--reasoning-parser {name} is unknown: use one of {', '.join(REASONING_PARSERS)}.")
    return name


def tool_settings_of(args: argparse.Namespace) -> ToolSettings:
    """Raises StartupError."""
    name = args.tool_call_parser
    if name is not None and name not in TOOL_PARSERS:
        raise StartupError(f"--tool-call-parser {name} is unknown: use one of {', '.join(TOOL_PARSERS)}.")
    if args.enable_auto_tool_choice and name is None:
        raise StartupError(f"--enable-auto-tool-choice needs --tool-call-parser: one of {', '.join(TOOL_PARSERS)}.")
    return ToolSettings(parser=name, allows_auto=args.enable_auto_tool_choice)
