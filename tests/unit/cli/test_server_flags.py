"""Every flag of every command, with its default, values and help, is a contract: `flags.txt` changes only on purpose.

After adding or changing a flag: pytest tests/unit/cli/test_server_flags.py --update-golden, and commit the diff.
"""

import argparse

from octavo_server.cli.main import build_parser


def test_flags_are_frozen(golden):
    golden("flags.txt", "\n".join(sorted(described(build_parser(), ()))) + "\n")


def described(parser, command):
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from described(child, (*command, name))
        elif not isinstance(action, argparse._HelpAction):
            names = ", ".join(action.option_strings) or action.dest
            choices = "" if action.choices is None else f" of {'|'.join(map(str, action.choices))}"
            values = "".join(
                f", {key} {value!r}" for key in ("metavar", "nargs") if (value := getattr(action, key)) is not None
            )
            text = "(hidden)" if action.help == argparse.SUPPRESS else action.help
            yield " ".join((*command, names, f"= {action.default!r}")) + f"{choices}{values}\n    {text}"


#: Flags that select an action of one command line; a --no- form would have no use.
ORDERS = {"--dry-run", "--json"}


def test_every_switch_of_serve_has_its_no_form():
    serve = build_parser()._subparsers._group_actions[0].choices["serve"]
    switches = [a for a in serve._actions if a.nargs == 0 and not isinstance(a, argparse._HelpAction)]
    flags = {flag for action in switches for flag in action.option_strings}
    plain = {flag for flag in flags if not flag.startswith("--no-")}
    assert {flag for flag in plain if f"--no-{flag.removeprefix('--')}" not in flags} == ORDERS
