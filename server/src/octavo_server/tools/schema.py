"""JSON Schemas that force calls: a list of calls of these tools, or the arguments of one of them.

A tool's own references (`#/$defs/...`) are relative to its own schema, so they are led there from wherever it lands.
"""

from collections.abc import Mapping, Sequence
from typing import Any

#: Their values are data, not schemas.
_DATA = frozenset({"const", "enum", "default", "examples"})
#: With any of these beside `properties`, more than those may be meant.
_COMPOSED = frozenset({"additionalProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf"})


def arguments_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """A call has no other arguments than those that the tool describes."""
    schema = {"type": "object", **(function.get("parameters") or {"properties": {}})}
    if "properties" in schema and not _COMPOSED & schema.keys():
        schema["additionalProperties"] = False
    return schema


def calls_schema(functions: Sequence[Mapping[str, Any]], *, max_calls: int | None = None) -> dict[str, Any]:
    schemas = [arguments_schema(function) for function in functions]
    shared = {f"tool_{i}": _moved(schema, f"#/$defs/tool_{i}") for i, schema in enumerate(schemas) if _refers(schema)}
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                "parameters": {"$ref": f"#/$defs/tool_{i}"} if f"tool_{i}" in shared else schema,
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for i, (function, schema) in enumerate(zip(functions, schemas, strict=True))
    ]
    schema: dict[str, Any] = {
        "type": "array",
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
        "minItems": 1,
    }
    if max_calls is not None:
        schema["maxItems"] = max_calls
    return schema | ({"$defs": shared} if shared else {})


def _refers(schema: object) -> bool:
    if isinstance(schema, list):
        return any(map(_refers, schema))
    if not isinstance(schema, dict):
        return False
    return isinstance(schema.get("$ref"), str) or any(_refers(v) for k, v in schema.items() if k not in _DATA)


def _moved(schema: Any, to: str) -> Any:
    if isinstance(schema, list):
        return [_moved(item, to) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _moved_member(key, value, to) for key, value in schema.items()}


def _moved_member(key: str, value: Any, to: str) -> Any:
    if key == "$ref" and isinstance(value, str) and value.startswith("#"):
        return to + value[1:]
    return value if key in _DATA else _moved(value, to)
