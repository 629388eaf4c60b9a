"""`PromptSource` parses the raw body of a request, and hashes or estimates the `Prompt` that routing works with.

Small bodies are parsed on the event loop, large ones in a thread. A body that is no JSON object has no fields here: it
is forwarded, and the replica rejects it with the reason. The router itself refuses only bodies that are too
expensive to parse.
"""

from codecs import BOM_UTF8
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import msgspec
from pydantic_core import from_json

from octavo_server.config import BodyLimits
from octavo_server.http.request_threads import INLINE_BYTES, RequestThreads
from octavo_server.openai.json_bounds import check_json
from octavo_server.router.prompts.prompt import Prompt, RouteKind, estimate, kind_of_body
from octavo_server.router.prompts.prompt_hashers import PromptHashers


class RequestFields(NamedTuple):
    """`is_plain`: False if the body is no JSON object or holds NaN or Infinity. A replica's parser accepts these
    numbers, but the caches of prompts use JSON keys, which can't hold them.

    The fields take many times the memory of the raw body: drop them before the response is awaited.
    """

    body: Mapping[str, Any]
    is_plain: bool
    num_bytes: int

    @property
    def is_malformed(self) -> bool:
        """True if the body is no JSON object, or if its `model` is no string: no replica accepts it."""
        return (not self.is_plain and not self.body) or not isinstance(self.body.get("model", ""), str | None)


class PromptSource:
    def __init__(self, hashers: PromptHashers, limits: BodyLimits, threads: RequestThreads) -> None:
        self._hashers = hashers
        self._limits = limits
        self._threads = threads

    async def parse(self, raw: bytes) -> RequestFields:
        """Parse a body. Raises InvalidRequest if it has more values or deeper nesting than the limits allow."""
        return await self._threads.parse(self._parse, raw)

    async def hash_prompt(self, route: RouteKind, fields: RequestFields, *, model: str, tenant: str) -> Prompt:
        kind = kind_of_body(route, fields.body)
        hasher = self._hashers.hasher_for(model) if fields.is_plain else None
        make = partial(estimate, kind, fields.body)
        if hasher is not None:
            adapter = self._hashers.adapter_for(model)
            make = partial(hasher.hash_prompt, kind, fields.body, tenant, adapter=adapter)
        if fields.num_bytes <= INLINE_BYTES:
            return make()
        return await self._threads.run(make, num_bytes=fields.num_bytes)

    def _parse(self, raw: bytes) -> RequestFields:
        check_json(raw, self._limits)
        try:
            body, is_plain = msgspec.json.decode(raw.removeprefix(BOM_UTF8)), True
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            body, is_plain = _parse_lenient(raw), False
        if not isinstance(body, dict):
            return RequestFields({}, False, len(raw))
        return RequestFields(body, is_plain, len(raw))


def _parse_lenient(raw: bytes) -> Any:
    """Parse the body as replicas do. Return None if they would refuse it."""
    try:
        return from_json(raw.removeprefix(BOM_UTF8))
    except ValueError:
        return None
