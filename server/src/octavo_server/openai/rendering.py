"""A chat request to the text of its prompt. Replicas and routers both render here, so their prompts can't differ."""

from collections.abc import Mapping
from typing import Any, Protocol

from octavo_engine.text.template import NO_TEMPLATE
from octavo_engine.wire.errors import InvalidRequest

from octavo_server.openai.chat import ChatCompletionRequest

#: Arguments of the template's renderer that `chat_template_kwargs` may not replace.
RESERVED_KWARGS = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
#: Fields outside of OpenAI's that templates know under the same name.
TEMPLATE_FIELDS = ("documents", "reasoning_effort")


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


def render_messages(template: ChatRenderer | None, body: ChatCompletionRequest) -> str:
    """Raises InvalidRequest."""
    if template is None:
        raise InvalidRequest(NO_TEMPLATE, param="messages")
    continues = bool(body.continue_final_message)
    generates = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    return template.render(
        body.conversation(),
        tools=body.described_tools(),
        add_generation_prompt=generates,
        continue_final_message=continues,
        **_template_kwargs(body),
    )


def _template_kwargs(body: ChatCompletionRequest) -> dict[str, Any]:
    kwargs: Mapping[str, Any] = body.chat_template_kwargs or {}
    if taken := sorted(RESERVED_KWARGS & kwargs.keys()):
        raise InvalidRequest(f"chat_template_kwargs can't set {', '.join(taken)}.", param="chat_template_kwargs")
    extra = body.model_extra or {}
    named = {name: extra[name] for name in TEMPLATE_FIELDS if extra.get(name) is not None}
    return {**named, **kwargs}
