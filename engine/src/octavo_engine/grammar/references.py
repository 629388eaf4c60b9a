"""Follows the references in a JSON Schema and counts the patterns that apply to one string.

A schema that refers to itself before any output is written has no meaning and is rejected. Every pattern that one
string must match doubles the work of the grammar library, so their number is bounded.
"""

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from octavo_engine.grammar import keywords
from octavo_engine.wire.errors import InvalidRequest

Schema = dict[str, Any]

MAX_PATTERNS = 8
MAX_CHAIN = 100


def refuse(message: str, place: str = "") -> InvalidRequest:
    where = f" at {place}" if place else ""
    return InvalidRequest(f"The schema cannot be enforced{where}: {message}")


def subschemas(schema: Any, place: str = "#") -> Iterator[tuple[str, Schema]]:
    """Yield the place (`#/properties/a`) and value of a schema and all its subschemas, the innermost first."""
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        if keyword in keywords.NAMED_SCHEMAS:
            children = value.items()
        elif isinstance(value, list) and (keyword in keywords.LISTS_OF_SCHEMAS or keyword == "items"):
            children = enumerate(value)
        elif keyword in keywords.ONE_SCHEMA:
            yield from subschemas(value, f"{place}/{keyword}")
            continue
        else:
            continue
        for name, child in children:
            yield from subschemas(child, f"{place}/{keyword}/{name}")
    yield place, schema


class References:
    """Raises InvalidRequest if a schema refers to another document or itself, or has too many patterns per string."""

    def __init__(self, root: Schema) -> None:
        self._by_place = dict(subschemas(root))
        self._anchors = {f"#{s['$anchor']}": place for place, s in self._by_place.items() if "$anchor" in s}
        self._counts: dict[str, int] = {}
        for place in self._by_place:
            count = self._num_patterns(place, ())
            if count > MAX_PATTERNS:
                message = f"{count} patterns and formats meet in one string; the limit is {MAX_PATTERNS}."
                raise refuse(message, place)

    def _num_patterns(self, place: str, path: tuple[str, ...]) -> int:
        """Count the patterns and formats that one string must match together."""
        if place in path:
            raise refuse("the schema refers to itself before any output is written.", path[0])
        if len(path) > MAX_CHAIN:
            raise refuse(f"a chain of references is longer than {MAX_CHAIN}.", path[0])
        if place not in self._counts:
            path, schema = (*path, place), self._by_place.get(place, {})
            count = ("pattern" in schema) + ("format" in schema)
            count += sum(self._num_patterns(child, path) for child in self._children(schema, place, "allOf"))
            for keyword in ("anyOf", "oneOf"):
                children = self._children(schema, place, keyword)
                count += max((self._num_patterns(child, path) for child in children), default=0)
            if "$ref" in schema:
                count += self._num_patterns(self._target(schema["$ref"], place), path)
            self._counts[place] = count
        return self._counts[place]

    def _children(self, schema: Schema, place: str, keyword: str) -> list[str]:
        return [f"{place}/{keyword}/{i}" for i in range(len(schema.get(keyword, ())))]

    def _target(self, reference: Any, place: str) -> str:
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise refuse("only references within the schema, which begin with #, are supported.", f"{place}/$ref")
        if reference in self._anchors:
            return self._anchors[reference]
        return unquote(reference).replace("~1", "/").replace("~0", "~").rstrip("/")
