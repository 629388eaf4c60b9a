"""Builds the OpenAPI document. FastAPI doesn't parse bodies or write responses here, so routes declare their types.

The document has status 400 with the API's error body where FastAPI would declare 422, and both forms of a response that
may be streamed. A route carries the definitions of its types under `DEFINITIONS`; `document` collects them.
"""

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from octavo_server.openai.errors import ErrorResponse

DEFINITIONS = "x-definitions"
JSON, EVENT_STREAM, TEXT = "application/json", "text/event-stream", "text/plain"
#: Error statuses of every route with a body.
REFUSALS = (400, 401, 404, 429, 500, 503)

Schema = dict[str, Any]
#: A type that msgspec can describe, a tuple of such types, of which the response has one, a media type if the response
#: isn't JSON, or None for a response without a body.
AnswerType = Any


def accepts(
    body: type[BaseModel],
    summary: str,
    *,
    answer: AnswerType,
    streams: bool = False,
    error: type[BaseModel] = ErrorResponse,
) -> dict[str, Any]:
    """Arguments of FastAPI's decorator for a route with a body; `streams`: the response may also be an event stream."""
    route = answers(summary, answer, refusals=REFUSALS, error=error)
    if streams:
        route["responses"][200]["content"][EVENT_STREAM] = {"schema": {"type": "string"}}
    content = {JSON: {"schema": {"$ref": _ref(body.__name__)}}}
    extra = route["openapi_extra"]
    extra["requestBody"] = {"required": True, "content": content}
    extra[DEFINITIONS] |= models_json_schema([(body, "validation")], ref_template=_ref("{model}"))[1]["$defs"]
    return route


def answers(
    summary: str,
    answer: AnswerType,
    *,
    refusals: tuple[int, ...] = (),
    unavailable: AnswerType = None,
    error: type[BaseModel] = ErrorResponse,
) -> dict[str, Any]:
    """Arguments of FastAPI's decorator for a route without a body. `refusals`: error statuses. `unavailable`: type of
    the body that a probe returns with status 503."""
    content, definitions = _described(answer)
    done = {"description": "Done", **({"content": content} if content else {})}
    responses: dict[int, Schema] = {200: done, **{status: {"model": error} for status in refusals}}
    if unavailable is not None:
        responses[503] = {"description": "Unavailable", "content": _described(unavailable)[0]}
    return {
        "summary": summary,
        "response_model": None,
        "response_class": Response,
        "responses": responses,
        "openapi_extra": {DEFINITIONS: definitions},
    }


def _described(answer: AnswerType) -> tuple[Schema, Schema]:
    if answer is None:
        return {}, {}
    if isinstance(answer, str):
        return {answer: {"schema": {"type": "string"}}}, {}
    kinds = answer if isinstance(answer, tuple) else (answer,)
    schemas, definitions = msgspec.json.schema_components(kinds, ref_template=_ref("{name}"))
    return {JSON: {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}}}, definitions


def _ref(name: str) -> str:
    return f"#/components/schemas/{name}"


def document(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        components = schema.setdefault("components", {}).setdefault("schemas", {})
        for operations in schema["paths"].values():
            for operation in operations.values():
                components.update(operation.pop(DEFINITIONS, {}))
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            components.pop(name, None)
        app.openapi_schema = schema
    return app.openapi_schema
