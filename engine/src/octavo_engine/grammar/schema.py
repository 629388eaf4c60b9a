"""Checks a JSON Schema keyword by keyword before the grammar library compiles it.

Keywords that cannot be enforced are rejected by name and place; keywords that the library enforces too loosely are made
strict. The library ignores unknown keywords, formats of numbers, keywords of another dialect and, if the schema says so
("x-guidance"), all that it does not support; it counts repeated keys and treats a self-reference as an empty text.
"""

import difflib
import json
import reprlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from octavo_engine.grammar import keywords
from octavo_engine.grammar.keywords import NUMBER_FORMATS, STRICTER, STRING_FORMATS
from octavo_engine.grammar.references import References, refuse
from octavo_engine.wire.errors import InvalidRequest

Schema = dict[str, Any]

_LOWEST: int = NUMBER_FORMATS["int64"]["minimum"]
_MOST = sys.float_info.max


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaBounds:
    max_bytes: int
    max_depth: int


def read_schema(value: Schema | str, bounds: SchemaBounds) -> Schema:
    """Parse a schema. Raises InvalidRequest if it is not JSON, not an object, or exceeds the bounds."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    check_size(text, bounds, "The schema")
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refuse(f"it is not JSON: {error}.") from error
    if isinstance(value, str):  # a JSON escape may encode a lone surrogate, which UTF-8 cannot
        check_size(json.dumps(schema, ensure_ascii=False), bounds, "The schema")
    if not isinstance(schema, dict):
        raise refuse(f"it must be a JSON object, got {type(schema).__name__}.")
    depth = _depth(schema)
    if depth > bounds.max_depth:
        raise refuse(f"it is nested {depth} levels deep; the limit is {bounds.max_depth}: flatten it, or use $defs.")
    _check_numbers(schema, "#", _is_json)
    return schema


def check_size(text: str, bounds: SchemaBounds, subject: str) -> None:
    """Raises InvalidRequest, whose message begins with `subject`."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{subject} holds a lone surrogate, which UTF-8 cannot encode.") from error
    if size > bounds.max_bytes:
        raise InvalidRequest(f"{subject} has {size} bytes; the limit is {bounds.max_bytes} (--max-schema-bytes).")


def _check_numbers(value: Any, place: str, is_taken: Callable[[float], bool]) -> None:
    """Raise InvalidRequest for a number, also inside of `value`, which the library does not take."""
    if isinstance(value, int | float) and not is_taken(value):
        message = f"the number {reprlib.repr(value)} is not supported: use a number from {_LOWEST} to {_MOST}."
        raise refuse(message, place)
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        _check_numbers(child, f"{place}/{key}", is_taken)


def _is_json(number: float) -> bool:
    """False for a number that Python reads and the library does not: NaN, infinity, 1e400."""
    return -_MOST <= number <= _MOST


def _has_negative(number: float) -> bool:
    """Return False if the library cannot negate the number as an integer: it would recurse without end, or refuse the
    bound."""
    return number >= _LOWEST


def _has_negative_unless_float(number: float) -> bool:
    """Return False if the library cannot negate the number. Unless a type is integer, it reads numbers below -2^63 as
    floats."""
    return number >= _LOWEST or not isinstance(number, int) or number < -(2**63)


def _depth(value: Any) -> int:
    """Count the levels of objects and lists, without recursion: the result bounds recursion in other functions."""
    level, depth = [value], 0
    while level := [v for v in level if isinstance(v, dict | list)]:
        depth += 1
        level = [child for v in level for child in (v.values() if isinstance(v, dict) else v)]
    return depth


