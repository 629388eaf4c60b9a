"""The events that each tool call format gives for an answer, however the answer is split."""

import json
import re

import pytest
from octavo_server.output_parsing.events import join_events
from octavo_server.output_parsing.tool_call_formats import TOOL_PARSERS
from octavo_server.output_parsing.tool_use import NamedToolParser, RequiredToolParser
from octavo_testing.parsing import assert_same_for_all_splits, numbered_ids, parse_chunks

TOOLS = {"f": {}, "g": {}}
F, G = ("f", {"a": 1}), ("g", {})

#: format -> answer -> (text, calls with parsed arguments)
WELL_FORMED = {
    "hermes": {
        "Hello.\n": ("Hello.\n", []),
        " \n": (" \n", []),
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>': (None, [F]),
        'Sure.\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>': ("Sure.", [F]),
        '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>\n<tool_call>{"name": "g"}</tool_call>\n': (
            None,
            [F, G],
        ),
        'a <tool_call>{"name":"f","arguments":{"a":1}}</tool_call> b': ("a  b", [F]),
        '<tool_call>{"name": "f", "arguments": {"a": "}]\\"<tool_call>\\\\"}}</tool_call>': (
            None,
            [("f", {"a": '}]"<tool_call>\\'})],
        ),
        '<tool_call>{"name": "f", "arguments": {"a": [1, {"b": "é日"}, null]}}</tool_call>': (
            None,
            [("f", {"a": [1, {"b": "é日"}, None]})],
        ),
    },
    "llama3_json": {
        "Hello {you}": ("Hello {you}", []),
        '{"name": "f", "parameters": {"a": 1}}': (None, [F]),
        '{"type": "function", "name": "f", "parameters": {"a": 1}}': (None, [F]),
        '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}': (None, [F, G]),
        'Calling {"name": "f", "arguments": {"a": 1}}': ("Calling", [F]),
        '{"temperature": 3, "unit": "C"}': ('{"temperature": 3, "unit": "C"}', []),
        'See {"name": "Bob", "parameters": {}}': ('See {"name": "Bob", "parameters": {}}', []),
        '{"name": "Bob"}': ('{"name": "Bob"}', []),
    },
    "mistral": {
        "Hello [you]": ("Hello [you]", []),
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]': (None, [F, G]),
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}]': (None, [F]),
        'Sure.[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{}': ("Sure.", [F, G]),
        '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}': (None, [F]),
        '[TOOL_CALLS]{"name": "f", "arguments": {"a": 1}}': (None, [F]),
    },
    "pythonic": {
        "Hello [you](there)": ("Hello [you](there)", []),
        "[f(a=1), g()]": (None, [F, G]),
        "<|python_start|>[f(a=1)]<|python_end|>": (None, [F]),
        "[f(a='x, y)', b=[1, (2, None)], c={'d': True}, e=-1.5)]": (
            None,
            [("f", {"a": "x, y)", "b": [1, [2, None]], "c": {"d": True}, "e": -1.5})],
        ),
        '[geo.find(q="it\'s \\"é\\"", all=true,)]\n': (None, [("geo.find", {"q": 'it\'s "é"', "all": True})]),
    },
}

#: format -> answer -> (text, calls with the text of their arguments)
BROKEN = {
    "hermes": {
        "<tool_call>no json</tool_call> x <tool_c": ("<tool_call>no json</tool_call> x <tool_c", []),
        '<tool_call>{"na': ('<tool_call>{"na', []),
        '<tool_call>{"x": 1}</tool_call>': ('<tool_call>{"x": 1}</tool_call>', []),
        '<tool_call>{"name": "f", "arguments": {"a": "b': (None, [("f", '{"a": "b')]),
        '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>': (None, [("f", '{"a": 1}')]),
        '<tool_call>{"name": "f", "arguments": {"a": 1}}}</tool_call>': ("}", [("f", '{"a": 1}')]),
        '<tool_call>{"name": "f", "arguments": {"a": 1}}\n<tool_call>{"name": "g", "arguments": {}}': (
            None,
            [("f", '{"a": 1}'), ("g", "{}")],
        ),
        '<tool_call>{"name": "f", "arguments": {}}\n{"name": "g", "arguments": {}}</tool_call>': (
            None,
            [("f", "{}"), ("g", "{}")],
        ),
        '<tool_call>{"name": "f", "arguments": {"a": "x\ny\\d\\\'"}}</tool_call>': (
            None,
            [("f", '{"a": "x\\ny\\\\d\'"}')],
        ),
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>': (None, [("f", '{"a": 1}')]),
        '<tool_call>{"name": "f", "arguments": null}</tool_call>': (None, [("f", "{}")]),
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>': (
            '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
            [],
        ),
        '<tool_call><tool_call>{"name": "g", "arguments": {}}</tool_call>': ("<tool_call>", [("g", "{}")]),
    },
    "llama3_json": {
        "<|python_tag|>search.call(q=1)": ("search.call(q=1)", []),
        '{"name": "f", "parameters": {"a": "b': (None, [("f", '{"a": "b')]),
        '{{"name": "f", "parameters": {}}': ("{", [("f", "{}")]),
        '{"name": "f", "par': ('{"name": "f", "par', []),
        '{"name": "f", "parameters": {}} Done.': ("Done.", [("f", "{}")]),
    },
    "mistral": {
        "[TOOL_CALLS]f": ("f", []),
        "[TOOL_CALLS][1]": ("[1]", []),
        '[TOOL_CALLS][{"name": "f", "arguments": {}} x': ("x", [("f", "{}")]),
        '[TOOL_CALLS]f[ARGS]{"a": [1, 2': (None, [("f", '{"a": [1, 2')]),
        "[TOOL_CALLS": ("[TOOL_CALLS", []),
    },
    "pythonic": {
        "[f(1)]": ("[f(1)]", []),
        "[1, 2]": ("[1, 2]", []),
        "[f(a=1": (None, [("f", '{"a": 1')]),
        "[f(a=x, b={1})] ok": ("ok", [("f", '{"a": "x", "b": "{1}"}')]),
        "[f(a=1, 2)]": ("2)]", [("f", '{"a": 1}')]),
        "[f(a='x\ny\\d'), ": (",", [("f", '{"a": "x\\ny\\\\d"}')]),
        "[f(a='\\ud800')]": (None, [("f", '{"a": "\\ud800"}')]),
    },
}


