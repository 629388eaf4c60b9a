"""Converts `StructuredOutputs` to a grammar in llguidance's syntax and checks it; invalid shapes are rejected here.

This runs in the process that accepts requests, without torch and without a vocabulary; the engine core only compiles
the text.
"""

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from octavo_engine.grammar.compiler import (
    WHITESPACE,
    GrammarError,
    LatestTexts,
    check_grammar,
    grammar_of_schema,
    json_options,
)
from octavo_engine.grammar.references import MAX_PATTERNS, refuse, subschemas
from octavo_engine.grammar.schema import SchemaBounds, StrictSchema, check_size, read_schema
from octavo_engine.wire.errors import InvalidRequest
from octavo_engine.wire.structured import KINDS, StructuredOutputs

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

#: Rule of the whitespace between JSON's tokens, for grammars with parts.
_WS, _NO_WS = f"ws: WS?\nWS: /{WHITESPACE}/\n", 'ws: ""\n'
_SPECIAL_TOKEN = re.compile(r"<\[[0-9]+\]>")
#: Comments, strings, regexes and special tokens of a Lark grammar, as the library's lexer cuts them.
_LITERALS = re.compile(r'(?:#|//)[^\n]*|"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/|<[^<>]+>', re.DOTALL)
_MAX_SEARCHED = 64  # subschemas that are checked one by one to locate an error


class GrammarSource:
    """Makes grammar texts for one front end; caches those of the latest shapes, as clients repeat the same schema."""

    def __init__(self, bounds: SchemaBounds) -> None:
        self._bounds = bounds
        self._latest: LatestTexts[str] = LatestTexts()

    def grammar_for(self, shape: StructuredOutputs) -> str:
        """Return the grammar text that enforces a shape. Raises InvalidRequest, which names the shape's place."""
        try:
            shape_json = json.dumps({name: getattr(shape, name) for name in shape.__slots__})
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"{_place(shape)}: it is not JSON: {error}.", param=_place(shape)) from error
        grammar = self._latest.get(shape_json)
        if grammar is None:
            grammar = self._write(shape_json)
            self._latest.put(shape_json, grammar)
        return grammar

    def _write(self, shape_json: str) -> str:
        return self._write_shape(StructuredOutputs(**json.loads(shape_json)))

    def _write_shape(self, shape: StructuredOutputs) -> str:
        try:
            if shape.json is not None or shape.json_object:
                return self._from_schema(shape)
            return self._from_parts(shape) if shape.parts else self._from_text(shape)
        except InvalidRequest as error:
            if error.param is not None:  # the place of a part
                raise
            raise InvalidRequest(f"{_place(shape)}: {error}", param=_place(shape)) from error

    def _write_part(self, whole: StructuredOutputs, part: dict[str, Any]) -> str:
        bans_whitespace = whole.disable_any_whitespace and part.get("whitespace_pattern") is None
        shape = StructuredOutputs(**part)
        shape.disable_any_whitespace |= bans_whitespace
        shape.disable_additional_properties |= whole.disable_additional_properties
        return self._write_shape(shape)

    def _from_parts(self, shape: StructuredOutputs) -> str:
        """Write one grammar out of the server's own and those of its parts; their schemas share the bound on bytes."""
        parts, schemas = [], ""
        for part in shape.parts:
            parts.append(self._write_part(shape, part))
            schemas += json.dumps(part.get("json"), ensure_ascii=False)
            check_size(schemas, self._bounds, "The sum of all schemas")
        whole = f"{shape.grammar}\n{_NO_WS if shape.disable_any_whitespace else _WS}"
        _check(_grammars(_SPECIAL_TOKEN.sub('"x"', whole), parts))  # ids can't be checked without a vocabulary
        return _grammars(whole, parts)

    def _from_text(self, shape: StructuredOutputs) -> str:
        kind = _kind(shape)
        text = getattr(shape, kind)
        if shape.choice is not None:
            text = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in shape.choice)
        check_size(text, self._bounds, "It")
        grammar = _WRITERS[kind](text)
        _check(grammar)
        return grammar

    def _from_schema(self, shape: StructuredOutputs) -> str:
        schema = read_schema({"type": "object"} if shape.json is None else shape.json, self._bounds)
        strict = StrictSchema(schema, no_additional_properties=shape.disable_additional_properties)
        check_size(shape.whitespace_pattern or "", self._bounds, "whitespace_pattern")
        options = json_options(shape)
        try:
            return grammar_of_schema(strict.rewritten, options)
        except GrammarError as error:
            raise refuse(f"{error}.", _place_of(str(error), strict.rewritten, options)) from error


def _kind(shape: StructuredOutputs) -> str:
    return next(kind for kind in KINDS if getattr(shape, kind) not in (None, False))


def _place(shape: StructuredOutputs) -> str:
    return shape.place or f"structured_outputs.{_kind(shape)}"


def _check(grammar: str) -> None:
    try:
        check_grammar(grammar)
    except GrammarError as error:
        raise InvalidRequest(f"it cannot be compiled: {error}") from error


def _grammars(whole: str, parts: list[str]) -> str:
    """One grammar text in which the Lark grammar `whole` refers to its parts by their names."""
    named: list[dict[str, Any]] = [{"lark_grammar": whole}]
    for i, part in enumerate(parts):
        (grammar,) = json.loads(part)["grammars"] if part.startswith("{") else [{"lark_grammar": part}]
        named.append({**grammar, "name": f"part_{i}"})
    return json.dumps({"grammars": named})


def _lark(text: str) -> str:
    try:
        lark = any_to_lark(text)
    except Exception as error:  # the converter raises plain Exception for a missing rule
        raise InvalidRequest(f"it is neither Lark nor GBNF: {error}") from error
    operators = _LITERALS.sub(" ", lark)
    if re.search(r"%json\s*\{", operators):
        raise InvalidRequest("it cannot hold a schema (%json): send it as json.")
    if (count := operators.count("&")) > MAX_PATTERNS:
        raise InvalidRequest(f"it holds {count} '&'; the limit is {MAX_PATTERNS}, as each doubles the work.")
    return LLMatcher.grammar_from_lark(lark)


def _with_ascii_digits(regex: str) -> str:
    r"""Restrict \d to 0-9, as JSON Schema and other servers do, instead of all Unicode digits."""
    return regex_to_lark(regex, "d").replace("\\/", "/")


_WRITERS: dict[str, Callable[[str], str]] = {
    "regex": lambda text: LLMatcher.grammar_from_regex(_with_ascii_digits(text)),
    "choice": lambda text: LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {text}"),  # one lexeme scales to many
    "grammar": _lark,
}


def _place_of(message: str, schema: dict[str, Any], options: "JsonCompileOptions") -> str:
    """Return the place of the innermost schema that alone fails with the same message; the root if none is found."""
    definitions: dict[str, Any] = {key: schema[key] for key in ("$schema", "$defs", "definitions") if key in schema}
    for place, part in list(subschemas(schema))[:_MAX_SEARCHED]:
        try:
            grammar_of_schema({**definitions, **part}, options)
        except GrammarError as error:
            if str(error) == message:
                return place
    return "#"
