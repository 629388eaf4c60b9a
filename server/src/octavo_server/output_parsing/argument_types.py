"""Types that a tool's schema gives its arguments, and the JSON of an argument that the model wrote as plain text."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from octavo_server.output_parsing.json_scanner import JsonScanner
from octavo_server.output_parsing.pythonic import to_json

Schema = Mapping[str, Any]
Types = frozenset[str]
#: JSON text of a value, and its types.
Reading = tuple[str, Types]
STRING: Types = frozenset({"string"})
ANY: Types = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})

_COMBINED = ("anyOf", "oneOf", "allOf")
#: Words of other languages that models write for values of JSON.
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}
_BITS = {"1": "true", "0": "false"}


def types_of(parameters: Schema, key: str) -> Types:
    """Types of JSON Schema that `parameters`, the schema of a tool's arguments, allows for `key`; empty if it names
    none. A type that JSON Schema lacks allows any."""
    properties = parameters.get("properties")
    listed = properties if isinstance(properties, Mapping) else {}
    pending = [listed.get(key, parameters.get("additionalProperties"))]
    found: set[str] = set()
    followed: set[str] = set()
    while pending:
        schema = pending.pop()
        if not isinstance(schema, Mapping):
            continue
        if "type" in schema:
            found.update(map(str, schema["type"] if isinstance(schema["type"], list) else [schema["type"]]))
        elif "const" in schema or isinstance(schema.get("enum"), list):
            found.update(*map(_kinds, schema["enum"] if "enum" in schema else [schema["const"]]))
        for keyword in _COMBINED if "type" not in schema else ():
            pending += schema[keyword] if isinstance(schema.get(keyword), list) else []
        if isinstance(ref := schema.get("$ref"), str) and ref not in followed:
            followed.add(ref)
            pending.append(_referenced(parameters, ref))
    return frozenset(found) if found <= ANY else ANY


def typed_json(text: str, types: Types) -> str:
    """JSON of the value that the model wrote as `text`. It is a string if `types` allows strings and no other type
    fits; if no type fits, it is the JSON value that the text is, or else a string, as in vLLM."""
    if types == STRING:
        return json.dumps(text, ensure_ascii=False)
    written = text.strip()
    written = _WORDS.get(written.lower(), written)
    found = _as_json(written)
    for reading in _readings(found, written):
        if reading is not None and (reading[1] - STRING) & types:
            return reading[0]
    return found[0] if found is not None and "string" not in types else json.dumps(text, ensure_ascii=False)


class ArgumentValue:
    """Converts the text of one argument to JSON, chunk by chunk: a string as it arrives, any other value once it is
    complete. `own_lines`: one newline at each end of the text does not belong to the value."""

    def __init__(self, types: Types, *, own_lines: bool) -> None:
        self._types = types
        self._own_lines = own_lines
        self._at_start = True
        self._text: list[str] = []  # of a value that is no string
        self._held = ""  # newline that is part of the string only if more text follows
        self._quote = '"' if types == STRING else ""  # opening quote, until it is emitted

    def push(self, text: str) -> str:
        """Return the part of the JSON text that became certain by the next chunk."""
        if text and self._at_start:
            self._at_start = False
            text = text.removeprefix("\n") if self._own_lines else text
        if self._types != STRING:
            self._text.append(text)
            return ""
        text = self._held + text
        self._held = "\n" if self._own_lines and text.endswith("\n") else ""
        return self._string(text.removesuffix(self._held))

    def finish(self) -> str:
        """Return the rest of the JSON text."""
        if self._types == STRING:
            return self._string("") + '"'
        text = "".join(self._text)
        return typed_json(text.removesuffix("\n") if self._own_lines else text, self._types)

    def break_off(self) -> str:
        """Return the rest of the text of a value that the answer does not complete."""
        return self._string(self._held) if self._types == STRING else "".join(self._text)

    def _string(self, text: str) -> str:
        quote, self._quote = self._quote, ""
        return quote + json.dumps(text, ensure_ascii=False)[1:-1]


def _readings(found: Reading | None, text: str) -> Iterator[Reading | None]:
    yield found
    yield _as_json(to_json(text))
    yield _as_json(_BITS.get(text, ""))


def _as_json(text: str) -> Reading | None:
    """Return `text` as valid JSON, with its strings repaired, and the types of the value; None if it is no JSON."""
    if text[:1] in ("{", "["):
        repaired, end = JsonScanner().scan(text, 0)
        text = repaired + text[end:]
    try:
        return text, _kinds(json.loads(text, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _kinds(value: object) -> Types:
    """Types of JSON Schema that a value has."""
    match value:
        case None:
            return frozenset({"null"})
        case bool():
            return frozenset({"boolean"})
        case int():
            return frozenset({"integer", "number"})
        case float():
            return frozenset({"integer", "number"} if value.is_integer() else {"number"})
        case str():
            return STRING
        case list():
            return frozenset({"array"})
    return frozenset({"object"})


def _referenced(root: Schema, ref: str) -> Any:
    """Return the part of `root` that `ref`, such as `#/$defs/City`, names; None if there is none."""
    part: Any = root
    for step in ref.removeprefix("#").split("/")[1:]:
        part = part.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(part, Mapping) else None
    return part if ref.startswith("#") else None