def cases(table):
    return [
        pytest.param(name, text, *expected, id=f"{name}-{i}")
        for name, texts in table.items()
        for i, (text, expected) in enumerate(texts.items())
    ]


def read(name, text):
    parser = TOOL_PARSERS[name]
    parts = assert_same_for_all_splits(lambda: parser.parser_type(numbered_ids(), TOOLS), text)
    return join_events(parts)


@pytest.mark.parametrize(("name", "answer", "text", "calls"), cases(WELL_FORMED))
def test_well_formed_answer_gives_its_calls(name, answer, text, calls):
    joined = read(name, answer)
    assert (joined.text, [(call.name, json.loads(call.arguments)) for call in joined.calls]) == (text, calls)


@pytest.mark.parametrize(("name", "answer", "text", "calls"), cases(BROKEN))
def test_malformed_answer_loses_no_text(name, answer, text, calls):
    joined = read(name, answer)
    assert (joined.text, [(call.name, call.arguments) for call in joined.calls]) == (text, calls)


@pytest.mark.parametrize(
    ("answer", "calls"),
    [
        ('[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]', [("f", '{"a": 1}'), ("g", "{}")]),
        ('[{"name": "f", "parameters": {"a"', [("f", '{"a"')]),
        ('[{"name": "f', []),
    ],
)
def test_required_answer_gives_its_calls(answer, calls):
    joined = join_events(assert_same_for_all_splits(lambda: RequiredToolParser(numbered_ids()), answer))
    assert [(call.name, call.arguments) for call in joined.calls] == calls
    assert joined.text == (None if calls else answer)


@pytest.mark.parametrize(
    ("answer", "arguments"),
    [('{"a": {"b": "}"}}', ['{"a": {"b": "}"}}']), ("{}", ["{}"]), ('{"a', ['{"a']), ("", []), ("{", [])],
)
def test_named_answer_gives_its_arguments(answer, arguments):
    joined = join_events(assert_same_for_all_splits(lambda: NamedToolParser(numbered_ids(), "f"), answer))
    assert [(call.name, call.arguments) for call in joined.calls] == [("f", text) for text in arguments]
    assert (joined.text or "") == ("" if arguments else answer)


@pytest.mark.parametrize(("name", "beginning"), [("llama3_json", '{"id":[{"id":{'), ("hermes", '<tool_call>{"x":[')])
def test_unfinished_starts_of_calls_are_reparsed_only_up_to_a_limit(name, beginning):
    call = {"hermes": '<tool_call>{"name": "f"}</tool_call>', "llama3_json": '{"name": "f", "parameters": {}}'}[name]
    for num, num_calls in ((10, 1), (1000, 0)):
        parser = TOOL_PARSERS[name].parser_type(numbered_ids(), TOOLS)
        joined = join_events(parse_chunks(parser, [beginning * num, call]))
        assert len(joined.calls) == num_calls
        assert joined.text == beginning * num + ("" if num_calls else call)


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_ids_have_the_form_that_templates_accept(name):
    new_id = TOOL_PARSERS[name].new_id
    made = {new_id() for _ in range(50)}
    assert len(made) == 50
    form = r"[A-Za-z0-9]{9}" if name == "mistral" else r"chatcmpl-tool-[0-9a-f]{32}"
    assert all(re.fullmatch(form, call_id) for call_id in made)