class StrictSchema:
    """A schema, checked and rewritten. `rewritten`: the schema for the grammar library. Raises InvalidRequest."""

    def __init__(self, schema: Schema, *, no_additional_properties: bool) -> None:
        self._root = schema
        self._closes = no_additional_properties
        self._positional_items = _dialect(schema)
        has_integers = '"integer"' in json.dumps(schema)  # a reference may give any constant this type
        self._takes_constant = _has_negative if has_integers else _has_negative_unless_float
        self.rewritten = self._rewrite(schema, "#")
        References(self.rewritten)

    def _rewrite(self, schema: Any, place: str) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise refuse(f"a schema must be an object or a boolean, got {json.dumps(schema)[:80]}.", place)
        for keyword in schema:
            self._check_keyword(keyword, schema, place)
        written = {key: self._value(key, value, f"{place}/{key}") for key, value in schema.items()}
        if self._closes and "additionalProperties" not in schema and _is_about_objects(schema):
            written["additionalProperties"] = False
        return _with_strict_format(written, place)

    def _value(self, keyword: str, value: Any, place: str) -> Any:
        if keyword in keywords.NAMED_SCHEMAS and isinstance(value, dict):
            return {name: self._rewrite(child, f"{place}/{name}") for name, child in value.items()}
        is_list = keyword in keywords.LISTS_OF_SCHEMAS or (keyword == "items" and self._positional_items)
        if is_list and isinstance(value, list):
            return [self._rewrite(child, f"{place}/{i}") for i, child in enumerate(value)]
        if keyword in keywords.ONE_SCHEMA:
            return self._rewrite(value, place)
        if keyword in keywords.NAMED_SCHEMAS | keywords.LISTS_OF_SCHEMAS:
            raise refuse(f"{keyword} has a value of the wrong type.", place)
        return value

    def _check_keyword(self, keyword: str, schema: Schema, place: str) -> None:
        if keyword.startswith("x-") and keyword != "x-guidance":
            return
        if keyword not in keywords.ALL:
            raise refuse(f"the keyword {keyword!r} is not supported; {_remedy(keyword)}.", f"{place}/{keyword}")
        if keyword in keywords.PLAIN:
            is_taken = self._takes_constant if keyword in ("const", "enum") else _has_negative
            _check_numbers(schema[keyword], f"{place}/{keyword}", is_taken)
        if keyword == "prefixItems" and self._positional_items:
            raise refuse("prefixItems needs draft 2020-12, but $schema names an earlier one.", f"{place}/{keyword}")
        if keyword == "additionalItems" and not self._positional_items:
            raise refuse("additionalItems needs a draft before 2020-12; use items.", f"{place}/{keyword}")
        if keyword in ("$schema", "$id") and schema is not self._root:
            raise refuse(f"{keyword} is allowed only at the root.", f"{place}/{keyword}")
        if keyword == "minProperties" and _counts_repeated_keys(schema):
            raise refuse(
                "minProperties above 1 needs additionalProperties: false, because repeated keys would be counted.",
                f"{place}/{keyword}",
            )


def _dialect(schema: Schema) -> bool:
    name = schema.get("$schema", keywords.DEFAULT_DIALECT)
    positional_items = keywords.DIALECTS.get(str(name).removesuffix("#"))
    if positional_items is None:
        known = ", ".join(keywords.DIALECTS)
        raise refuse(f"the dialect {name!r} is not supported; use one of {known}, or leave $schema out.", "#/$schema")
    return positional_items


def _remedy(keyword: str) -> str:
    if keyword in keywords.REMEDIES:
        return keywords.REMEDIES[keyword]
    near = difflib.get_close_matches(keyword, keywords.ALL, n=1, cutoff=0.8)
    return f"did you mean {near[0]!r}?" if near else "leave it out"


def _is_about_objects(schema: Schema) -> bool:
    kinds = schema.get("type", "object" if "properties" in schema else None)
    return kinds == "object" or (isinstance(kinds, list) and "object" in kinds)


def _counts_repeated_keys(schema: Schema) -> bool:
    least, required = schema["minProperties"], schema.get("required")
    is_closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    return (
        isinstance(least, int) and least > max(1, len(required) if isinstance(required, list) else 0) and not is_closed
    )


def _with_strict_format(schema: Schema, place: str) -> Schema:
    """Add patterns or bounds that enforce a schema's `format` as strictly as validators do."""
    name, kinds = schema.get("format"), schema.get("type", "string")
    if name is None:
        return schema
    if not isinstance(name, str):
        raise refuse("format must be a string.", f"{place}/format")
    if not isinstance(kinds, str | list):
        raise refuse("type must be a string or a list of strings.", f"{place}/type")
    if kinds in ("integer", "number") and name in NUMBER_FORMATS:
        bounds = NUMBER_FORMATS[name]
        rest = {key: value for key, value in schema.items() if key != "format"}
        return _both(rest, bounds) if bounds else rest
    if name not in STRING_FORMATS or "string" not in ([kinds] if isinstance(kinds, str) else kinds):
        of = "" if kinds == "string" else f" of {json.dumps(kinds)}"
        known = ", ".join(sorted(NUMBER_FORMATS if kinds in ("integer", "number") else STRING_FORMATS))
        raise refuse(f"the format {name!r}{of} is not supported; supported formats: {known}.", f"{place}/format")
    return _both(schema, {"pattern": STRICTER[name]}) if name in STRICTER else schema


def _both(schema: Schema, more: Schema) -> Schema:
    return {**schema, "allOf": [*schema.get("allOf", ()), more]}
