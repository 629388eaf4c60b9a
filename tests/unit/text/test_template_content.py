"""Content of messages as templates need it: in each role the text appears once, as transformers renders it."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jinja2.exceptions import TemplateError
from octavo_engine.text.template import ChatTemplate
from octavo_engine.wire.errors import InvalidRequest
from transformers.utils.chat_template_utils import render_jinja_template

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

#: Layouts in the style of well-known models. CONTENT stands for the content of `message`.
LAYOUTS = {
    "chatml": "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}CONTENT{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "headers": "{{ bos_token }}{% for message in messages %}{{ '[' + message['role'] + ']\n\n' }}CONTENT{{ eos_token }}"
    "{%- for call in message.tool_calls or [] %}{{ call.function.name }}{% endfor %}{% endfor %}",
    "instructions": "{% for message in messages %}{% if message.role == 'user' %}[INST] CONTENT [/INST]"
    "{% elif message.role == 'system' %}<<SYS>>CONTENT<</SYS>>{% else %} CONTENT</s>{% endif %}{% endfor %}",
    "no systems": "{% if messages[0].role == 'system' %}{{ raise_exception('no systems') }}{% endif %}"
    "{% for message in messages %}<turn>{{ message.role }}:CONTENT</turn>\n{% endfor %}",
    "one system": "{% if messages[0].role == 'system' %}{% set message = messages[0] %}{% set rest = messages[1:] %}"
    "Rules: CONTENT\n{% else %}{% set rest = messages %}{% endif %}{% for message in rest %}"
    "{% if message.role == 'system' %}{{ raise_exception('late system') }}{% endif %}{{ message.role }}> CONTENT\n"
    "{% endfor %}",
}
EITHER = (
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
)


def as_text(content: Any) -> Any:
    if content is None:
        return ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def as_parts(content: Any) -> Any:
    if content is None:
        return []
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def as_one_part(content: Any) -> Any:
    return [{"type": "text", "text": as_text(content)}]


def as_sent(content: Any) -> Any:
    return "" if content is None else content


def as_text_or_null(content: Any) -> Any:
    return None if content is None else as_text(content)


#: Expression that renders the content -> the form of the content that it takes, by role.
CONTENTS: dict[str, tuple[str, Callable[[Any], Any], frozenset[str]]] = {
    "added text": ("{{ '' + message['content'] }}", as_text, frozenset()),
    "tested text": (
        "{% set text = message.content %}{% if message['content'] == none %}-{% else %}{{ text | trim }}{% endif %}",
        as_text_or_null,  # only with calls
        frozenset({"user", "system", "tool"}),
    ),
    "printed": ("{{ message.content }}", as_text, frozenset()),
    "first part": ("{{ message.content[0].text }}", as_one_part, frozenset()),
    "all parts": ("{% for part in message.content %}{{ part['text'] }}{% endfor %}", as_parts, frozenset()),
    "mapped parts": ("{{ message.content | map(attribute='text') | join('+') }}", as_parts, frozenset()),
    "either": (EITHER, as_sent, frozenset()),
    "parts of users": (
        "{% if message.role == 'user' %}{{ message.content[0].text }}{% else %}{{ message.content + '' }}{% endif %}",
        as_one_part,
        frozenset({"system", "assistant", "tool"}),
    ),
}
TEMPLATES = {
    f"{layout}, {content}": (LAYOUTS[layout].replace("CONTENT", CONTENTS[content][0]), *CONTENTS[content][1:])
    for layout in LAYOUTS
    for content in CONTENTS
}
USER = {"role": "user", "content": "Hi"}
CALL = {"id": "call12345", "type": "function", "function": {"name": "add", "arguments": {}}}
CONVERSATIONS: dict[str, Callable[[Any], list[dict[str, Any]]]] = {
    "user": lambda content: [{"role": "user", "content": content}],
    "system": lambda content: [{"role": "system", "content": content}, USER],
    "assistant": lambda content: [USER, {"role": "assistant", "content": content}, USER],
    "call": lambda content: [USER, {"role": "assistant", "content": content, "tool_calls": [CALL]}],
    "tool": lambda content: [
        USER,
        {"role": "assistant", "content": "so", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call12345", "name": "add", "content": content},
    ],
}
FIRST, SECOND = "The <first> text", "and 2nd"
SENT = {
    "string": FIRST,
    "part": [{"type": "text", "text": FIRST}],
    "parts": [{"type": "text", "text": FIRST}, {"type": "text", "text": SECOND}],
    "null": None,
}


def by_transformers(source: str, messages: list[dict[str, Any]]) -> str | None:
    """Render a conversation; None if the template rejects it."""
    try:
        (text,), _ = render_jinja_template([messages], chat_template=source, add_generation_prompt=True, **TOKENS)
    except (TemplateError, TypeError):
        return None
    return text


def is_other(message: dict[str, Any], form: Callable[[Any], Any], others: frozenset[str]) -> bool:
    return message["role"] in others or (form is as_text_or_null and "tool_calls" not in message)


def test_there_are_forty_templates() -> None:
    assert len(TEMPLATES) == 40


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("role", CONVERSATIONS)
def test_each_text_appears_once_as_by_transformers(name: str, role: str) -> None:
    source, form, others = TEMPLATES[name]
    template = ChatTemplate(source, TOKENS)
    for sent in SENT.values():
        messages = CONVERSATIONS[role](sent)
        formed = [
            {**message, "content": (as_text if is_other(message, form, others) else form)(message["content"])}
            for message in messages
        ]
        expected = by_transformers(source, formed)
        if expected is None:
            with pytest.raises(InvalidRequest):
                template.render(messages)
            continue
        text = template.render(messages)
        assert text == expected
        assert text.count(FIRST) == (sent is not None)
        assert text.count(SECOND) == (sent is SENT["parts"])


REAL = sorted(Path(os.environ.get("OCTAVO_LLAMA_VOCABS", "/nonexistent"), "templates").glob("*.jinja"))


@pytest.mark.skipif(not REAL, reason="OCTAVO_LLAMA_VOCABS names no folder with llama.cpp's templates")
@pytest.mark.parametrize("path", REAL, ids=[path.stem for path in REAL])
@pytest.mark.parametrize("role", CONVERSATIONS)
def test_real_templates_show_each_text_as_by_transformers(path: Path, role: str) -> None:
    source = path.read_text(encoding="utf-8")
    template = ChatTemplate(source, TOKENS)
    as_strings = by_transformers(source, CONVERSATIONS[role](FIRST))
    for sent in ("string", "part", "parts"):
        messages = CONVERSATIONS[role](SENT[sent])
        if as_strings is None:
            continue
        text = template.render(messages)
        joined = by_transformers(source, CONVERSATIONS[role](as_text(SENT[sent])))
        assert text == joined or (sent == "parts" and text == by_transformers(source, messages))
        assert text.count(SECOND) == as_strings.count(FIRST) * (sent == "parts")


@pytest.mark.skipif(not REAL, reason="OCTAVO_LLAMA_VOCABS names no folder with llama.cpp's templates")
@pytest.mark.parametrize("path", REAL, ids=[path.stem for path in REAL])
@pytest.mark.parametrize("second", ["system", "developer"])
def test_real_templates_that_show_a_system_message_show_two(path: Path, second: str) -> None:
    source = path.read_text(encoding="utf-8")
    messages = [{"role": "system", "content": FIRST}, {"role": second, "content": SECOND}, USER]
    one = by_transformers(source, [messages[0], USER])
    if one is not None:
        text = ChatTemplate(source, TOKENS).render(messages)
        assert text.count(FIRST) == text.count(SECOND) == one.count(FIRST)


PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
EITHER_LOOP = "{% for message in messages %}" + EITHER + ";{% endfor %}"
PRINTED = "{% for message in messages %}{{ message.content }};{% endfor %}"


@pytest.mark.parametrize(
    ("content_format", "source", "text"),
    [
        ("auto", EITHER_LOOP, "Hi;ab;"),
        ("string", EITHER_LOOP, "Hi;a\nb;"),
        ("openai", EITHER_LOOP, "Hi;ab;"),
        ("auto", PRINTED, "Hi;a\nb;"),
        ("string", PRINTED, "Hi;a\nb;"),
        ("openai", PRINTED, f"{as_parts('Hi')};{PARTS};"),
    ],
)
def test_the_format_of_the_content_may_be_set(content_format: str, source: str, text: str) -> None:
    messages = [USER, {"role": "user", "content": PARTS}]
    assert ChatTemplate(source, content_format=content_format).render(messages) == text


@pytest.mark.parametrize(
    "part",
    [{"type": "input_text", "text": "a"}, {"type": "refusal", "refusal": "a"}, "a", {"type": "text", "text": "a"}],
)
def test_every_part_reaches_the_template_as_a_text(part: Any) -> None:
    source = "{% for part in messages[0].content %}{{ part | tojson }}{% endfor %}{{ messages[0].content[0].text }}"
    text = ChatTemplate(source).render([{"role": "user", "content": [part]}])
    assert text == '{"type": "text", "text": "a"}a'


def test_text_that_only_some_layouts_of_parts_show_is_joined() -> None:
    """A template that lists tools before the first message, as a text, gets the parts of that message as a text."""
    source = (
        "{% if tools %}{{ messages[0].content | trim }}{% else %}{% for message in messages %}"
        + EITHER
        + "{% endfor %}{% endif %}"
    )
    for tools in (None, [{"type": "function", "function": {"name": "add"}}]):
        assert ChatTemplate(source).render([{"role": "user", "content": PARTS}], tools=tools) == "a\nb"


def test_a_message_of_parts_can_be_continued() -> None:
    loop = "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}{{ part.text }}{% endfor %}</>{% endfor %}"
    for content, end in (("so", "so"), (PARTS, "ab"), ([], "")):
        messages = [USER, {"role": "assistant", "content": content}]
        text = ChatTemplate(loop).render(messages, add_generation_prompt=False, continue_final_message=True)
        assert text == "<user>Hi</><assistant>" + end


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="string, openai") as caught:
        ChatTemplate("x", content_format="json")
    assert caught.value.param == "chat_template_content_format"


def test_a_renamed_role_has_the_format_of_its_new_name() -> None:
    loop = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content[0].text }}{% else %}{{ m.content }}{% endif %}"
    )
    messages = [{"role": "developer", "content": "be kind;"}, USER]
    assert ChatTemplate(loop + "{% endfor %}").render(messages) == "be kind;Hi"
