"""Body fields for structured output, converted to `StructuredOutputs`: OpenAI's `response_format`, vLLM's
`structured_outputs` and its older `guided_*` fields. A request may use only one of them.

`strict` of a JSON schema has no effect: a schema is always enforced.
"""

from typing import Any, Literal

from octavo_engine.wire.errors import InvalidRequest
from octavo_engine.wire.structured import KINDS, StructuredOutputs
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from octavo_server.openai.entries import Entries, NullIsUnset

JsonSchema = dict[str, Any]


class JsonSchemaFormat(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str | None = None
    description: str | None = None
    schema_: JsonSchema | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """OpenAI's `response_format`; some clients send a JSON schema as `schema` with the type "json_object"."""

    model_config = ConfigDict(extra="allow")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema_: JsonSchema | None = Field(None, alias="schema")

    def shape(self) -> dict[str, Any]:
        if self.type == "text":
            return {}
        if self.type == "json_object":
            place = "response_format.schema"
            return {"json_object": True} if self.schema_ is None else {"json": self.schema_, "place": place}
        if self.json_schema is None or self.json_schema.schema_ is None:
            message = "response_format of type 'json_schema' needs json_schema.schema, a JSON Schema."
            raise InvalidRequest(message, param="response_format.json_schema.schema")
        return {"json": self.json_schema.schema_, "place": "response_format.json_schema.schema"}


class StructuredOutputsBody(NullIsUnset):
    """vLLM's `structured_outputs`. `disable_fallback` has no effect: the engine has only one grammar library."""

    model_config = ConfigDict(extra="forbid")

    json_: JsonSchema | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Entries[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    disable_fallback: bool = Field(False, exclude=True)

    def shape(self) -> dict[str, Any]:
        shape = self.model_dump(by_alias=True)
        return shape if any(shape[kind] not in (None, False) for kind in KINDS) else {}


class StructuredFields(BaseModel):
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsBody | None = None
    guided_json: JsonSchema | str | None = None
    guided_regex: str | None = None
    guided_choice: Entries[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_whitespace_pattern: str | None = None
    _format_place: str | None = PrivateAttr(None)

    def name_format(self, place: str) -> None:
        """Set the name of `response_format`'s schema in a body of another dialect, for errors."""
        self._format_place = place

    def shape(self) -> StructuredOutputs | None:
        """Return the structured output that the body requests, if any. Raises InvalidRequest if several fields do."""
        asked = {name: shape for name, shape in self._shapes().items() if shape}
        if len(asked) > 1:
            fields = " and ".join(asked)
            raise InvalidRequest(f"{fields} each request a structured output: send one of them.", param=[*asked][1])
        if not asked:
            return None
        ((name, shape),) = asked.items()
        if name.startswith("guided_") and self.guided_whitespace_pattern is not None:
            shape["whitespace_pattern"] = self.guided_whitespace_pattern
        return StructuredOutputs(**shape)

    def _shapes(self) -> dict[str, dict[str, Any]]:
        """Field -> arguments of `StructuredOutputs`, empty if the field requests no structured output."""
        shapes: dict[str, dict[str, Any]] = {}
        if self.response_format is not None:
            shapes["response_format"] = self.response_format.shape()
            if self._format_place and shapes["response_format"]:
                shapes["response_format"]["place"] = self._format_place
        if self.structured_outputs is not None:
            shapes["structured_outputs"] = self.structured_outputs.shape()
        for kind in ("json", "regex", "choice", "grammar", "json_object"):
            value = getattr(self, f"guided_{kind}")
            shapes[f"guided_{kind}"] = {} if value in (None, False) else {kind: value, "place": f"guided_{kind}"}
        return shapes
