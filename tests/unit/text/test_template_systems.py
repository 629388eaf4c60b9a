"""Several system messages at the beginning: joined for templates that take one, separate for others."""

from typing import Any

import pytest
from octavo_engine.text.template import ChatTemplate
from octavo_engine.wire.errors import InvalidRequest

USER = {"role": "user", "content": "Hi"}


def system(text: Any, role: str = "system") -> dict[str, Any]:
    return {"role": role, "content": text}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


BODY = (
    "{% for m in rest %}{% if m.role == 'system' %}LATER{% else %}{{ m.role }}>{{ m.content }};{% endif %}{% endfor %}"
)
FIRST = (
    "{% if messages[0].role == 'system' %}{{ messages[0].content }};{% set rest = messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}"
)
REJECTS = FIRST + BODY.replace("LATER", "{{ raise_exception('the system message must be first') }}")
DROPS = FIRST + BODY.replace("LATER", "")
ALTERNATES = (
    FIRST + "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.role }}>{{ m.content }};{% endfor %}"
)
SEPARATE = "{% for m in messages %}{{ m.role }}>{{ m.content }};{% endfor %}"
PARTS = (
    "{% if messages[0].role == 'system' %}{% for part in messages[0].content %}{{ part.text }}|{% endfor %};"
    "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
    + BODY.replace("LATER", "{{ raise_exception('late') }}")
)
#: A template that knows both roles and shows one message of them.
ONE_OF_BOTH = DROPS.replace("== 'system'", "in ['system', 'developer']")
#: A template that shows one system message and one of the developer.
ONE_OF_EACH = (
    "{% for role in ['system', 'developer'] %}{% for m in messages if m.role == role %}"
    "{% if loop.first %}{{ role }}>{{ m.content }};{% endif %}{% endfor %}{% endfor %}"
    "{% for m in messages if m.role == 'user' %}user>{{ m.content }};{% endfor %}"
)


@pytest.mark.parametrize("source", [REJECTS, DROPS, ALTERNATES])
@pytest.mark.parametrize("second", ["system", "developer"])
def test_leading_system_messages_are_joined_for_a_template_that_takes_one(source: str, second: str) -> None:
    template = ChatTemplate(source)
    assert template.render([system("A"), system("B", second), USER]) == "A\n\nB;user>Hi;"
    assert template.render([system("A"), system("B", second), system("C"), USER]) == "A\n\nB\n\nC;user>Hi;"
    assert template.render([system("A"), USER]) == "A;user>Hi;"
    assert template.render([USER]) == "user>Hi;"


def test_a_template_that_shows_each_system_message_gets_them_as_they_are() -> None:
    assert ChatTemplate(SEPARATE).render([system("A"), system("B", "developer"), USER]) == "system>A;system>B;user>Hi;"


@pytest.mark.parametrize(
    ("contents", "text"),
    [
        ((parts("a", "b"), "c"), "a\nb\n\nc"),
        (("", "b"), "b"),
        ((None, "b", ""), "b"),
        ((None, []), ""),
    ],
)
def test_parts_and_empty_contents_are_joined(contents: tuple[Any, ...], text: str) -> None:
    messages = [*map(system, contents), USER]
    assert ChatTemplate(REJECTS).render(messages) == text + ";user>Hi;"
    assert ChatTemplate(PARTS).render(messages) == text + "|;user>Hi;"


def test_a_later_system_message_is_the_templates_affair() -> None:
    with pytest.raises(InvalidRequest, match="must be first"):
        ChatTemplate(REJECTS).render([system("A"), USER, system("B")])


def test_a_template_without_system_messages_rejects_them() -> None:
    source = "{% for m in messages %}{{ m.content if m.role == 'user' else raise_exception('no') }}{% endfor %}"
    with pytest.raises(InvalidRequest, match="rejected these messages: no"):
        ChatTemplate(source).render([system("A"), system("B"), USER])


@pytest.mark.parametrize(
    ("source", "roles", "text"),
    [
        (ONE_OF_BOTH, "sd", "A\n\nB;user>Hi;"),
        (ONE_OF_BOTH, "dd", "A\n\nB;user>Hi;"),
        (ONE_OF_EACH, "sd", "system>A;developer>B;user>Hi;"),
        (ONE_OF_EACH, "ss", "system>A\n\nB;user>Hi;"),
        (ONE_OF_EACH, "ssdd", "system>A\n\nB;developer>C\n\nD;user>Hi;"),
    ],
)
def test_templates_that_know_the_developer_get_what_they_show(source: str, roles: str, text: str) -> None:
    names = {"s": "system", "d": "developer"}
    messages = [system(content, names[role]) for content, role in zip("ABCD", roles, strict=False)]
    assert ChatTemplate(source).render([*messages, USER]) == text


def test_a_conversation_of_system_messages_alone_is_joined() -> None:
    assert ChatTemplate(REJECTS).render([system("A"), system("B")]) == "A\n\nB;"
