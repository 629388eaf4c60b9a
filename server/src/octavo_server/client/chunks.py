"""Chunks of a streamed response as `ApiClient` decodes them: the few fields that it needs, of any OpenAI-like server.

Decoding a chunk into these structs costs microseconds, so that a benchmark measures the server and not the client.
"""

from typing import Any

import msgspec
from msgspec import Struct


class StreamDelta(Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # older name of the field `reasoning`
    tool_calls: list[dict[str, Any]] | None = None


class StreamChoice(Struct):
    index: int = 0
    text: str | None = None
    delta: StreamDelta | None = None
    finish_reason: str | None = None


class StreamUsage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None


class Chunk(Struct):
    choices: list[StreamChoice] = []
    usage: StreamUsage | None = None
    error: Any = None

    @property
    def text(self) -> str:
        return "".join([c.text or (c.delta.content if c.delta else None) or "" for c in self.choices])

    @property
    def reasoning(self) -> str:
        deltas = [c.delta for c in self.choices if c.delta]
        return "".join([d.reasoning or d.reasoning_content or "" for d in deltas])

    @property
    def has_content(self) -> bool:
        """True if the chunk holds generated output, and not only a role, a finish reason or token counts."""
        return bool(self.text or self.reasoning) or any(c.delta and c.delta.tool_calls for c in self.choices)

    @property
    def finish_reason(self) -> str | None:
        return next((c.finish_reason for c in self.choices if c.finish_reason), None)


_decoder = msgspec.json.Decoder(Chunk)


def decode_chunk(data: bytes) -> Chunk:
    """Decode the data of an event. Raises msgspec.DecodeError."""
    return _decoder.decode(data)


def error_message(error: Any) -> str:
    """The message of an error body in OpenAI's or FastAPI's form; of another body, all of it as text."""
    if isinstance(error, dict):
        inner = error.get("error", error)
        message = inner.get("message") or inner.get("detail") if isinstance(inner, dict) else inner
        return str(message or error)
    return str(error)
