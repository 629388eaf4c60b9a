"""`ChatFields` reads the conversation and the rendering options from the body of a chat request.

The schema (`openai.chat`) validates each distinct message and each distinct set of options once; the results are cached
under their JSON.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from octavo_engine.wire.errors import InvalidRequest

from octavo_server.openai.chat import ChatCompletionRequest, ChatMessage
from octavo_server.openai.rendering import NO_DEFAULTS, TEMPLATE_FIELDS, RenderDefaults, RenderOptions, render_options
from octavo_server.openai.request_parser import validate_request
from octavo_server.router.prompts.two_queue_cache import TwoQueueCache

_OPTIONS = frozenset(
    {
        *("tools", "tool_choice", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"),
        "add_special_tokens",
    }
).union(TEMPLATE_FIELDS)
#: Most bytes of memory for each byte of a cache key: 1 for the byte, 4 for a character of text in the cached value.
WIDEST_TEXT = 1 + 4
#: Most bytes of memory for each JSON value: an empty object takes 64 bytes, its place in a list 8.
VALUE_BYTES = 100
_to_json = msgspec.json.Encoder().encode


class ChatFields:
    """`defaults`: those of the replicas."""

    def __init__(self, *, max_bytes: int, defaults: RenderDefaults = NO_DEFAULTS) -> None:
        self._defaults = defaults
        self._plain = RenderOptions(kwargs=defaults.kwargs)
        self._messages: TwoQueueCache[bytes, dict[str, Any]] = TwoQueueCache(max_bytes)
        self._options: TwoQueueCache[bytes, RenderOptions] = TwoQueueCache(max_bytes)

    def options(self, body: Mapping[str, Any]) -> RenderOptions:
        """Rendering options of a chat request. Raises InvalidRequest or ValidationError if they are invalid."""
        if _OPTIONS.isdisjoint(body):
            return self._plain
        given = {name: body[name] for name in _OPTIONS if name in body}
        key = _to_json(given)
        known = self._options.get(key)
        if known is None:
            known = render_options(validate_request({"messages": [], **given}, ChatCompletionRequest), self._defaults)
            self._options.put(key, known, _size(key))
        return known

    def conversation(self, messages: object) -> list[dict[str, Any]]:
        """Messages as the template gets them. Raises InvalidRequest or ValidationError if they are invalid."""
        if not isinstance(messages, list):
            raise InvalidRequest("messages must be a list.", param="messages")
        return [self._read(message) for message in messages]

    def _read(self, message: object) -> dict[str, Any]:
        key = _to_json(message)
        known = self._messages.get(key)
        if known is None:
            known = ChatMessage.model_validate(message).model_dump(exclude_none=True)
            self._messages.put(key, known, _size(key))
        return known


def _size(key: bytes) -> int:
    """Upper estimate in bytes of a JSON key and of the values that were parsed from it."""
    num_values = sum(map(key.count, (b",", b"[", b"{")))
    return WIDEST_TEXT * len(key) + VALUE_BYTES * num_values
