"""The flags about tools: how the model writes calls, and whether it may decide to call by itself."""

import argparse

from octavo_engine.wire.errors import StartupError

from octavo_server.tools.registry import TOOL_PARSERS
from octavo_server.tools.use import ToolSettings


def add_tool_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("tools")
    group.add_argument(
        "--enable-auto-tool-choice",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="let the model decide whether to call a tool; needs --tool-call-parser (default: off)",
    )
    names = ", ".join(TOOL_PARSERS)
    group.add_argument("--tool-call-parser", metavar="NAME", help=f"how the model writes calls: {names}")


def tool_settings_of(args: argparse.Namespace) -> ToolSettings:
    """Raises StartupError."""
    name = args.tool_call_parser
    if name is not None and name not in TOOL_PARSERS:
        raise StartupError(f"--tool-call-parser {name} is unknown: use one of {', '.join(TOOL_PARSERS)}.")
    if args.enable_auto_tool_choice and name is None:
        raise StartupError(f"--enable-auto-tool-choice needs --tool-call-parser: one of {', '.join(TOOL_PARSERS)}.")
    return ToolSettings(parser=name, allows_auto=args.enable_auto_tool_choice)
