"""Parses the raw bytes of a request into the pydantic model of its endpoint: bounds first, then JSON, then types.

Neither `from_json` nor pydantic releases the GIL, so a large body is validated in steps: every entry of the fields in
`ENTRY_MODELS` on its own, which lets the event loop run in between.
"""

from codecs import BOM_UTF8
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from octavo_server.config import RequestLimits
from octavo_server.openai.entries import ValidatedByEntry
from octavo_server.openai.errors import MalformedRequest, malformed
from octavo_server.openai.json_bounds import check_json
from octavo_server.openai.limits import check_counts

Body = TypeVar("Body", bound=BaseModel)
Piece = TypeVar("Piece", bound=BaseModel)


def parse_request(raw: bytes, kind: type[Body], limits: RequestLimits) -> Body:
    """Parse a body into `kind`. Raises MalformedRequest (not JSON, not UTF-8, or a wrong type) and InvalidRequest (a
    value beyond `limits`)."""
    check_json(raw, limits)
    try:
        body = from_json(raw.removeprefix(BOM_UTF8))
    except ValueError as error:
        raise MalformedRequest(f"Invalid JSON: {error}") from None
    if not isinstance(body, dict):
        raise MalformedRequest(f"The body must be a JSON object, not {_json_name(body)}.")
    check_counts(body, limits)
    return validate_request(body, kind)


def validate_request(body: dict[str, Any], kind: type[Body]) -> Body:
    """Validate a body; replace the entries of its `ENTRY_MODELS` fields by their models. Raises MalformedRequest."""
    pieces = kind.ENTRY_MODELS if issubclass(kind, ValidatedByEntry) else {}
    for name, entry_kind in pieces.items():
        entries = body.get(name)
        if isinstance(entries, list):
            body[name] = validate_entries(entries, entry_kind, name)
    return _validated(body, kind, "")


def validate_entries(entries: list[Any], kind: type[Piece], name: str) -> list[Piece]:
    return [_validated(entry, kind, f"{name}[{i}]") for i, entry in enumerate(entries)]


def _validated(value: Any, kind: type[Piece], where: str) -> Piece:
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise malformed(error, where) from None


def _json_name(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
