"""Checks of the settings for tool calls, reasoning and chat templates."""

from typing import TYPE_CHECKING

from octavo_engine.wire.errors import StartupError

from octavo_server.config import ServerConfig
from octavo_server.output_parsing.reasoning_formats import REASONING_PARSERS
from octavo_server.output_parsing.tool_call_formats import TOOL_PARSERS

if TYPE_CHECKING:
    from octavo_engine.text.template import ChatTemplate


def template_warning(parser: str | None, template: "ChatTemplate | None") -> str | None:
    if parser is None or (template is not None and "tools" in (template.tool_source or template.source)):
        return None
    return (
        f"--tool-call-parser {parser}: the chat template does not mention tools, so prompts will not describe them. "
        "Pass a template that does with --chat-template."
    )


def check_tools(config: ServerConfig) -> None:
    """Raises StartupError for an unknown parser, a missing one, and a reserved name of a template's value."""
    name, reasoning = config.tools.tool_call_parser, config.reasoning_parser
    if reasoning is not None and reasoning not in REASONING_PARSERS:
        raise StartupError(f"--reasoning-parser {reasoning} is unknown: use one of {', '.join(REASONING_PARSERS)}.")
    if name is not None and name not in TOOL_PARSERS:
        raise StartupError(f"--tool-call-parser {name} is unknown: use one of {', '.join(TOOL_PARSERS)}.")
    if config.tools.enable_auto_tool_choice and name is None:
        raise StartupError(f"--enable-auto-tool-choice needs --tool-call-parser: one of {', '.join(TOOL_PARSERS)}.")
    from octavo_server.openai.rendering import RESERVED_KWARGS

    if taken := sorted(RESERVED_KWARGS & config.default_chat_template_kwargs.keys()):
        raise StartupError(f"--default-chat-template-kwargs can't set {', '.join(taken)}: leave it out.")
