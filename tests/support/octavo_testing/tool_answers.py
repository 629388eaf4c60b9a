"""Checks a request with tools and a format, from its body to its parsed answer, with grammars that are compiled.

Texts of fitting calls and of the format are accepted by the grammar and parsed back; random outputs of the grammar are
valid; and every answer parses alike, however it is split.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jsonschema
from octavo_engine.wire.sampling import SamplingParams
from octavo_engine.wire.structured import StructuredOutputs
from octavo_server.anthropic.messages import MessagesRequest
from octavo_server.openai.chat import ChatCompletionRequest
from octavo_server.output_parsing.events import OutputEvent, ParsedOutput, ToolCallStart, join_events
from octavo_server.output_parsing.tool_use import ToolSettings, ToolUse

from octavo_testing.grammars import accepts, random_output, state_of
from octavo_testing.parsing import parse_chunks
from octavo_testing.tool_schemas import SCHEMAS

MODES = ("auto", "required", "named", "any")
Calls = Sequence[tuple[str, Any]]


def _json(key: str) -> Callable[[str, Any], str]:
    return lambda name, arguments: json.dumps({"name": name, key: arguments}, ensure_ascii=False)


def _hermes(calls: Calls) -> str:
    return "\n".join(f"<tool_call>\n{_json('arguments')(*call)}\n</tool_call>" for call in calls)


def _mistral(calls: Calls) -> str:
    return f"[TOOL_CALLS][{', '.join(_json('arguments')(*call) for call in calls)}]"


def _newer_mistral(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(value, ensure_ascii=False)}" for name, value in calls)


def _tagged_llama(calls: Calls) -> str:
    return "<|python_tag|>" + _bare_llama(calls)


def _bare_llama(calls: Calls) -> str:
    return "; ".join(_json("parameters")(*call) for call in calls)


def _required(calls: Calls) -> str:
    return f"[{', '.join(_json('parameters')(*call) for call in calls)}]"


#: Parser -> the notations that it accepts for every format.
WRITERS = {"hermes": [_hermes], "mistral": [_mistral, _newer_mistral], "llama3_json": [_tagged_llama]}


@dataclass(frozen=True)
class Asked:
    """The shape and tool use that a request's body gives. `shape` None: any answer is accepted."""

    shape: StructuredOutputs | None
    tools: ToolUse

    def accepts(self, text: str) -> bool:
        return self.shape is None or accepts(self.shape, text)

    def parse(self, text: str) -> ParsedOutput:
        """Parse an answer, and assert that it parses alike as a whole, by characters and in halves."""
        half = len(text) // 2
        whole, *streamed = (self._events(pieces) for pieces in ([text], [*text], [text[:half], text[half:]]))
        assert all(events == whole for events in streamed), text
        return join_events(whole)

    def random_answers(self, num: int) -> list[str]:
        """Return about `num` answers for each beginning of an answer."""
        if self.shape is None:
            return []
        begins = {"", *self.tools.markers[:1]}
        state = state_of(**{name: getattr(self.shape, name) for name in self.shape.__slots__})
        texts = (random_output(state, seed, longest=500, begin=begin) for seed in range(num) for begin in begins)
        return [text for text in texts if text is not None]

    def _events(self, pieces: list[str]) -> list[OutputEvent]:
        parser = self.tools.new_parser()
        assert parser is not None
        events = parse_chunks(parser, pieces)
        return [replace(event, id="") if isinstance(event, ToolCallStart) else event for event in events]


def ask(
    schemas: Sequence[dict[str, Any]], *, mode: str, format_schema: dict[str, Any] | None, parser: str = "hermes"
) -> Asked:
    """`schemas`: parameters of the tools f and g. `mode`: a tool choice; "any" is that of the Messages API."""
    tools = dict(zip("fg", schemas, strict=False))
    body = _message(tools, format_schema) if mode == "any" else _chat(tools, mode, format_schema)
    params = SamplingParams(structured_outputs=body.shape())
    use = body.tool_use(ToolSettings(tool_call_parser=parser, enable_auto_tool_choice=True), params.structured_outputs)
    use.constrain(params, lambda token: None)
    return Asked(params.structured_outputs, use)


def check(names: Sequence[str], *, mode: str, format_name: str | None, parser: str, num_random: int) -> None:
    """Check the tools f and g with schemas of `SCHEMAS`, beside a format or without."""
    cases = [SCHEMAS[name] for name in names]
    form = SCHEMAS[format_name] if format_name else None
    asked = ask([schema for schema, _ in cases], mode=mode, format_schema=form and form[0], parser=parser)
    calls = [(name, value) for name, (_, values) in zip("fg", cases, strict=False) for value in values]
    _check_calls(asked, calls, mode=mode, parser=parser)
    if form is not None:
        for value in form[1]:
            text = json.dumps(value, ensure_ascii=False)
            if mode == "auto":
                assert asked.accepts(text), text
                parsed = asked.parse(text)
                assert (parsed.text, parsed.calls) == (text, [])
    validators = {name: _validator(schema) for name, (schema, _) in zip("fg", cases, strict=False)}
    for text in asked.random_answers(num_random):
        _check_valid(asked.parse(text), validators, form and _validator(form[0]))


def _check_calls(asked: Asked, calls: list[tuple[str, Any]], *, mode: str, parser: str) -> None:
    if mode == "named":
        calls = [call for call in calls if call[0] == "f"]
        texts = [(json.dumps(value, ensure_ascii=False), [("f", value)]) for _, value in calls]
    else:
        writers = WRITERS[parser] if mode == "auto" else [_required]
        several = [[call] for call in calls] + [calls]
        texts = [(write(some), some) for write in writers for some in several]
    for text, expected in texts:
        assert asked.accepts(text), text
        parsed = asked.parse(text)
        assert parsed.text is None
        assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == expected
        assert asked.shape is None or not asked.accepts(text + "x")


def _check_valid(parsed: ParsedOutput, validators: dict[str, Any], form: Any) -> None:
    assert (parsed.text is None) != (not parsed.calls), parsed
    for call in parsed.calls:
        validators[call.name].validate(json.loads(call.arguments))
    if parsed.text is not None:
        form.validate(json.loads(parsed.text))


def _validator(schema: dict[str, Any]) -> Any:
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    return kind(schema, format_checker=kind.FORMAT_CHECKER)


def _chat(tools: dict[str, Any], mode: str, format_schema: Any) -> ChatCompletionRequest:
    functions = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in tools.items()]
    choice = {"type": "function", "function": {"name": "f"}} if mode == "named" else mode
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "tools": functions, "tool_choice": choice}
    if format_schema is not None:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": format_schema}}
    return ChatCompletionRequest.model_validate(body)


def _message(tools: dict[str, Any], format_schema: Any) -> ChatCompletionRequest:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 9,
        "tools": [{"name": name, "input_schema": schema} for name, schema in tools.items()],
        "tool_choice": {"type": "any"},
    }
    if format_schema is not None:
        body["output_config"] = {"format": {"type": "json_schema", "schema": format_schema}}
    return MessagesRequest.model_validate(body).as_chat()
