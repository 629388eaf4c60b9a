"""Grammars of tool calls, in Lark: a notation of calls, with the JSON Schema of each tool's arguments as a part.

Each schema stays a document of its own, so all that is relative to its root (`$schema`, `#/$defs/...`) keeps its
meaning beside the schemas of other tools.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo_engine.wire.structured import StructuredOutputs

Part = dict[str, Any]
"""Arguments of `StructuredOutputs` for a part of a grammar."""

#: Keywords of JSON Schema that may allow more properties than `properties` lists.
_COMPOSED = frozenset({"additionalProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf"})


def json_call(key: str) -> str:
    """Lark of a call `{"name": NAME, key: ARGUMENTS}`."""
    return rf'"{{" ws "\"name\"" ws ":" ws "\"NAME\"" ws "," ws "\"{key}\"" ws ":" ws ARGUMENTS ws "}}"'


@dataclass(frozen=True, slots=True, kw_only=True)
class CallNotation:
    """Lark of an answer of calls: `before`, calls with `between` in between, and `after`; `ws` is white space. `call`
    has NAME and ARGUMENTS in the place of a tool's name and arguments."""

    before: str
    call: str
    between: str
    after: str


def arguments_part(function: Mapping[str, Any], place: str) -> Part:
    """Schema of a tool's arguments. It forbids properties that the tool does not list, unless the tool's own schema has
    a keyword that allows them. It omits `strict`, which some clients write here: a schema is always enforced."""
    schema = {"type": "object", **(function.get("parameters") or {"properties": {}})}
    schema.pop("strict", None)
    if "properties" in schema and not _COMPOSED & schema.keys():
        schema["additionalProperties"] = False
    return {"json": schema, "place": place}


def calls_shape(notation: CallNotation, tools: Mapping[str, Part], *, one_call_only: bool) -> StructuredOutputs:
    """Shape of an answer of calls, at least one. `tools`: name of each tool -> part of its arguments."""
    calls = (notation.call.replace("ARGUMENTS", f"@part_{i}").replace("NAME", name) for i, name in enumerate(tools))
    more = "" if one_call_only else f"({notation.between} call)*"
    grammar = f"start: {notation.before} call {more} {notation.after}\ncall: {' | '.join(calls)}"
    return StructuredOutputs(grammar=grammar, place="tools", parts=[*tools.values()])
