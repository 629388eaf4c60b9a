"""JSON Schemas that force tool calls: a list of calls of the given tools, or the arguments of one of them.

References in a tool's schema (`#/$defs/...`) are relative to that schema, so they are rewritten for its place in the
new schema. A tool's `$schema`, which is valid only at the root, moves to the root if all tools have the same `$schema`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

#: Keywords of JSON Schema whose values are data, not schemas.
_DATA = frozenset({"const", "enum", "default", "examples"})
#: Keywords of JSON Schema whose value maps names, not keywords, to schemas.
_NAMED = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})
#: Keywords of JSON Schema that may allow more properties than `properties` lists.
_COMPOSED = frozenset({"additionalProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf"})


def arguments_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """Schema of a tool's arguments. It forbids properties that the tool does not list, unless the tool's own schema has
    a keyword that allows them. It omits `strict`, which some clients write here: a schema is always enforced."""
    schema = {"type": "object", **(function.get("parameters") or {"properties": {}})}
    schema.pop("strict", None)
    if "properties" in schema and not _COMPOSED & schema.keys():
        schema["additionalProperties"] = False
    return schema


def calls_schema(functions: Sequence[Mapping[str, Any]], *, max_calls: int | None = None) -> dict[str, Any]:
    dialects: set[str] = set()
    shared: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for i, function in enumerate(functions):
        schema = arguments_schema(function)
        dialects.add(schema.pop("$schema", ""))
        moved = _relocate(schema, f"#/$defs/tool_{i}")
        if moved != schema:
            shared[f"tool_{i}"], schema = moved, {"$ref": f"#/$defs/tool_{i}"}
        calls.append(_call_schema(function["name"], schema))
    items = calls[0] if len(calls) == 1 else {"anyOf": calls}
    limit = {} if max_calls is None else {"maxItems": max_calls}
    head = {"$schema": dialect} if len(dialects) == 1 and (dialect := dialects.pop()) else {}
    return {**head, "type": "array", "items": items, "minItems": 1, **limit, **({"$defs": shared} if shared else {})}


def _call_schema(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": arguments},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _relocate(schema: Any, to: str) -> Any:
    if isinstance(schema, list):
        return [_relocate(item, to) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _relocate_member(key, value, to) for key, value in schema.items()}


def _relocate_member(key: str, value: Any, to: str) -> Any:
    if key == "$ref" and isinstance(value, str) and value.startswith("#"):
        return to + value[1:]
    if key in _NAMED and isinstance(value, dict):
        return {name: _relocate(schema, to) for name, schema in value.items()}
    return value if key in _DATA else _relocate(value, to)
