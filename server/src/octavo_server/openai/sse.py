"""Server-sent events in OpenAI's form: `data: {json}` frames, of which the last is `[DONE]`, also after an error.

Chunks are msgspec structs: encoding one costs about a microsecond; a pydantic model would cost fifty.
"""

import msgspec

from octavo_server.openai.errors import describe

UNBUFFERED = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]  # keeps proxies from buffering
HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), *UNBUFFERED]
DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


def frame(chunk: object) -> bytes:
    return b"data: " + _encode(chunk) + b"\n\n"


def named_frame(name: str, event: object) -> bytes:
    return b"event: " + name.encode() + b"\n" + frame(event)


def error_frame(error: Exception) -> bytes:
    return frame(describe(error).envelope())
