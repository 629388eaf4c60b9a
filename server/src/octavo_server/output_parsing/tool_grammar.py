"""Grammars of tool calls, in Lark: a notation of calls, with the JSON Schema of each tool's arguments as a part.

Each schema stays a document of its own, so all that is relative to its root (`$schema`, `#/$defs/...`) keeps its
meaning beside the schemas of other tools.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from octavo_engine.wire.structured import StructuredOutputs

Part = dict[str, Any]
"""Arguments of `StructuredOutputs` for a part of a grammar."""

#: Keywords of JSON Schema that may allow more properties than `properties` lists.
_COMPOSED = frozenset({"additionalProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf"})
_COMBINED = frozenset({"$ref", "allOf", "anyOf", "oneOf"})


def json_call(key: str) -> str:
    """Lark of a call `{"name": NAME, key: ARGUMENTS}`."""
    return rf'"{{" ws "\"name\"" ws ":" ws "\"NAME\"" ws "," ws "\"{key}\"" ws ":" ws ARGUMENTS ws "}}"'


@dataclass(frozen=True, slots=True, kw_only=True)
class CallNotation:
    """Lark of an answer of calls: the text `marker`, if any, `before`, calls with `between` in between, and `after`;
    `ws` is white space. `call` has NAME and ARGUMENTS in the place of a tool's name and arguments."""

    marker: str = ""
    before: str = ""
    call: str
    between: str
    after: str = ""

    def rules(self, names: Collection[str], i: int, *, one_call_only: bool) -> str:
        """Write the rules `calls_i`, the answer, and `call_i`, one of its calls."""
        calls = (self.call.replace("ARGUMENTS", f"@part_{n}").replace("NAME", name) for n, name in enumerate(names))
        more = "" if one_call_only else f"({self.between} call_{i})*"
        before = f"{json.dumps(self.marker)} {self.before}" if self.marker else self.before
        return f"calls_{i}: {before} call_{i} {more} {self.after}\ncall_{i}: {' | '.join(calls)}"


def arguments_part(function: Mapping[str, Any], place: str) -> Part:
    """Schema of a tool's arguments. It forbids properties that the tool does not list, unless the tool's own schema has
    a keyword that allows them. It omits `strict`, which some clients write here: a schema is always enforced."""
    schema = {"type": "object", **(function.get("parameters") or {"properties": {}})}
    schema.pop("strict", None)
    if "properties" in schema and not _COMPOSED & schema.keys():
        schema["additionalProperties"] = False
    return {"json": schema, "place": place}


def calls_shape(
    notations: Sequence[CallNotation],
    tools: Mapping[str, Part],
    *,
    one_call_only: bool,
    answer: StructuredOutputs | None = None,
    special_ids: Mapping[str, int] = MappingProxyType({}),
) -> StructuredOutputs:
    """Shape of an answer that has one or more calls, or the shape `answer`. `tools`: name of each tool -> part of its
    arguments. `special_ids`: the texts in `notations` that are special tokens."""
    parts, starts = [*tools.values()], [f"calls_{i}" for i in range(len(notations))]
    if answer is not None:
        starts.append(f"@part_{len(parts)}")
        parts.append({name: getattr(answer, name) for name in answer.__slots__})
    rules = [notation.rules(tools, i, one_call_only=one_call_only) for i, notation in enumerate(notations)]
    grammar = "\n".join([f"start: {' | '.join(starts)}", *rules])
    for text, token_id in special_ids.items():
        grammar = grammar.replace(json.dumps(text), f"<[{token_id}]>")
    return StructuredOutputs(grammar=grammar, place="tools", parts=parts)


def begins_as_call(answer: StructuredOutputs, key: str) -> bool:
    """Return False only if no output of the shape begins as `{"name": ..., key:`. Properties of an output have the
    schema's order; properties that the schema does not list come last."""
    schema = answer.json
    if not isinstance(schema, dict) or _COMBINED & schema.keys():
        return True
    listed, required = schema.get("properties"), schema.get("required", ())
    if not isinstance(listed, dict) or not isinstance(required, list | tuple) or key in listed:
        return True
    return not any(name in listed and name != "name" for name in map(str, required))
