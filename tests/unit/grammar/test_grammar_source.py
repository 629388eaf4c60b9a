"""Regexes, choices and grammars: valid shapes are enforced exactly, and invalid shapes are refused with a reason."""

import subprocess
import sys
from contextlib import suppress

import pytest
from octavo_engine.grammar.compiler import GrammarError
from octavo_engine.grammar.schema import SchemaBounds
from octavo_engine.grammar.source import GrammarSource
from octavo_engine.settings.records import MAX_GRAMMAR_BYTES
from octavo_engine.wire.errors import InvalidRequest
from octavo_engine.wire.structured import StructuredOutputs
from octavo_testing.grammars import BOUNDS, COMPILER, EOS, allowed, follow, random_output, state_of

AWKWARD = [
    'a"b',
    "a\\b",
    "a\nb",
    "\N{EURO SIGN}\N{GRINNING FACE}",
    "\x01",
    "a/b",
    "<|im_end|>",
    " x",
    '{"a":1}',
    "%json {",
]


FORK = """
import os, signal
from llguidance import LLMatcher
from octavo_engine.grammar.compiler import check_grammar

grammar = LLMatcher.grammar_from_lark('start: "a"')
check_grammar(grammar)
child = os.fork()
if not child:
    signal.alarm(30)
    check_grammar(grammar)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_forked_process_checks_grammars():
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=120)


@pytest.mark.parametrize("choice", AWKWARD)
def test_a_choice_is_matched_literally(choice):
    state = state_of(choice=[choice, "zz"])
    for text in (choice, "zz"):
        assert allowed(state, text.encode()) == [{EOS}]


def test_there_may_be_thousands_of_choices():
    state = state_of(choice=[f"{i:04}" for i in range(2200)])
    assert allowed(state, b"219") == [set(b"0123456789")]


@pytest.mark.parametrize(
    ("regex", "good", "bad"),
    [
        (r"\d{3}-\d{4}", "123-4567", "x"),
        (r"^(yes|no)$", "yes", "maybe"),
        (r"a/b\d\\d[/]", r"a/b1\d/", "a/b\N{NKO DIGIT ZERO}"),
        (r"a\/b", "a/b", "b"),
        (r"(?i)abc", "aBC", "b"),
        (r"[^\n]*\.", "a b.", "\n"),
    ],
)
def test_a_regex_covers_the_whole_output(regex, good, bad):
    assert EOS in allowed(state_of(regex=regex), good.encode())[0]
    with pytest.raises(AssertionError):
        follow(state_of(regex=regex), bad)


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= "a" digits\ndigits ::= [0-9]+',
        'start: "a" DIGITS\nDIGITS: /[0-9]+/',
        'root ::= "a" [0-9] ([0-9])*  # a comment',
    ],
)
def test_lark_and_gbnf_grammars_are_accepted(grammar):
    assert EOS in allowed(state_of(grammar=grammar), b"a12")[0]


ENTITIES = ("&amp;", "&lt;", "&gt;", "&quot;", "&apos;", "&nbsp;", "&copy;", "&reg;", "&euro;")


@pytest.mark.parametrize(
    "grammar",
    [
        "root ::= " + " | ".join(f'"{entity}"' for entity in ENTITIES),
        "start: " + " | ".join(f'"{entity}"' for entity in ENTITIES),
        "start: " + " | ".join(f"/{entity}/" for entity in ENTITIES),
        "start: NAME // " + " ".join(ENTITIES) + '\nNAME: "&" /[a-z]+/ ";"',
        'root ::= "&" [a-z]+ ";"  # ' + " ".join(ENTITIES),
    ],
)
def test_an_ampersand_in_a_literal_is_no_operator(grammar):
    for entity in ENTITIES:
        assert EOS in allowed(state_of(grammar=grammar), entity.encode())[0]


def test_a_literal_may_hold_the_name_of_a_directive():
    follow(state_of(grammar='root ::= "%json {"'), "%json {")


@pytest.mark.parametrize("rule", ["r", "T"])
@pytest.mark.parametrize(("num_rules", "num_groups"), [(9000, 0), (2000, 25)])
def test_a_deep_grammar_does_not_end_the_process(rule, num_rules, num_groups):
    """The library overflowed a stack of 8 MiB at 3000 rules, or at 500 rules of 20 groups."""
    opening, closing = "(" * num_groups, ")" * num_groups
    rules = [f"{rule}{i}: {opening}{rule}{i + 1}{closing}" for i in range(num_rules)]
    grammar = "\n".join([f"start: {rule}0", *rules, f'{rule}{num_rules}: "a"'])
    with suppress(InvalidRequest, GrammarError):
        bounds = SchemaBounds(max_bytes=MAX_GRAMMAR_BYTES, max_depth=8)
        COMPILER.get(GrammarSource(bounds).grammar_for(StructuredOutputs(grammar=grammar)))


def test_json_object_accepts_any_object():
    state = state_of(json_object=True)
    assert allowed(state, b"") == [{ord("{")}]
    assert EOS in allowed(state, b'{"a": [1, {"b": null}], "c": "x"}')[0]


@pytest.mark.parametrize(
    ("shape", "param", "words"),
    [
        ({"regex": "(a"}, "regex", "unclosed group"),
        ({"regex": "(?=a)b"}, "regex", "look-around"),
        ({"regex": r"(a)\1"}, "regex", "backreferences"),
        ({"regex": "a\ud800"}, "regex", "lone surrogate"),
        ({"json": {}, "whitespace_pattern": "\ud800"}, "json", "lone surrogate"),
        ({"choice": ["a\ud800"]}, "choice", "lone surrogate"),
        ({"grammar": "start: A&A" + "&A" * 9}, "grammar", "the limit is 8"),
        ({"grammar": 'start: A\nA: B // "\n & B & B & B & B & B & B & B & B & B // "'}, "grammar", "the limit is 8"),
        ({"grammar": 'start: <">' + " & A" * 9 + ' & <">'}, "grammar", "the limit is 8"),
        ({"grammar": 'start: /"/' + " & A" * 9 + ' & /"/'}, "grammar", "the limit is 8"),
        ({"regex": "a" * 101}, "regex", "the limit is 100"),
        ({"choice": ["x" * 60, "y" * 60]}, "choice", "the limit is 100"),
        ({"grammar": "root = x"}, "grammar", "neither Lark nor GBNF"),
        ({"grammar": "root ::= missing"}, "grammar", "missing"),
        ({"grammar": 'start: %json {"type": "string", "foo": 1}'}, "grammar", "send it as json"),
        ({"grammar": "start: <|im_end|>"}, "grammar", "special"),
        ({"grammar": "(" * 99}, "grammar", "neither Lark nor GBNF"),
    ],
)
def test_an_invalid_shape_is_refused_by_param(shape, param, words):
    with pytest.raises(InvalidRequest, match=words) as caught:
        GrammarSource(SchemaBounds(max_bytes=100, max_depth=8)).grammar_for(StructuredOutputs(**shape))
    assert caught.value.param == f"structured_outputs.{param}"


def test_properties_keep_the_schemas_order():
    first, second = ({"type": "object", "properties": {key: {"const": 1} for key in keys}, "required": list(keys),
                      "additionalProperties": False} for keys in ("ab", "ba"))  # fmt: skip
    texts = [(random_output(state_of(json=schema, disable_any_whitespace=True), 0)) for schema in (first, second)]
    assert texts == ['{"a":1,"b":1}', '{"b":1,"a":1}']


def test_a_checked_shape_is_cached():
    source = GrammarSource(BOUNDS)
    assert source.grammar_for(StructuredOutputs(regex="a+")) is source.grammar_for(StructuredOutputs(regex="a+"))


def test_shapes_are_cached_up_to_a_number_of_characters():
    source = GrammarSource(SchemaBounds(max_bytes=MAX_GRAMMAR_BYTES, max_depth=8))
    shapes = [StructuredOutputs(choice=[f"{i}" * 130_000]) for i in range(9)]  # 1 MiB has room for eight of them
    grammars = [source.grammar_for(shape) for shape in shapes]
    assert source.grammar_for(shapes[1]) is grammars[1]
    assert source.grammar_for(shapes[8]) is grammars[8]
    assert source.grammar_for(shapes[0]) is not grammars[0]
