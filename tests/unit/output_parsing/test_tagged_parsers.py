"""The calls that each format of tags gives, however the answer is split, and what broken answers keep."""

import json
import random
import re
from collections import Counter
from dataclasses import dataclass

import jsonschema
import pytest
from octavo_server.output_parsing.events import join_events
from octavo_server.output_parsing.tagged import TAGGED
from octavo_server.output_parsing.tool_call_formats import TOOL_PARSERS
from octavo_testing.parsing import numbered_ids, parse_chunks

F = {
    "type": "object",
    "properties": {
        "a": {"type": "string"},
        "n": {"type": "integer"},
        "x": {"type": ["number", "null"]},
        "b": {"type": "boolean"},
        "o": {"$ref": "#/$defs/Pair"},
        "u": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "$defs": {"Pair": {"type": "object", "properties": {"k": {"type": "string"}}, "required": ["k"]}},
}
TOOLS = {"f": F, "get.now-2": {"type": "object", "properties": {}}}


@dataclass(frozen=True)
class Written:
    """Calls as the chat template of a model writes them. `shared`: `block` has all calls of an answer, not one."""

    call: str
    parameter: str
    block: str = "{}"
    shared: bool = False

    def write(self, *calls):
        texts = [
            self.call.format(name, "".join(self.parameter.format(key, value) for key, value in arguments.items()))
            for name, arguments in calls
        ]
        return self.block.format("\n".join(texts)) if self.shared else "\n".join(map(self.block.format, texts))

    @property
    def value_end(self):
        return self.parameter.rpartition("{}")[2].strip()


FUNCTION = "<function={}>\n{}</function>"
LINES, BARE = "<parameter={}>\n{}\n</parameter>\n", "<parameter={}>{}</parameter>\n"
TOOL_CALL = "<tool_call>\n{}\n</tool_call>"


def invokes(start, end, before="", after="", prefix="", mark=""):
    parameter = f'<{prefix}parameter name="{{}}"{mark}>{{}}</{prefix}parameter>\n'
    call = f'{before}<{prefix}invoke name="{{}}">\n{{}}</{prefix}invoke>{after}'
    return Written(call, parameter, f"{start}\n{{}}\n{end}", shared=True)


FORMATS = {
    "qwen3_coder": Written(FUNCTION, LINES, TOOL_CALL),
    "mimo": Written(FUNCTION, BARE, TOOL_CALL),
    "seed_oss": Written(FUNCTION, BARE, "<seed:tool_call>\n{}\n</seed:tool_call>"),
    "glm45": Written("<tool_call>{}\n{}</tool_call>", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"),
    "glm47": Written("<tool_call>{}{}</tool_call>", "<arg_key>{}</arg_key><arg_value>{}</arg_value>"),
    "hy_v3": Written(
        "<tool_call:opensource>{}<tool_sep:opensource>\n{}</tool_call:opensource>",
        "<arg_key:opensource>{}</arg_key:opensource>\n<arg_value:opensource>{}</arg_value:opensource>\n",
        "<tool_calls:opensource>\n{}\n</tool_calls:opensource>",
        shared=True,
    ),
    "minimax_m2": invokes("<minimax:tool_call>", "</minimax:tool_call>"),
    "deepseek_v32": invokes(
        "<｜DSML｜function_calls>", "</｜DSML｜function_calls>", prefix="｜DSML｜", mark=' string="false"'
    ),
    "deepseek_v4": invokes("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", prefix="｜DSML｜"),
    "step3": invokes(
        "<｜tool_calls_begin｜>",
        "<｜tool_calls_end｜>",
        before="<｜tool_call_begin｜>function<｜tool_sep｜>",
        after="<｜tool_call_end｜>",
        prefix="steptml:",
    ),
    "minicpm5": Written('<function name="{}">{}</function>', '<param name="{}">{}</param>'),
}
SAME = {"qwen3_xml": "qwen3_coder", "step3p5": "qwen3_coder", "poolside_v1": "glm45"}
PRETTY = '{\n  "k": "a </b> \\"c\\"", "m": [1, {"n": null}]\n}'
CODE = "if a </ b and c<d:\n\treturn \"x\\y\" + '</para'\n"


def answers(form):
    """Answers, and the text and calls that each one has; the arguments are JSON values."""
    f = lambda **arguments: form.write(("f", arguments))  # noqa: E731
    typed = {"n": "7", "x": "1.5", "b": "True", "o": PRETTY, "u": "null"}
    return [
        ("Hello <b>you</b> <", "Hello <b>you</b> <", []),
        (f(a="Kraków", n="7"), None, [("f", {"a": "Kraków", "n": 7})]),
        ("Sure.\n" + f(a=CODE), "Sure.", [("f", {"a": CODE})]),
        (
            f"One {form.write(('f', {'a': 'b'}), ('get.now-2', {}))} two",
            "One  two" if form.shared or form.block == "{}" else "One \n two",
            [("f", {"a": "b"}), ("get.now-2", {})],
        ),
        (form.write(("get.now-2", {})), None, [("get.now-2", {})]),
        (f(**typed), None, [("f", {"n": 7, "x": 1.5, "b": True, "o": json.loads(PRETTY), "u": None})]),
        (f(a="5", x="null", u="5"), None, [("f", {"a": "5", "x": None, "u": "5"})]),
        (f(a='{"k": 1}', n="many", b="maybe"), None, [("f", {"a": '{"k": 1}', "n": "many", "b": "maybe"})]),
        (
            f(a=f"ends {form.value_end} here", u=f"{form.value_end}"),
            None,
            [("f", {"a": f"ends {form.value_end} here", "u": form.value_end})],
        ),
        (f(a="", u=""), None, [("f", {"a": "", "u": ""})]),
    ]


def broken_answers(form):
    """Answers, and the text and calls that each one has; the arguments are the text of JSON."""
    whole = form.write(("f", {"n": "7", "a": "Hello\nworld", "u": "x"}))
    tag = form.parameter.partition("{}")[0][:3]
    in_string, in_number = whole.index("wor") + 3, whole.index("7") + 1
    in_tag = whole.index(tag, in_string) + 3
    unended = re.sub(rf"{re.escape(form.value_end)}\n?", "", form.write(("f", {"a": "b", "n": "7"})))
    head = form.write(("none", {"a": "b"})).partition("none")[0]
    return [
        (whole[:in_string], None, [("f", '{"n": 7, "a": "Hello\\nwor')]),
        (whole[:in_number], None, [("f", '{"n": 7')]),
        (whole[:in_tag], tag, [("f", '{"n": 7, "a": "Hello\\nworld"')]),
        (unended, None, [("f", '{"a": "b", "n": 7}')]),
        (head, head, []),
        (f"{head}!</x>", f"{head}!</x>", []),
    ]


#: Format, answer, its text, and its calls with the text of their arguments.
PARTICULAR = [
    ("qwen3_coder", "<function=f>\n</function>\n</tool_call> x", "x", [("f", "{}")]),
    ("qwen3_coder", "See <function=h>\n</function>", "See <function=h>\n</function>", []),
    ("qwen3_coder", "<tool_call><function=f> is how", "<tool_call><function=f> is how", []),
    ("qwen3_coder", "<tool_call><function=h></function></tool_call>a</tool_call>", "a</tool_call>", [("h", "{}")]),
    (
        "qwen3_coder",
        "<tool_call><function=f></function> a </tool_call> b </tool_call>",
        "a  b </tool_call>",
        [("f", "{}")],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=f></function><tool_call></tool_call>",
        "<tool_call></tool_call>",
        [("f", "{}")],
    ),
    (
        "mimo",
        "<tool_call><function=f><parameter=a>b<parameter=a>c<parameter=y>d</function> e",
        None,
        [("f", '{"a": "b<parameter=a>c<parameter=y>d</function> e')],
    ),
    ("mimo", "<tool_call><function=f><parameter=a>b</function></tool_call>", None, [("f", '{"a": "b"}')]),
    (
        "seed_oss",
        "<seed:tool_call><function=f><parameter=a>b</parameter></seed:tool_call>c",
        "c",
        [("f", '{"a": "b"}')],
    ),
    ("minimax_m2", "<invoke name='f'><parameter name=a>b</parameter></invoke>", None, [("f", '{"a": "b"}')]),
    (
        "deepseek_v32",
        '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="u" string="true">null'
        '</｜DSML｜parameter><｜DSML｜parameter name="y" string="false">[1]</｜DSML｜parameter>'
        '<｜DSML｜parameter name="z" string="true">[1]</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>',
        None,
        [("f", '{"u": "null", "y": [1], "z": "[1]"}')],
    ),
    (
        "hy_v3",
        "<tool_calls><tool_call>f<tool_sep><arg_key>n</arg_key><arg_value>7</arg_value></tool_call></tool_calls>",
        None,
        [("f", '{"n": 7}')],
    ),
    (
        "step3",
        '<｜tool_calls_begin｜><｜tool_call_begin｜><steptml:invoke name="f"></steptml:invoke><｜tool_call_end｜>'
        '<｜tool_sep｜><｜tool_call_begin｜><steptml:invoke name="f"></steptml:invoke><｜tool_call_end｜>',
        None,
        [("f", "{}"), ("f", "{}")],
    ),
    (
        "minicpm5",
        '<function name="f"><param name="a"><![CDATA[</param></function>]]></param></function>',
        None,
        [("f", '{"a": "</param></function>"}')],
    ),
]


def splits(text):
    """Splits at each place, into characters, and into pieces of the size of tokens."""
    yield from ([text[:i], text[i:]] for i in range(len(text)))
    yield [*text]
    yield [text[i : i + 4] for i in range(0, len(text), 4)]


def parse(name, pieces):
    return parse_chunks(TOOL_PARSERS[name].parser_type(numbered_ids(), TOOLS), pieces)


def test_the_test_has_every_format():
    assert {*FORMATS, *SAME} == TAGGED.keys()
    assert all(TAGGED[name] == TAGGED[other] for name, other in SAME.items())


CASES = PARTICULAR + [
    pytest.param(name, *case, id=f"{name}-{i}")
    for name, form in FORMATS.items()
    for i, case in enumerate([*answers(form), *broken_answers(form)])
]


@pytest.mark.parametrize(("name", "answer", "text", "calls"), CASES)
def test_answer_gives_its_text_and_calls_however_it_is_split(name, answer, text, calls):
    whole = parse(name, [answer])
    joined = join_events(whole)
    assert joined.text == text
    is_broken = any(isinstance(arguments, str) for _, arguments in calls)
    read = str if is_broken else json.loads
    assert [(call.name, read(call.arguments)) for call in joined.calls] == calls
    for pieces in splits(answer):
        assert parse(name, pieces) == whole, pieces


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_fit_the_schema(name):
    values = {
        "a": ["5", "null"],
        "n": ["5", " 5\n"],
        "x": ["5", "null"],
        "b": ["true", "False"],
        "o": [PRETTY],
        "u": ["5"],
    }
    for key, texts in values.items():
        for text in texts:
            (call,) = join_events(parse(name, [FORMATS[name].write(("f", {key: text}))])).calls
            jsonschema.validate(json.loads(call.arguments), F)


@pytest.mark.parametrize("name", FORMATS)
def test_mutated_answers_lose_no_character(name):
    """No format has Greek letters, so each one belongs to the text, a name, a key or a value."""
    form, rng = FORMATS[name], random.Random(name)
    whole = "αβ " + form.write(("f", {"a": "γδ </ ε\nζ", "n": "η", "θ": "ι", "o": '{"κ": ["λ"]}'}), ("μ", {})) + " ν"
    for _ in range(300):
        answer = whole
        for _ in range(rng.randint(1, 4)):
            i, j = sorted(rng.choices(range(len(answer) + 1), k=2))
            j = min(j, i + 12)
            answer = rng.choice(
                [answer[:i] + answer[j:], answer[:j] + answer[i:], answer[:i] + rng.choice("<>\"'/=\n{}ξ") + answer[i:]]
            )
        events = parse(name, [answer])
        assert parse(name, [answer[k : k + 9] for k in range(0, len(answer), 9)]) == events, answer
        joined = join_events(events)
        shown = (joined.text or "") + "".join(call.name + call.arguments for call in joined.calls)
        assert greek(shown) == greek(answer), answer


def greek(text):
    return Counter(char for char in text if "α" <= char <= "ω")
