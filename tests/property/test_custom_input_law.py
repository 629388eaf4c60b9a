"""Laws of the input of custom tools: it is the text that the arguments hold, however they are split."""

import json

from hypothesis import example, given
from hypothesis import strategies as st
from octavo_server.output_parsing.events import ToolCallArguments, ToolCallStart, join_events
from octavo_server.output_parsing.json_scanner import CustomInput
from octavo_server.output_parsing.output_parser import OutputParser
from octavo_server.output_parsing.tool_call_formats import TOOL_PARSERS
from octavo_testing.parsing import numbered_ids

FRAGMENTS = (
    *('{"input": "', '{ "input":"', '"}', '"', "{", "}", "\\", "\\n", "\\\\", '\\"', "\\u00e9", "\\ud83d", "\\ude00"),
    *("\\u", "\\u0", "u00", "e9", " ", "\n", "a", "é", "😀", '"other": 1', "null", "x" * 300, " " * 300),
)
ARGUMENTS = st.lists(st.sampled_from(FRAGMENTS), max_size=10).map("".join)


def decode(pieces):
    custom = CustomInput()
    return "".join([*map(custom.push, pieces), custom.finish()])


def split(text, data):
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    return [text[i:j] for i, j in zip([0, *places], [*places, len(text)], strict=True)]


@given(text=st.text(), is_ascii=st.booleans(), is_bare=st.booleans(), data=st.data())
@example(text='*** Begin Patch\n+"\\u00e9" 😀', is_ascii=True, is_bare=False, data=None)
def test_the_input_is_the_text_in_the_arguments(text, is_ascii, is_bare, data):
    arguments = json.dumps(text if is_bare else {"input": text}, ensure_ascii=is_ascii)
    assert decode([arguments]) == decode(arguments) == text
    if data is not None:
        assert decode(split(arguments, data)) == text


@given(arguments=ARGUMENTS, data=st.data())
def test_splits_do_not_change_the_input(arguments, data):
    whole = decode([arguments])
    assert decode(split(arguments, data)) == decode(arguments) == whole
    whole.encode()  # no half of a surrogate pair


@given(arguments=st.dictionaries(st.text(), st.integers()).filter(lambda members: "input" not in members))
def test_other_arguments_are_the_input_as_they_are(arguments):
    text = json.dumps(arguments)
    assert decode(text) == text


@given(inputs=st.lists(st.tuples(st.sampled_from("fg"), st.text()), max_size=4), data=st.data())
def test_only_calls_of_custom_tools_have_an_input(inputs, data):
    answer = "".join(
        f'<tool_call>{{"name": "{name}", "arguments": {json.dumps({"input": text})}}}</tool_call>'
        for name, text in inputs
    )
    calls = TOOL_PARSERS["hermes"].parser_type(numbered_ids(), {"f": {}, "g": {}})
    parser = OutputParser(calls=calls, custom_tools=frozenset("f"))
    parts = [*(part for piece in split(answer, data) for part in parser.push(piece)), *parser.finish()]
    read = [(c.name, c.is_custom, c.arguments) for c in join_events(parts).calls]
    assert read == [(n, n == "f", t if n == "f" else json.dumps({"input": t})) for n, t in inputs]
    names = {part.index: part.name for part in parts if isinstance(part, ToolCallStart)}
    assert all(p.is_custom == (names[p.index] == "f") for p in parts if isinstance(p, ToolCallArguments))
