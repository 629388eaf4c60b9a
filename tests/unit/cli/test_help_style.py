"""Every help text of every command is a sentence or noun phrase with a capital and a full stop, and names its default.

The text of -h is argparse's own.
"""

import argparse
import re

import pytest
from octavo_operator import install_check
from octavo_operator.cli import build_parser as operator_parser
from octavo_server.cli.main import build_parser


def texts(parser):
    """Yield the name of each description, command and argument of a parser and of those below it, its text, and
    whether the text must name a default."""
    yield parser.prog, parser.description, False
    required = {a for group in parser._mutually_exclusive_groups if group.required for a in group._group_actions}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for row in action._choices_actions:
                yield f"{parser.prog}: {row.dest}", row.help, False
            for child in action.choices.values():
                yield from texts(child)
        elif not isinstance(action, argparse._HelpAction) and action.help != argparse.SUPPRESS:
            help_ = None if action.help is None else parser._get_formatter()._expand_help(action)
            names_default = not action.required and action not in required and action.dest != argparse.SUPPRESS
            yield f"{parser.prog} {'/'.join(action.option_strings) or action.dest}", help_, names_default


TEXTS = [
    pytest.param(text, names_default, id=name)
    for make in (build_parser, operator_parser, install_check._parser)
    for name, text, names_default in texts(make())
]


@pytest.mark.parametrize(("text", "names_default"), TEXTS)
def test_a_help_text_has_the_style_of_all(text, names_default):
    assert text
    assert re.match(r"[A-Z\"`$]", text)
    assert text.endswith(".")
    assert not text.endswith("..")
    assert len(re.findall(r"\bdefault: ", text, re.IGNORECASE)) == names_default
    assert text.count("Default: ") == names_default
    assert not re.search(r"Default: \S*None|\(default", text)


def test_the_walk_meets_every_command():
    named = {param.id.split(" -")[0] for param in TEXTS}
    for command in (
        *("octavo serve", "octavo up", "octavo route", "octavo chat", "octavo complete", "octavo bench serve"),
        *(
            "octavo explain decisions",
            "octavo explain infsvc",
            "octavo rollout status",
            "octavo fetch",
            "octavo replay",
        ),
        *("octavo completion", "octavo-operator", "octavo_operator.install_check"),
    ):
        assert command in named
    assert len(TEXTS) > 400
