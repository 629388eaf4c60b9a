"""Laws of output parsing: splits do not matter, no text raises, and no generated text is lost."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from octavo_server.output_parsing.events import join_events, merge_adjacent
from octavo_server.output_parsing.reasoning_parser import ReasoningParser
from octavo_server.output_parsing.tool_call_formats import TOOL_PARSERS
from octavo_server.output_parsing.tool_use import NamedToolParser, RequiredToolParser
from octavo_testing.parsing import numbered_ids, parse_chunks

TOOLS = {"f": {}, "g": {}}
FRAGMENTS = (
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<think>", "</think>"),
    *("<|python_start|>", "<|python_end|>", '{"name": "f", "arguments": ', '{"name": "g", "parameters": ', '"name"'),
    *('{"a": 1}', "{", "}", "[", "]", "(", ")", '"', "'", "\\", ",", ":", ";", "=", "\n", " ", "f", "g(", "a=", "1"),
    *(
        "<function=f>",
        "<parameter=a>",
        "</parameter>",
        "</function>",
        "<arg_key>a</arg_key>",
        "<arg_value>",
        "</arg_value>",
    ),
    *("null", "é", "\x01", '"arguments": {', "[f(a='x', ", "Hello. "),
)
ANSWERS = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)
BESIDE_FORMATS = {
    f"{name} beside a format": lambda parser=parser.parser_type: parser(
        numbered_ids(), TOOLS, frozenset(notation.marker or "{" for notation in parser.notations)
    )
    for name, parser in TOOL_PARSERS.items()
}
PARSERS = {
    **BESIDE_FORMATS,
    **{name: lambda parser=parser: parser.parser_type(numbered_ids(), TOOLS) for name, parser in TOOL_PARSERS.items()},
    "required": lambda: RequiredToolParser(numbered_ids()),
    "named": lambda: NamedToolParser(numbered_ids(), "f"),
    "open reasoning": lambda: ReasoningParser(is_open=True),
    "reasoning": lambda: ReasoningParser(is_open=False),
}


@pytest.mark.parametrize("name", PARSERS)
@given(answer=ANSWERS, data=st.data())
def test_splits_do_not_change_the_events(name, answer, data):
    places = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=5)))
    pieces = [answer[i:j] for i, j in zip([0, *places], [*places, len(answer)], strict=True)]
    whole = parse_chunks(PARSERS[name](), [answer])
    assert parse_chunks(PARSERS[name](), pieces) == whole
    assert parse_chunks(PARSERS[name](), list(answer)) == whole
    assert merge_adjacent(whole) == whole


@pytest.mark.parametrize("name", PARSERS)
@given(words=st.lists(st.sampled_from(("kiwi", *FRAGMENTS)), max_size=14))
def test_every_generated_word_is_in_some_event(name, words):
    """Except words within JSON members of a call other than its name and arguments."""
    answer = "".join(words)
    joined = join_events(parse_chunks(PARSERS[name](), [answer]))
    shown = [joined.text or "", joined.reasoning or "", *(call.name + call.arguments for call in joined.calls)]
    shown += [call.id for call in joined.calls]
    if '"kiwi' not in answer and ":kiwi" not in answer:
        assert sum(text.count("kiwi") for text in shown) == answer.count("kiwi")


@given(
    calls=st.lists(
        st.tuples(
            st.sampled_from(sorted(TOOLS)),
            st.dictionaries(
                st.text(min_size=1), st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists)
            ),
        ),
        min_size=1,
        max_size=3,
    ),
    ascii_only=st.booleans(),
)
def test_client_gets_the_calls_that_the_model_wrote(calls, ascii_only):
    written = [json.dumps({"name": n, "arguments": a}, ensure_ascii=ascii_only) for n, a in calls]
    answers = {
        "hermes": "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written),
        "llama3_json": "; ".join(written),
        "mistral": "[TOOL_CALLS][" + ", ".join(written) + "]",
    }
    for name, answer in answers.items():
        joined = join_events(parse_chunks(PARSERS[name](), [answer]))
        assert joined.text is None
        assert [(call.name, json.loads(call.arguments)) for call in joined.calls] == calls
