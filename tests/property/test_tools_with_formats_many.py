"""Sixty schemas as tools: every tool choice, alone and beside a second tool, with a format and without.

What `jsonschema` accepts is accepted, random answers of the grammar are valid, and streamed answers equal whole ones.
"""

import pytest
from octavo_testing.tool_answers import MODES, check
from octavo_testing.tool_schemas import SCHEMAS

pytestmark = pytest.mark.slow

NAMES = [*SCHEMAS]


def rotated(name, places):
    return NAMES[(NAMES.index(name) + places) % len(NAMES)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_answers_fit_their_schemas(name, mode):
    for names in ([name], [name, rotated(name, 7)]):
        for format_name in (None, rotated(name, 17)):
            check(names, mode=mode, format_name=format_name, parser="hermes", num_random=3)


@pytest.mark.parametrize("parser", ["mistral", "llama3_json"])
@pytest.mark.parametrize("name", NAMES)
def test_other_notations_stand_beside_formats(name, parser):
    for names in ([name], [name, rotated(name, 11)]):
        check(names, mode="auto", format_name=rotated(name, 23), parser=parser, num_random=2)
        check(names, mode="auto", format_name=name, parser=parser, num_random=2)
