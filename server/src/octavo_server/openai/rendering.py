"""Renders a chat request to the text of its prompt; replicas and routers share this code, so prompts can't differ."""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo_engine.text.messages import SYSTEM_ROLES
from octavo_engine.text.template import NO_TEMPLATE, ChatTemplate
from octavo_engine.wire.errors import InvalidRequest

from octavo_server.openai.chat import ChatCompletionRequest
from octavo_server.output_parsing.reasoning_formats import SWITCH

#: Arguments of `ChatTemplate.render` that `chat_template_kwargs` may not replace.
RESERVED_KWARGS = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
#: Fields of a request that chat templates use under the same name.
TEMPLATE_FIELDS = ("documents", "reasoning_effort", "verbosity")


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderOptions:
    """All inputs of the prompt's text and tokens besides the messages."""

    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_special_tokens: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderDefaults:
    """Settings of a server: values for templates, and whether `tool_choice: none` hides the tools from the prompt."""

    kwargs: Mapping[str, Any] = field(default_factory=dict)
    excludes_unused_tools: bool = False


NO_DEFAULTS = RenderDefaults()


def render_options(body: ChatCompletionRequest, defaults: RenderDefaults = NO_DEFAULTS) -> RenderOptions:
    """Options of a chat request. Raises InvalidRequest if `chat_template_kwargs` sets a reserved argument."""
    continues = bool(body.continue_final_message)
    hides_tools = defaults.excludes_unused_tools and body.tool_choice == "none"
    return RenderOptions(
        tools=None if hides_tools else body.described_tools(),
        add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=continues,
        kwargs=template_kwargs(body, defaults),
        add_special_tokens=bool(body.add_special_tokens),
    )


def render_conversation(
    template: ChatTemplate | None, conversation: list[dict[str, Any]], options: RenderOptions
) -> str:
    """Render a conversation. Raises InvalidRequest if the model has no template, or the template rejects it."""
    if template is None:
        raise InvalidRequest(NO_TEMPLATE, param="messages")
    return template.render(
        conversation,
        tools=options.tools,
        add_generation_prompt=options.add_generation_prompt,
        continue_final_message=options.continue_final_message,
        **options.kwargs,
    )


def without_oldest(
    body: ChatCompletionRequest, count_tokens: Callable[[ChatCompletionRequest], int], max_model_len: int
) -> ChatCompletionRequest:
    """Drop the oldest messages until the context has room for the request's longest answer, or for half the context if
    that is less.

    System messages, the user's last message and all messages after it are kept, even if they do not fit. The first
    other message that is kept is a user's, as many templates demand; so each tool result keeps its call.
    """
    room = min(body.output_limit or 1, max(1, max_model_len // 2))

    def kept_from(start: int) -> ChatCompletionRequest:
        kept = [message for i, message in enumerate(body.messages) if i >= start or message.role in SYSTEM_ROLES]
        return body.model_copy(update={"messages": kept})

    def fits(chat: ChatCompletionRequest) -> bool:
        try:
            return count_tokens(chat) + room <= max_model_len
        except InvalidRequest:
            return False

    starts = [i for i, message in enumerate(body.messages) if i and message.role == "user"]
    if not starts or fits(body):
        return body
    return kept_from(starts[bisect_left(starts, True, hi=len(starts) - 1, key=lambda start: fits(kept_from(start)))])


def template_kwargs(body: ChatCompletionRequest, defaults: RenderDefaults) -> dict[str, Any]:
    """Return the further arguments of the template. Raises InvalidRequest for a reserved one."""
    kwargs: Mapping[str, Any] = body.chat_template_kwargs or {}
    if taken := sorted(RESERVED_KWARGS & kwargs.keys()):
        raise InvalidRequest(f"chat_template_kwargs can't set {', '.join(taken)}.", param="chat_template_kwargs")
    named = {name: value for name in TEMPLATE_FIELDS if (value := getattr(body, name, None)) is not None}
    if body.reasoning_effort == "none":
        named[SWITCH] = False
    return {**defaults.kwargs, **named, **kwargs}
