"""The OpenAPI document: bodies are read by our own code (one parser, one error shape), so they are declared here.

Declares 400 with the OpenAI envelope where FastAPI would declare 422.
"""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from octavo_server.openai.chat import ChatCompletionRequest
from octavo_server.openai.completion import CompletionRequest
from octavo_server.openai.errors import ErrorResponse
from octavo_server.openai.tokenize import DetokenizeRequest, TokenizeRequest

BODIES: tuple[type[BaseModel], ...] = (ChatCompletionRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
_REF = "#/components/schemas/{model}"


def accepts(body: type[BaseModel], summary: str) -> dict[str, Any]:
    """Arguments of a route whose body is `body`."""
    content = {"application/json": {"schema": {"$ref": _REF.format(model=body.__name__)}}}
    return {
        "summary": summary,
        "response_model": None,
        "openapi_extra": {"requestBody": {"required": True, "content": content}},
        "responses": {status: {"model": ErrorResponse} for status in (400, 401, 404, 429, 500, 503)},
    }


def document(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        _, definitions = models_json_schema([(body, "validation") for body in BODIES], ref_template=_REF)
        components = schema.setdefault("components", {}).setdefault("schemas", {})
        components.update(definitions["$defs"])
        _drop_422(schema)
        app.openapi_schema = schema
    return app.openapi_schema


def _drop_422(schema: dict[str, Any]) -> None:
    for operations in schema["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        schema["components"]["schemas"].pop(name, None)
