"""`StructuredOutputs`: the required shape of one request's output, under vLLM's names.

Construction checks that exactly one shape is given, and the types. `octavo_engine.grammar` checks whether a schema,
regex or grammar can be enforced.
"""

from dataclasses import dataclass, field
from typing import Any

from octavo_engine.wire.errors import InvalidRequest

KINDS = ("json", "regex", "choice", "grammar", "json_object")
_PARAM = "structured_outputs"


@dataclass(slots=True, kw_only=True)
class StructuredOutputs:
    """Exactly one is set: `json` (JSON Schema or its text), `regex`, `choice`, `grammar` (Lark or EBNF), `json_object`.

    The next fields apply to JSON only. `whitespace_pattern`: a regex for the whitespace between JSON's tokens.
    `place`: the client's name of the shape, for errors; None: the name of the field here. `parts`: shapes, as arguments
    of this class, that `grammar` calls `@part_0`, `@part_1` and so on; it calls JSON's whitespace `ws`, and a special
    token by its id, `<[7]>`. Only the server writes such a grammar, not a client.
    """

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None  # vLLM's; refused by name
    place: str | None = None
    parts: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.structural_tag is not None:
            message = f"{_PARAM}.structural_tag is not supported: describe the whole output in grammar or json."
            raise InvalidRequest(message, param=f"{_PARAM}.structural_tag")
        asked = [kind for kind in KINDS if getattr(self, kind) not in (None, False)]
        if len(asked) != 1:
            got = f"got {' and '.join(asked)}" if asked else "got none of them"
            raise InvalidRequest(f"{_PARAM} must have exactly one of {', '.join(KINDS)}; {got}.", param=_PARAM)
        self._check_types()

    def _check_types(self) -> None:
        _check(isinstance(self.json, dict | str | None), "json", "a JSON Schema (an object) or its text")
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            _check(value is None or (isinstance(value, str) and value != ""), name, "a non-empty string")
        if self.choice is not None:
            ok = isinstance(self.choice, list | tuple) and len(self.choice) > 0
            ok = ok and all(isinstance(c, str) and c for c in self.choice)
            _check(ok, "choice", "a non-empty list of non-empty strings")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            _check(False, "whitespace_pattern", "left out with disable_any_whitespace")


StructuredOutputsParams = StructuredOutputs  # vLLM's name


def _check(ok: bool, name: str, rule: str) -> None:
    if not ok:
        raise InvalidRequest(f"{_PARAM}.{name} must be {rule}.", param=f"{_PARAM}.{name}")
