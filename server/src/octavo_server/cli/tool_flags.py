"""Flags for tool calls and reasoning: the formats in which the model writes them, and automatic tool choice."""

import argparse
from typing import TYPE_CHECKING, Any

from octavo_engine.settings.arg_types import json_object
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
        help="Let the model decide whether to call a tool (tool_choice: auto); needs --tool-call-parser. Default: off.",
    )
    group.add_argument(
        "--exclude-tools-when-tool-choice-none",
        action=argparse.BooleanOptionalAction,
        default=False,
        help='No description of tools in the prompt of a request with tool_choice "none". Default: off.',
    )
    group.add_argument(
        "--trust-request-chat-template",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="Render a conversation with the chat_template of its request. Default: refuse such a request.",
    )
    group.add_argument(
        "--default-chat-template-kwargs",
        type=json_object,
        default={},
        metavar="JSON",
        help='Values for the chat template, such as {"enable_thinking": false}; those of a request replace them. '
        "Default: none.",
    )
    names = ", ".join(TOOL_PARSERS)
    group.add_argument(
        "--tool-call-parser", metavar="NAME", help=f"Format of the model's tool calls: {names}. Default: none."
    )
    reasoning = ", ".join(REASONING_PARSERS)
    group.add_argument(
        "--reasoning-parser", metavar="NAME", help=f"Format of the model's reasoning: {reasoning}. Default: none."
    )


def template_warning(parser: str | None, template: "ChatTemplate | None") -> str | None:
    if parser is None or (template is not None and "tools" in (template.tool_source or template.source)):
        return None
    return (
        f"--tool-call-parser {parser}: the chat template does not mention tools, so prompts will not describe them. "
        "Pass a template that does with --chat-template."
    )


def template_settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of `ServerConfig` about chat templates. Raises StartupError."""
    from octavo_server.openai.rendering import RESERVED_KWARGS

    kwargs = args.default_chat_template_kwargs
    if taken := sorted(RESERVED_KWARGS & kwargs.keys()):
        raise StartupError(f"--default-chat-template-kwargs can't set {', '.join(taken)}: leave it out.")
    return {
        "default_chat_template_kwargs": kwargs,
        "exclude_tools_when_tool_choice_none": args.exclude_tools_when_tool_choice_none,
        "trust_request_chat_template": args.trust_request_chat_template,
    }


def reasoning_parser_of(args: argparse.Namespace) -> str | None:
    """Value of --reasoning-parser. Raises StartupError for an unknown name."""
    name: str | None = args.reasoning_parser or None
    if name is not None and name not in REASONING_PARSERS:
        raise StartupError(f"--reasoning-parser {name} is unknown: use one of {', '.join(REASONING_PARSERS)}.")
    return name


def tool_settings_of(args: argparse.Namespace) -> ToolSettings:
    """`ToolSettings` from the flags. Raises StartupError for an unknown parser or a missing one."""
    name = args.tool_call_parser
    if name is not None and name not in TOOL_PARSERS:
        raise StartupError(f"--tool-call-parser {name} is unknown: use one of {', '.join(TOOL_PARSERS)}.")
    if args.enable_auto_tool_choice and name is None:
        raise StartupError(f"--enable-auto-tool-choice needs --tool-call-parser: one of {', '.join(TOOL_PARSERS)}.")
    return ToolSettings(parser=name, allows_auto=args.enable_auto_tool_choice)
