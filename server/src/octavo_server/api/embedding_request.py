"""Vectors of the texts of one request: all texts are checked before the first runs, and errors name the text."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
from octavo_engine.wire.errors import InvalidRequest, Unavailable
from starlette.requests import Request

from octavo_server.api.answer_state import CACHED_TOKENS
from octavo_server.api.context import ApiContext, ResponseMeta
from octavo_server.api.generation import Generation, GenerationDelta, PromptInput
from octavo_server.openai.answer import Usage, count_usage
from octavo_server.openai.completion import Prompt
from octavo_server.openai.embedding import VectorFields

RETRY_AFTER_S = 1.0

#: A text, and the part of the body that holds it.
NamedText = tuple[str, Prompt]


async def prepare(
    context: ApiContext,
    request: Request,
    body: VectorFields,
    texts: Sequence[NamedText],
    *,
    prefix: str,
    arrival_s: float,
) -> tuple[ResponseMeta, Generation]:
    """Tokenise and check the texts of a request, without running it. Raises InvalidRequest.

    `prefix`: of the response's id. `arrival_s`: when the request arrived, for metrics.
    """
    context.admission.check_size(len(texts))
    meta = context.new_response_meta(prefix, request, body)
    resolved = context.client.frontend.resolve_pooling(body.pooling_params(), priority=body.priority or 0)
    prompts = list[PromptInput]()
    for name, text in texts:
        with _errors_naming(name):
            prompts.append(PromptInput(token_ids=await _token_ids(context, body, text)))
            context.client.frontend.fit(prompts[-1].token_ids, resolved)
    return meta, context.new_generation(meta, body, prompts, resolved, arrival_s)


async def _token_ids(context: ApiContext, body: VectorFields, text: Prompt) -> list[int]:
    special = isinstance(text, str) and body.add_special_tokens is not False
    if isinstance(text, str):
        may_exceed = body.truncate_prompt_tokens is not None
        text = await context.encode_prompt(text, add_special_tokens=special, may_exceed=may_exceed)
    return context.truncate(text, body, is_framed=special)


@contextmanager
def _errors_naming(text: str) -> Iterator[None]:
    """Make errors about a prompt name the text."""
    try:
        yield
    except InvalidRequest as error:
        if error.param in ("prompt", "input_tokens"):
            error.param = text
        raise


class VectorAnswer(ABC):
    """Collects the vectors of one request, in any order; a subclass writes the response from all of them."""

    def __init__(self, meta: ResponseMeta, generation: Generation) -> None:
        self.meta = meta
        self._generation = generation
        self._vectors = [b""] * len(generation.prompts)
        self._num_cached = 0

    async def body(self) -> bytes:
        with self._generation.reserve_answer() as reservation:
            await self._generation.add_all(self._add, reservation)
            return await asyncio.to_thread(lambda: msgspec.json.encode(self.response(self._vectors)))

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [(CACHED_TOKENS, str(self._num_cached).encode())]

    def usage(self) -> Usage:
        return count_usage(self._generation.num_prompt_tokens, 0, self._num_cached)

    @abstractmethod
    def response(self, vectors: list[bytes]) -> object:
        """Build the response, in a thread: thousands of numbers take milliseconds."""

    def _add(self, delta: GenerationDelta) -> None:
        vector = delta.output.embedding
        if vector is None:
            raise Unavailable("The request was aborted: send it again.", retry_after_s=RETRY_AFTER_S)
        self._vectors[delta.prompt_idx] = vector
        self._num_cached += delta.output.num_cached_tokens
