"""From `StructuredOutputs` to the grammar library's own text, checked: whatever is refused is refused here.

Runs where requests are accepted, without torch and without a vocabulary; the engine core only compiles the text.
"""

import json
import re
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from octavo_engine.grammar.library import GrammarError, check_grammar
from octavo_engine.grammar.references import MAX_PATTERNS, refuse, subschemas
from octavo_engine.grammar.schema import SchemaBounds, StrictSchema, check_size, read_schema
from octavo_engine.wire.errors import InvalidRequest
from octavo_engine.wire.structured import StructuredOutputs

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

#: Space between JSON's tokens, unless the request says: none, one, or a new line with its indentation. Without a bound
#: a small model may write nothing but space until its tokens are spent.
WHITESPACE = r"( ?|\n[ \t]{0,24})"
#: One spelling for each character. With \u and \/ a key could be written twice, in two ways.
ESCAPES = '"\\bfnrt'

_GRAMMAR = "structured_outputs.grammar"
_MAX_SEARCHED = 64  # schemas tried on their own to say where an error is
_CACHED = 256


class GrammarSource:
    """One per front end. Remembers what it has checked: clients send the same schema again and again."""

    def __init__(self, bounds: SchemaBounds) -> None:
        self._bounds = bounds
        self._cached_write = lru_cache(_CACHED)(self._write)

    def grammar_for(self, shape: StructuredOutputs) -> str:
        """Raises InvalidRequest."""
        try:
            shape_json = json.dumps({name: getattr(shape, name) for name in shape.__slots__})
        except (TypeError, ValueError, RecursionError) as error:
            raise refuse(f"it is not JSON: {error}.") from error
        return self._cached_write(shape_json)

    def _write(self, shape_json: str) -> str:
        shape = StructuredOutputs(**json.loads(shape_json))
        if shape.json is not None or shape.json_object:
            return self._from_schema(shape)
        kind = next(kind for kind in ("regex", "choice", "grammar") if getattr(shape, kind) is not None)
        param = f"structured_outputs.{kind}"
        text = getattr(shape, kind)
        if shape.choice is not None:
            text = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in shape.choice)
        check_size(text, self._bounds, param)
        grammar = _WRITERS[kind](text)
        try:
            check_grammar(grammar)
        except GrammarError as error:
            raise InvalidRequest(f"{param} can't be compiled: {error}", param=param) from error
        return grammar

    def _from_schema(self, shape: StructuredOutputs) -> str:
        schema = read_schema({"type": "object"} if shape.json is None else shape.json, self._bounds)
        strict = StrictSchema(schema, no_additional_properties=shape.disable_additional_properties)
        options = json_options(shape)
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(strict.rewritten), overrides=options)
        try:
            check_grammar(grammar)
        except GrammarError as error:
            raise refuse(f"{error}.", _place_of(str(error), strict.rewritten, options)) from error
        return grammar


def json_options(shape: StructuredOutputs) -> "JsonCompileOptions":
    options: JsonCompileOptions = {"lenient": False, "json_allowed_escapes": ESCAPES}
    if shape.disable_any_whitespace:
        return {**options, "whitespace_flexible": False}
    return {**options, "whitespace_pattern": shape.whitespace_pattern or WHITESPACE}


def _lark(text: str) -> str:
    if re.search(r"%json\s*\{", text):
        raise InvalidRequest("structured_outputs.grammar can't hold a schema (%json): send it as json.", param=_GRAMMAR)
    if text.count("&") > MAX_PATTERNS:
        message = f"{_GRAMMAR} holds {text.count('&')} &; the limit is {MAX_PATTERNS}: each doubles the work."
        raise InvalidRequest(message, param=_GRAMMAR)
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(text))
    except Exception as error:  # the converter raises no narrower type for a rule that is missing
        raise InvalidRequest(f"{_GRAMMAR} is neither Lark nor GBNF: {error}", param=_GRAMMAR) from error


def _with_ascii_digits(regex: str) -> str:
    r"""\d is 0 to 9, as in JSON Schema and in other servers, not any digit that Unicode has."""
    return regex_to_lark(regex, "d").replace("\\/", "/")


_WRITERS: dict[str, Callable[[str], str]] = {
    "regex": lambda text: LLMatcher.grammar_from_regex(_with_ascii_digits(text)),
    "choice": lambda text: LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {text}"),  # one lexeme: many may be
    "grammar": _lark,
}


def _place_of(message: str, schema: dict[str, Any], options: "JsonCompileOptions") -> str:
    """The innermost schema that fails alone with the same message; the root where that can't be told."""
    definitions = {key: schema[key] for key in ("$schema", "$defs", "definitions") if key in schema}
    for place, part in list(subschemas(schema))[:_MAX_SEARCHED]:
        try:
            check_grammar(LLMatcher.grammar_from_json_schema(json.dumps({**definitions, **part}), overrides=options))
        except GrammarError as error:
            if str(error) == message:
                return place
    return "#"
