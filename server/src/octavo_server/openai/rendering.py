"""Renders a chat request to the text of its prompt. Replicas and routers share it, so their prompts can't differ."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from octavo_engine.text.template import NO_TEMPLATE
from octavo_engine.wire.errors import InvalidRequest

from octavo_server.openai.chat import ChatCompletionRequest

#: Arguments of the template's renderer that `chat_template_kwargs` may not replace.
RESERVED_KWARGS = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
#: Fields that chat templates use under the same name.
TEMPLATE_FIELDS = ("documents",)


class ChatRenderer(Protocol):
    source: str
    special_tokens: dict[str, str]

    def render(
        self,
        messages: list[dict[str, Any]],
        /,
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderOptions:
    """Everything that a prompt depends on besides the conversation."""

    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_special_tokens: bool = False


def render_options(body: ChatCompletionRequest) -> RenderOptions:
    """Raises InvalidRequest."""
    continues = bool(body.continue_final_message)
    return RenderOptions(
        tools=body.described_tools(),
        add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=continues,
        kwargs=_template_kwargs(body),
        add_special_tokens=bool(body.add_special_tokens),
    )


def render_messages(template: ChatRenderer | None, body: ChatCompletionRequest) -> str:
    """Raises InvalidRequest."""
    return render_conversation(template, body.conversation(), render_options(body))


def render_conversation(
    template: ChatRenderer | None, conversation: list[dict[str, Any]], options: RenderOptions
) -> str:
    """Raises InvalidRequest."""
    if template is None:
        raise InvalidRequest(NO_TEMPLATE, param="messages")
    return template.render(
        conversation,
        tools=options.tools,
        add_generation_prompt=options.add_generation_prompt,
        continue_final_message=options.continue_final_message,
        **options.kwargs,
    )


def _template_kwargs(body: ChatCompletionRequest) -> dict[str, Any]:
    kwargs: Mapping[str, Any] = body.chat_template_kwargs or {}
    if taken := sorted(RESERVED_KWARGS & kwargs.keys()):
        raise InvalidRequest(f"chat_template_kwargs can't set {', '.join(taken)}.", param="chat_template_kwargs")
    extra = body.model_extra or {}
    named = {name: extra[name] for name in TEMPLATE_FIELDS if extra.get(name) is not None}
    if body.reasoning_effort is not None:
        named["reasoning_effort"] = body.reasoning_effort
    return {**named, **kwargs}
