"""Reads and parses request bodies: limits of size and memory, JSON, field types, and checks that need no tokenizer."""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import islice
from typing import TypeVar

from pydantic import BaseModel
from starlette.requests import Request

from octavo_server.api.context import ApiContext, context_of
from octavo_server.http.body import ClientDisconnected
from octavo_server.http.body import read_body as read_raw
from octavo_server.openai.embedding import VectorFields
from octavo_server.openai.errors import MalformedRequest
from octavo_server.openai.fields import GenerationFields
from octavo_server.openai.request_parser import parse_request
from octavo_server.openai.unsupported import refuse_unsupported

logger = logging.getLogger(__name__)

Body = TypeVar("Body", bound=BaseModel)
Vectors = TypeVar("Vectors", bound=VectorFields)
Generating = TypeVar("Generating", bound=GenerationFields)
Parsed = TypeVar("Parsed")

MAX_LOGGED_FIELDS = 20


async def read_body(request: Request, parse: Callable[[bytes], Parsed]) -> tuple[Parsed, int]:
    """Return the parsed body and its size in bytes; no memory stays reserved. Raises the errors of `held_body`."""
    async with held_body(request, parse) as parsed:
        return parsed


@asynccontextmanager
async def held_body(request: Request, parse: Callable[[bytes], Parsed]) -> AsyncIterator[tuple[Parsed, int]]:
    """Yield the parsed body and its size in bytes; memory of this size stays reserved until the block ends.

    Raises the errors of `parse`, MalformedRequest for another type than JSON, RequestTooLarge or RequestTimeout beyond
    `RequestLimits`, ClientDisconnected, and Unavailable if too many bodies are being read.
    """
    context = context_of(request)
    check_content_type(request.headers.get("content-type", ""))
    with context.body_budget.reserve(request.scope["state"].get("tenant", "")) as reservation:
        try:
            raw = await read_raw(request.scope, request.receive, context.config.limits, reservation)
        except ClientDisconnected:
            request_id = request.scope["state"]["request_id"]
            logger.debug("request %s: the client disconnected before the body was complete", request_id)
            raise
        parsed, num_bytes = await context.threads.parse(parse, raw), len(raw)
        del raw
        yield parsed, num_bytes


def check_content_type(kind: str) -> None:
    """Check that a body is declared as JSON, as pages of other origins then ask before they send it (CORS).

    Raises MalformedRequest.
    """
    if kind.partition(";")[0].strip().lower() != "application/json":
        declared = f"is of type {kind[:100]!r}" if kind else "has no content type"
        raise MalformedRequest(f"The body {declared}: send JSON with the header 'Content-Type: application/json'.")


def parse_body(context: ApiContext, kind: type[Body], raw: bytes) -> Body:
    """Parse a body into its model. Raises MalformedRequest for a wrong type, InvalidRequest beyond a limit."""
    body = parse_request(raw, kind, context.config.limits)
    if body.model_extra and logger.isEnabledFor(logging.DEBUG):
        logger.debug("fields that the API does not define: %s", list(islice(body.model_extra, MAX_LOGGED_FIELDS)))
    return body


def parse_generation(context: ApiContext, kind: type[Generating], raw: bytes) -> Generating:
    """Parse a body and make every check of it that needs no tokenizer."""
    body = parse_body(context, kind, raw)
    context.resolve_model_name(body.model)
    refuse_unsupported(body)
    body.check()
    return body


def parse_vectors(context: ApiContext, kind: type[Vectors], raw: bytes) -> Vectors:
    """Parse a body for an embedding model and make every check of it that needs no tokenizer."""
    body = parse_body(context, kind, raw)
    context.resolve_model_name(body.model)
    body.check()
    return body
