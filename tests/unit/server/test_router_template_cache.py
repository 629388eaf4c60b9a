"""A skeleton stands in for rendering only where no content had a part in what the template did."""

import os
from pathlib import Path

import pytest
from octavo_engine.text.template import ChatTemplate
from octavo_engine.wire.errors import InvalidRequest
from octavo_server.openai.rendering import RenderOptions, render_conversation
from octavo_server.router.prompts import template_cache as skeletons_module
from octavo_server.router.prompts.template_cache import TemplateCache
from octavo_server.router.prompts.template_taint import is_nondeterministic
from octavo_testing.chat_shapes import SPECIAL, TEMPLATES

ROLES = ("system", "user", "assistant", "user")
SAID = [" Be kind.\n", "a </think> b", " \tc", "d \ue0f20\ue0f3"]
PLAIN = RenderOptions()
EACH = "{% for m in messages %}%s{% endfor %}"


def skeletons_of(source):
    return TemplateCache(ChatTemplate(source, SPECIAL), max_bytes=1 << 20)


def rendered(source, roles, said, options=PLAIN):
    conversation = [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]
    return render_conversation(ChatTemplate(source, SPECIAL), conversation, options)


COPIES = {
    "as it is": "{{ m.content }}",
    "in other spellings": "{{ m['content'] }}{{ m.get('content') }}",
    "joined": "{{ '<' + m.content + '>' }}{{ '<' ~ m.content ~ 1 ~ '>' }}",
    "stripped": "<{{ m.content | trim }}|{{ m.content.strip() }}|{{ m.content.lstrip() }}|{{ m.content.rstrip() }}>",
    "stripped when joined": "{{ (' ' + m.content + ' ') | trim }}{{ ('x' + m.content).strip() }}",
    "by a name": "{% set text = m.content %}{% set text = bos_token + text %}{{ text }}",
    "by a block": "{% set text %}[{{ m.content }}]{% endset %}{{ text }}{{ text.strip() }}",
    "by a namespace": "{% set ns = namespace(said='') %}{% set ns.said = ns.said + m.content %}{{ ns.said }}",
    "by a macro": "{% macro say(text) %}<{{ text }}>{% endmacro %}{{ say(m.content) }}",
    "asked its type": "{% if m.content is string and m.content is not none and m.content is defined %}"
    "{{ m.content }}{% endif %}",
    "asked whether it is there": "{% if m.content and m.content != '' %}{{ m.content }}{% endif %}{{ 'name' in m }}",
    "twice, and by the role": "{{ m.role | upper }}{{ m.content }}{% if m.role == 'user' %}{{ m.content }}{% endif %}",
    "of neighbours": "{{ loop.index }}{% if not loop.last %}{{ messages[loop.index].content }}{% endif %}",
    "chosen by role": "{{ (messages | selectattr('role', 'equalto', 'user') | list)[0].content }}",
    "listed": "{{ messages | map(attribute='content') | join(', ') }}",
}


@pytest.mark.parametrize("body", COPIES.values(), ids=COPIES.keys())
def test_what_is_copied_is_put_in(body):
    source = EACH.replace("%s", body)
    assert skeletons_of(source).text(ROLES, SAID, options=PLAIN, options_key=b"")[0] == rendered(source, ROLES, SAID)


def test_it_says_where_the_last_content_begins():
    text, opening_chars = skeletons_of(TEMPLATES["chatml"]).text(ROLES, SAID, options=PLAIN, options_key=b"")
    assert text[:opening_chars].count(SAID[-1]) == SAID[:-1].count(SAID[-1])
    assert text[opening_chars:].startswith(SAID[-1])


LOOKS = {
    "compared": "{{ m.content == 'a' }}",
    "compared by a test": "{{ m.content is eq 'a' }}",
    "searched": "{{ 'a' in m.content }}",
    "searched for": "{{ m.content in 'abc' }}{{ m.content in ['a'] }}",
    "searched as part": "{{ '</think>' in ('x' ~ m.content) }}",
    "measured": "{{ m.content | length }}",
    "split": "{{ m.content.split('</think>')[-1] }}",
    "cut": "{{ m.content[:3] }}",
    "walked through": "{% for c in m.content %}{{ c }}-{% endfor %}",
    "begun with": "{{ m.content.startswith('a') }}",
    "made upper": "{{ m.content | upper }}",
    "replaced": "{{ m.content | replace('a', 'b') }}",
    "replacing": "{{ 'xyz' | replace('y', m.content) }}",
    "as JSON": "{{ m.content | tojson }}",
    "as JSON with its message": "{{ m | tojson }}",
    "as JSON in a list": "{{ [m.content] | tojson }}",
    "formatted": "{{ '%s' % m.content }}{{ '%s' | format(m.content) }}{{ '{}'.format(m.content) }}",
    "shown with its message": "{{ m }}",
    "counted": "{{ m.content | wordcount }}",
    "as a number": "{{ m.content | int }}",
    "stripped of more": "{{ m.content.strip('a') }}",
    "as a key": "{{ {'a': 1}[m.content] }}",
    "sorted": "{{ messages | sort(attribute='content') | map(attribute='role') | join }}",
    "by a macro": "{% macro say(text) %}<{{ text }}>{% endmacro %}{{ say(m.content) | length }}",
    "by a block": "{% set text %}{{ m.content }}{% endset %}{{ text | length }}",
    "by a filter block": "{% filter upper %}{{ m.content }}{% endfilter %}",
    "by a joined list": "{{ (messages | map(attribute='content') | join) | length }}",
    "looped over with a memory": "{{ loop.changed(m.content) }}",
    "multiplied": "{{ m.content * 2 }}",
    "ordered": "{{ m.content < 'b' }}",
    "escaped": "{{ m.content | e }}",
    "escaped by what is safe": "{{ ('<b>' | safe) + m.content }}",
    "escaped when joined": "{{ ('<b>' | safe).join(messages | map(attribute='content')) }}",
    "escaped in a block": "{% autoescape true %}{{ m.content }}{% endautoescape %}",
    "compared as a message": "{{ m == messages[-1] }}",
    "looked for": "{{ m in messages[1:] }}",
    "drawn": "{{ [m.content, 'a'] | random }}",
}


