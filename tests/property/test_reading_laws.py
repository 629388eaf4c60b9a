"""Laws of reading answers: cuts don't matter, no text raises, and nothing that was said is lost."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from octavo_server.reading.parts import join, merge
from octavo_server.reasoning.think import ThinkReader
from octavo_server.tools.forced import NamedReader, RequiredReader
from octavo_server.tools.registry import TOOL_PARSERS
from octavo_testing.parsing import numbered_ids, parse_chunks

NAMES = frozenset({"f", "g"})
FRAGMENTS = (
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<think>", "</think>"),
    *("<|python_start|>", "<|python_end|>", '{"name": "f", "arguments": ', '{"name": "g", "parameters": ', '"name"'),
    *('{"a": 1}', "{", "}", "[", "]", "(", ")", '"', "'", "\\", ",", ":", ";", "=", "\n", " ", "f", "g(", "a=", "1"),
    *("null", "é", "\x01", '"arguments": {', "[f(a='x', ", "Hello. "),
)
ANSWERS = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)
READERS = {
    **{name: lambda parser=parser: parser.reader(numbered_ids(), NAMES) for name, parser in TOOL_PARSERS.items()},
    "required": lambda: RequiredReader(numbered_ids()),
    "named": lambda: NamedReader(numbered_ids(), "f"),
    "open reasoning": lambda: ThinkReader(is_open=True),
    "reasoning": lambda: ThinkReader(is_open=False),
}


@pytest.mark.parametrize("name", READERS)
@given(answer=ANSWERS, data=st.data())
def test_cuts_do_not_matter(name, answer, data):
    places = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=5)))
    pieces = [answer[i:j] for i, j in zip([0, *places], [*places, len(answer)], strict=True)]
    whole = parse_chunks(READERS[name](), [answer])
    assert parse_chunks(READERS[name](), pieces) == whole
    assert parse_chunks(READERS[name](), list(answer)) == whole
    assert merge(whole) == whole


@pytest.mark.parametrize("name", READERS)
@given(words=st.lists(st.sampled_from(("kiwi", *FRAGMENTS)), max_size=14))
def test_words_of_the_model_are_shown_somewhere(name, words):
    """Unless they are within JSON that a call has beside its name and its arguments."""
    answer = "".join(words)
    joined = join(parse_chunks(READERS[name](), [answer]))
    shown = [joined.text or "", joined.reasoning or "", *(call.name + call.arguments for call in joined.calls)]
    shown += [call.id for call in joined.calls]
    if '"kiwi' not in answer and ":kiwi" not in answer:
        assert sum(text.count("kiwi") for text in shown) == answer.count("kiwi")


@given(
    calls=st.lists(
        st.tuples(
            st.sampled_from(sorted(NAMES)),
            st.dictionaries(
                st.text(min_size=1), st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists)
            ),
        ),
        min_size=1,
        max_size=3,
    ),
    ascii_only=st.booleans(),
)
def test_what_a_model_calls_is_what_the_client_gets(calls, ascii_only):
    written = [json.dumps({"name": n, "arguments": a}, ensure_ascii=ascii_only) for n, a in calls]
    answers = {
        "hermes": "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written),
        "llama3_json": "; ".join(written),
        "mistral": "[TOOL_CALLS][" + ", ".join(written) + "]",
    }
    for name, answer in answers.items():
        joined = join(parse_chunks(READERS[name](), [answer]))
        assert joined.text is None
        assert [(call.name, json.loads(call.arguments)) for call in joined.calls] == calls
