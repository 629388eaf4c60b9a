"""`PromptSource`: the raw body of a request to its fields, and its fields to the `Prompt` that routing works with.

Small bodies are read on the event loop, large ones in a thread. A body that is no JSON object has no fields here: it is
sent to a replica, which says what is wrong with it. Only what would cost the router too much is refused here.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import msgspec
from pydantic_core import from_json

from octavo_server.config import RequestLimits
from octavo_server.http.request_threads import INLINE_BYTES, RequestThreads
from octavo_server.openai.json_bounds import check_json
from octavo_server.router.prompts.prompt import Kind, Prompt, estimate
from octavo_server.router.prompts.prompt_hasher import PromptHasher


class RequestFields(NamedTuple):
    """`is_plain`: False where the body is no JSON object, or holds NaN or Infinity. A replica's parser reads these; the
    caches of prompts know values by their JSON, which has no such numbers. Drop it before the response is awaited: it
    takes many times the memory of the body."""

    body: Mapping[str, Any]
    is_plain: bool
    num_bytes: int


class PromptSource:
    """`hasher_of`: the hasher of a model, or None where its prompts can only be estimated."""

    def __init__(
        self, hasher_of: Callable[[str], PromptHasher | None], limits: RequestLimits, threads: RequestThreads
    ) -> None:
        self._hasher_of = hasher_of
        self._limits = limits
        self._threads = threads

    async def parse(self, raw: bytes) -> RequestFields:
        """Raises InvalidRequest for more values, or deeper nesting, than the limits allow."""
        return await self._threads.parse(self._parse, raw)

    async def hash_prompt(self, kind: Kind, fields: RequestFields, *, model: str, tenant: str) -> Prompt:
        hasher = self._hasher_of(model) if fields.is_plain else None
        read = partial(estimate, kind, fields.body)
        if hasher is not None:
            read = partial(hasher.hash_prompt, kind, fields.body, tenant)
        if fields.num_bytes <= INLINE_BYTES:
            return read()
        return await self._threads.run(read, num_bytes=fields.num_bytes)

    def _parse(self, raw: bytes) -> RequestFields:
        check_json(raw, self._limits)
        try:
            body, is_plain = msgspec.json.decode(raw), True
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            body, is_plain = _lenient(raw), False
        if not isinstance(body, dict):
            return RequestFields({}, False, len(raw))
        return RequestFields(body, is_plain, len(raw))


def _lenient(raw: bytes) -> Any:
    """As replicas parse it; None for what they refuse."""
    try:
        return from_json(raw)
    except ValueError:
        return None