@pytest.mark.parametrize("body", LOOKS.values(), ids=LOOKS.keys())
def test_a_template_that_looks_inside_has_no_skeleton(body):
    assert skeletons_of(EACH.replace("%s", body)).text(ROLES, SAID, options=PLAIN, options_key=b"") is None


def test_looking_at_some_roles_leaves_the_others_theirs():
    source = EACH.replace(
        "%s", "{% if m.role == 'assistant' %}{{ m.content | length }}{% else %}{{ m.content }}{% endif %}"
    )
    skeletons = skeletons_of(source)
    assert skeletons.text(("user",), ["a"], options=PLAIN, options_key=b"") == ("a", 0)
    assert skeletons.text(("user", "assistant"), ["a", "b"], options=PLAIN, options_key=b"") is None


@pytest.mark.parametrize("said", [["", "b"], ["a", ""]])
def test_an_empty_content_is_known_to_be_empty(said):
    source = EACH.replace("%s", "{% if m.content %}<{{ m.content }}>{% else %}nothing{% endif %}")
    roles = ("user", "user")
    assert skeletons_of(source).text(roles, said, options=PLAIN, options_key=b"")[0] == rendered(source, roles, said)


def test_white_space_alone_is_rendered():
    assert skeletons_of(TEMPLATES["chatml"]).text(("user",), [" \n"], options=PLAIN, options_key=b"") is None


def test_marks_in_roles_or_options_are_not_taken_for_contents():
    skeletons = skeletons_of(TEMPLATES["chatml"])
    assert skeletons.text(("\ue0f20\ue0f3",), ["a"], options=PLAIN, options_key=b"") is None
    assert skeletons.text(("user",), ["a"], options=PLAIN, options_key='{"documents":"\ue0f2"}'.encode()) is None
    assert skeletons.text(("user",), ["a"], options=PLAIN, options_key=rb'{"documents":"\u001f"}') is None
    assert skeletons_of(r"{{ '\x1f' + messages[0].content }}").text(ROLES, SAID, options=PLAIN, options_key=b"") is None


def test_options_have_skeletons_of_their_own():
    skeletons, quiet = skeletons_of(TEMPLATES["chatml"]), RenderOptions(add_generation_prompt=False)
    for key, options in ((b"", PLAIN), (b"quiet", quiet), (b"", PLAIN)):
        text, _ = skeletons.text(("user",), ["a"], options=options, options_key=key)
        assert text == rendered(TEMPLATES["chatml"], ("user",), ["a"], options)


def test_the_date_is_that_of_the_request(monkeypatch):
    class Clock:
        year = 2024

        @classmethod
        def now(cls):
            return cls

        @classmethod
        def strftime(cls, format):
            return format.replace("%Y", str(cls.year))

    monkeypatch.setattr("octavo_engine.text.sandbox.datetime", Clock)
    monkeypatch.setattr(skeletons_module, "datetime", Clock)
    skeletons = skeletons_of("{{ strftime_now('in %Y') }} {{ messages[0].content }}")
    shown = []
    for Clock.year in (2024, 2024, 2025):
        shown.append(skeletons.text(("user",), ["a"], options=PLAIN, options_key=b""))
    assert shown == [("in 2024 a", 8), ("in 2024 a", 8), ("in 2025 a", 8)]


def test_a_template_may_draw_lots():
    assert is_nondeterministic("{{ ['a', 'b'] | random }}")
    assert is_nondeterministic("{{ lipsum() }}")
    assert not is_nondeterministic(TEMPLATES["qwen"])


REAL = sorted(Path(os.environ.get("OCTAVO_LLAMA_VOCABS", "/nonexistent"), "templates").glob("*.jinja"))


@pytest.mark.skipif(not REAL, reason="OCTAVO_LLAMA_VOCABS names no folder with llama.cpp's templates")
@pytest.mark.parametrize("path", REAL, ids=[path.stem for path in REAL])
def test_real_templates(path):
    source = path.read_text(encoding="utf-8")
    skeletons = skeletons_of(source)
    for roles in (("user",), ("system", "user"), ("user", "assistant", "user"), ("system", *("user", "assistant") * 4)):
        said = [f"{SAID[i % 4]} {i}" for i in range(len(roles))]
        filled = skeletons.text(roles, said, options=PLAIN, options_key=b"")
        try:
            whole = rendered(source, roles, said)
        except InvalidRequest:
            whole = None
        assert filled is None or filled[0] == whole
