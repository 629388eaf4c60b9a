"""Templates whose work or values grow without a bound: each ends with an error, without the memory that it asks for."""

import itertools
import resource

import pytest
from octavo_engine.text import template_meter
from octavo_engine.text.template import ChatTemplate
from octavo_engine.wire.errors import InvalidRequest

STEPS, BYTES = "more than 1000000 steps", "more than 48 MiB"
DOUBLED = "{% for i in range(60) %}{% set ns.x = ns.x OPERATOR ns.x %}{% endfor %}"
NEST = "{{% for i in range(40) %}}{{% set ns.x = {0}ns.x, ns.x{1} %}}{{% set ns.y = {0}ns.y, ns.y{1} %}}{{% endfor %}}"
KEPT = (
    "{% set d = {}.fromkeys(('a' * 20000)|list|map('string')|list) %}{% set d = {'k': range(9999)|list} %}"
    "{% set d = dict(range(9999)|map('string')|batch(2, 'x')|list) %}{% set ns = namespace(l=[]) %}"
    "{% for i in range(999) %}{% set ns.l = ns.l + [COPY] %}{% endfor %}"
)
NESTED = "{% set r = range(1000) %}{% for a in r %}{% for b in r %}BODY{% endfor %}{% endfor %}"
OF_CHARACTERS = ("batch(9)", "groupby(0)", "list", "max", "min", "slice(2)", "sort", "unique")
WIDE = "{% set x = 'a' * 10000 * 900 %}"
BOMBS = {
    "nested loops": (NESTED.replace("BODY", "{% for c in r %}{% endfor %}"), STEPS),
    "loops with a filter": ("{% set r = range(1000) %}" + "{% for a in r if a < 0 %}{% endfor %}" * 1001, STEPS),
    "macro that calls itself": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        STEPS,
    ),
    "recursive loop": (
        "{% for a in [[1] * 999] * 999 recursive %}{{ loop([a] * 2) if loop.depth < 40 }}{% endfor %}",
        f"{STEPS}|{BYTES}",
    ),
    "filters in a loop": (NESTED.replace("BODY", "{% set x = 'a'|upper|lower %}"), STEPS),
    "generator": ("{% set r = range(1000) %}{% for i in r %}{% set x = r|map('string')|list %}{% endfor %}", STEPS),
    "text times number": ("{% set x = 'a' * 3000000000 %}", BYTES),
    "number times list": ("{% set x = 3000000000 * [1] %}", BYTES),
    "power": ("{% set x = 10 ** 30000000 %}", BYTES),
    "powers of powers": (
        "{% set ns = namespace(x=7) %}{% for i in range(30) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        BYTES,
    ),
    "% with a width": ("{{ '%3000000000d' % 1 }}", "four digits"),
    "% with a width in a tuple": ("{{ '%*d' % (3000000000, 1) }}", "four digits"),
    "% with a precision": ("{{ '%.3000000000f' % 1 }}", "four digits"),
    "% with a key": ("{{ '%(a(b))3000000000d' % {'a(b)': 1} }}", "four digits"),
    "filter format": ("{{ '%3000000000d'|format(1) }}", "four digits"),
    "str.format": ("{{ '{:3000000000}'.format(1) }}", "four digits"),
    "str.format, nested": ("{{ '{:{}}'.format(1, 3000000000) }}", "four digits"),
    "str.format_map": ("{{ '{a:3000000000}'.format_map({'a': 1}) }}", "four digits"),
    "repeated field": (WIDE + "{{ ('{0}' * 999).format(x) }}", BYTES),
    "ljust": ("{{ 'a'.ljust(3000000000) }}", BYTES),
    "zfill": ("{{ 'a'.zfill(3000000000) }}", BYTES),
    "center": ("{{ 'a'|center(3000000000) }}", BYTES),
    "to_bytes": ("{{ (1).to_bytes(3000000000, 'big') }}", BYTES),
    "expandtabs": ("{{ ('\t' * 1000000).expandtabs(1000000) }}", BYTES),
    "indent": ("{{ ('a\n' * 1000000)|indent(1000000) }}", BYTES),
    "indent with a text": (WIDE + "{{ ('a\n' * 1000)|indent(x) }}", BYTES),
    "wordwrap": ("{{ ('a' * 5000000)|wordwrap(1) }}", BYTES),
    "replace": (WIDE + "{{ ('a' * 1000)|replace('a', x) }}", BYTES),
    "str.replace": (WIDE + "{{ ('a' * 1000).replace('', x) }}", BYTES),
    "replace in a list": (WIDE + "{{ (['a'] * 1000)|replace('a', x) }}", BYTES),
    "replace in bytes": (WIDE + "{{ ('a' * 1000).encode('utf8')|replace('a', x) }}", BYTES),
    "replace in an escaped text": (WIDE + "{{ ('a' * 1000)|safe|replace('a', x) }}", BYTES),
    "str.replace of an escaped text": (WIDE + "{{ (('a' * 1000)|safe).replace('', x) }}", BYTES),
    "translate": (WIDE + "{{ ('a' * 1000).translate({97: x}) }}", BYTES),
    "split": ("{{ ('a ' * 8000000).split(' ')|length }}", BYTES),
    "list of a text": (WIDE + "{{ x|list|length }}", BYTES),
    "join": (WIDE + "{{ range(1000)|join(x) }}", BYTES),
    "join of one text": (WIDE + "{{ ([x] * 1000)|join }}", BYTES),
    "str.join": (WIDE + "{{ x.join('abcdefgh') }}", BYTES),
    "tojson with an indent": ("{{ (range(1000)|list)|tojson(indent=1000000) }}", BYTES),
    "tojson of one text": (WIDE + "{{ ([x] * 1000)|tojson }}", BYTES),
    "batch": ("{{ [1]|batch(3000000000, 1)|list }}", BYTES),
    "sum of lists": ("{{ ([[1] * 1000] * 1000)|sum(start=[]) }}", "not supported"),
    "text of a list": (WIDE + "{{ [x] * 1000 }}", BYTES),
    "text of a namespace": (WIDE + "{% set ns = namespace(l=[x, x, x, x, x]) %}{{ ns }}", BYTES),
    "string of a list": (WIDE + "{% set y = [x, x, x, x, x]|string %}", BYTES),
    "doubled text": ("{% set ns = namespace(x='ab') %}" + DOUBLED.replace("OPERATOR", "+"), BYTES),
    "doubled text, joined": ("{% set ns = namespace(x='ab') %}" + DOUBLED.replace("OPERATOR", "~"), BYTES),
    "doubled list": ("{% set ns = namespace(x=[1]) %}" + DOUBLED.replace("OPERATOR", "+"), BYTES),
    "block": (WIDE + "{% set y %}" + "{{ x }}" * 9 + "{% endset %}", BYTES),
    "literal text in a macro": (
        "{% macro f() %}" + "a" * 100000 + "{% endmacro %}{% for i in range(999) %}{% set x = f() %}{% endfor %}",
        BYTES,
    ),
    "slices": (WIDE + "{% set l = [" + "x[1:]," * 9 + "] %}", BYTES),
    "equal nested lists": (
        "{% set ns = namespace(x=[1], y=[1]) %}" + NEST.format("[", "]") + "{{ ns.x == ns.y }}",
        BYTES,
    ),
    "nested list in a list": (
        "{% set ns = namespace(x=[1], y=[1]) %}" + NEST.format("[", "]") + "{{ ns.x in [ns.y] }}",
        BYTES,
    ),
    "hash of nested tuples": (
        "{% set ns = namespace(x=(1,), y=(1,)) %}" + NEST.format("(", ")") + "{{ {ns.x: 1} }}",
        BYTES,
    ),
    "backward search": ("{% set x = 'a' * 6000000 %}{{ x.rfind('b' + 'a' * 3000000) }}", BYTES),
    "backward partition": ("{% set x = 'a' * 6000000 %}{{ x.rpartition('b' + 'a' * 3000000) }}", BYTES),
    "backward split": ("{% set x = 'a' * 6000000 %}{{ x.rsplit('b' + 'a' * 3000000) }}", BYTES),
    "copies of a dictionary": (KEPT.replace("COPY", "dict(d)"), BYTES),
    "dictionaries from keys": (KEPT.replace("COPY", "{}.fromkeys(d)"), BYTES),
    "namespaces": (KEPT.replace("COPY", "namespace(d)"), BYTES),
    "lists of one": ("{% set x = ('a' * 700000)|list|batch(1)|list|batch(1)|list %}", BYTES),
    "sorted long texts": ("{% set x = [('a' * 6000)] * 100000 %}{{ x|sort }}", BYTES),
    "sums of a range": ("{% set r = range(1000000) %}{{ r|sum }}{{ r|sum(attribute='real') }}", STEPS),
    "groups of a range": ("{{ range(1000000)|groupby('denominator')|length }}", STEPS),
    "largest of a range": ("{% set r = range(100000) %}{% for i in range(11) %}{{ r|max }}{% endfor %}", STEPS),
    "members of a range": ("{% set r = range(1000000) %}{{ 0.5 in r and 1 }}{{ 0.5 not in r }}", STEPS),
    "tests of a range": ("{% set r = range(1000000) %}{{ 0.5 is in r }}{{ 0.5 is in(r) }}", STEPS),
    "selected members of a range": ("{% set r = range(9000) %}{{ r|select('in', r)|list }}", STEPS),
    "count in a range": ("{% set r = range(1000000) %}{{ r.count(0.5) }}{{ r.count(0.5) }}", STEPS),
    "attributes of a range": ("{% set r = range(1000000) %}{{ r|map(attribute='real')|list|length }}", STEPS),
    "long path of attributes": ("{{ ['a']|map(attribute='0.' * 99999 ~ '0')|list }}", "8 parts"),
    "sort by a long path": ("{{ ['a', 'b']|sort(attribute='0.' * 99999 ~ '0') }}", "8 parts"),
    "sums of an attribute": ("{% set l = [[1]] * 300000 %}" + "{{ l|sum(attribute=0) }}" * 4, STEPS),
    "chain of filters": ("{{ (['a'] * 99999)" + "|map(attribute='0')" * 11 + "|list|length }}", STEPS),
    "chain of selections": ("{{ (['a'] * 199999)" + "|select" * 6 + "|list|length }}", STEPS),
    "replace by keywords": (WIDE + "{{ ('a' * 1000)|replace(new=x, old='a') }}", BYTES),
    "replace by a list": (WIDE + "{{ ('a' * 1000)|replace('a', [x]) }}", BYTES),
    "join by a list": (WIDE + "{{ 'ab'|join([x, x, x, x, x]) }}", BYTES),
    "tojson with separators": (WIDE + "{{ ([1] * 1000)|tojson(separators=(x, ':')) }}", "64 characters"),
    "targets of links": (WIDE + "{{ ('www.a.com ' * 1000)|urlize(target=[x]) }}", BYTES),
    "targets of links in a list": (WIDE + "{{ (['www.a.com '] * 1000)|urlize(target=x) }}", BYTES),
    "words of a list": ("{{ ['a ' * 1000 * 2000]|wordcount }}", BYTES),
    "groups by a default": (WIDE + "{{ (['a'] * 1000)|groupby('a', x) }}", BYTES),
    "groups by an attribute of a namespace": (WIDE + "{{ ([namespace(k=x)] * 1000)|groupby('k') }}", BYTES),
    **{f"{each} of a text": (WIDE + f"{{{{ x|{each}|first }}}}", BYTES) for each in OF_CHARACTERS},
    "sorted selection": (WIDE + "{{ ([x] * 1000)|select|sort }}", BYTES),
    "sorted values": (WIDE + "{{ {}.fromkeys(range(1000), x).values()|sort }}", BYTES),
    "sorted attributes": (WIDE + "{{ ([joiner(x)] * 1000)|sort(attribute='id,sep') }}", BYTES),
    "selection by a long path": ("{{ ['a']|selectattr('0.' * 99999 ~ '0')|list }}", "8 parts"),
    "largest by a long path": ("{{ ['a']|max(false, '0.' * 99999 ~ '0') }}", "8 parts"),
    "sort by many attributes": ("{{ (['a'] * 9000)|sort(attribute='a,' * 9999) }}", "8 parts"),
    "long name of an attribute": (WIDE + "{{ (['a'] * 9000)|map(attribute=x)|list }}", "4096 characters"),
    "time with a width": ("{{ strftime_now('%99999999d' ~ 'x' * 9999) }}", "256 characters"),
    "slow codec": ("{{ 'é'.encode('punycode') }}", "encode is supported"),
    "slow codec by keyword": ("{{ 'é'.encode(encoding='punycode') }}", "encode is supported"),
    "long names of characters": ("{{ 'é'.encode('ascii', 'namereplace') }}", "encode is supported"),
    "backward split by keywords": ("{% set x = 'a' * 999 * 6000 %}{{ x.rsplit(maxsplit=1, sep='b' ~ x) }}", BYTES),
    "generated text": ("{{ lipsum(n=100000) }}", "'lipsum' is undefined"),
    "integer of digits": ("{% set x = ('f' * 1000000)|int(base=16) %}", BYTES),
}


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a slow machine reach the limits of steps and bytes."""
    monkeypatch.setattr(template_meter, "MAX_CPU_S", 60.0)


def test_a_rendering_ends_at_its_limit_of_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_meter, "MAX_CPU_S", 0.01)
    with pytest.raises(InvalidRequest, match="takes longer than"):
        ChatTemplate(NESTED.replace("BODY", "{% set x = 'a'|upper|lower %}")).render([{"role": "user", "content": "x"}])


LARGE = "{% set r = range(9000)|list %}{% set s = 'a' * 9000 %}"
LONG_OPERATIONS = ("r|first", "0.5 in r", "0.5 is in r", "r.count(0.5)", "'b' in s", "'b' is in s")


@pytest.mark.parametrize("operation", LONG_OPERATIONS)
def test_each_operation_on_a_large_value_reads_the_clock(monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    """All operations are in one expression, without a loop."""
    monkeypatch.setattr(template_meter.time, "thread_time", itertools.count().__next__)
    template = ChatTemplate(LARGE + "{{ " + " or ".join([operation] * 70) + " }}")
    with pytest.raises(InvalidRequest, match="takes longer than 60 s"):
        template.render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_ends_with_an_error(name: str) -> None:
    source, message = BOMBS[name]
    template = ChatTemplate(source)  # nothing is computed while it loads
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidRequest, match=message):
        template.render([{"role": "user", "content": "x"}])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


ORDINARY = {
    "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ '' if loop.last else ',' }}{% endfor %}": "1/2,2/2",
    "{% for m in messages if m.role == 'user' %}{{ m.content|trim }}{% endfor %}": "hi",
    "{% for k, v in messages[0].items() %}{{ k ~ '=' ~ v }};{% endfor %}": "role=user;content= hi ;",
    "{{ '%5.1f|%s' % (2.25, 'x') }}{{ '{:>4}'.format(7) }}": "  2.2|x   7",
    "{{ messages[1:]|map(attribute='content')|join('-', attribute=None) }}": "yo",
    "{{ messages|join(',', attribute='role') }}": "user,assistant",
    "{{ {'a': [1, 'é']}|tojson }}{{ {'a': 1}|tojson(indent=2) }}": '{"a": [1, "é"]}{\n  "a": 1\n}',
    "{% set x %}a{{ 1 + 1 }}{% endset %}{{ x * 3 }}": "a2a2a2",
    "{% macro f(a, b=2) %}{{ a }}{{ b }}{{ caller() if caller }}{% endmacro %}{% call f(1) %}!{% endcall %}": "12!",
    "{{ 'a\nb'|indent(2) }}{{ 'a</t>b'.split('</t>')[-1].lstrip('b') }}": "a\n  b",
    "{{ messages|sort(attribute='role,content')|map(attribute='role')|join }}": "assistantuser",
    "{{ {'b': 'x', 'a': 'Y'}.values()|sort }}{{ ['b', 'A']|select|max }}{{ {'b': 1, 'a': 2}|dictsort }}": (
        "['x', 'Y']b[('a', 2), ('b', 1)]"
    ),
    "{% for role, group in messages|groupby('role', default='x') %}{{ role }}{{ group|length }}{% endfor %}": (
        "assistant1user1"
    ),
    "{% set x = 'a, b. ' * 2000 %}{{ messages|selectattr('content', 'in', x ~ 'yo')|map(attribute='role')|first }}"
    "{{ messages|map('replace', x, '')|list|length }}{{ messages|map(attribute='n', default=x)|list|length }}": (
        "assistant22"
    ),
    "{{ 7 // 2 }}{{ 2 ** 10 }}{{ 7 % 4 }}{{ [1] + [2] }}{{ (3, 4)|last }}": "310243[1, 2]4",
    "{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}": "3",
}


@pytest.mark.parametrize("source", ORDINARY)
def test_ordinary_templates_are_rendered_as_by_jinja(source: str) -> None:
    messages = [{"role": "user", "content": " hi "}, {"role": "assistant", "content": "yo"}]
    assert ChatTemplate(source).render(messages) == ORDINARY[source]


def test_a_variable_of_the_request_does_not_replace_the_meter() -> None:
    with pytest.raises(InvalidRequest, match=BYTES):
        ChatTemplate("{{ 'a' * 3000000000 }}").render([{"role": "user", "content": "x"}], **{"octavo meter": None})


def test_the_text_of_an_error_has_a_limit() -> None:
    with pytest.raises(InvalidRequest, match="rejected these messages: aaa") as caught:
        ChatTemplate(WIDE + "{{ raise_exception(x) }}").render([{"role": "user", "content": "x"}])
    assert len(str(caught.value)) < 2000


def test_a_tag_is_taken_out_of_a_long_text() -> None:
    """The result is no larger than the text, and so is what it costs."""
    template = ChatTemplate("{{ messages[0].content.replace('<|endoftext|>', '')|replace('</think>', '') }}")
    text = "a" * (4 << 20)
    assert template.render([{"role": "user", "content": f"{text}<|endoftext|></think>"}]) == text
