"""`octavo completion SHELL`: a completion script that shtab generates from the parser of the command itself."""

import argparse
from collections.abc import Mapping

SHELLS = ("bash", "zsh", "tcsh")
FILES, FOLDERS = ("FILE", "MANIFEST"), ("DIR",)


def add_completion_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="Shell for which the script is printed.")


def completion(args: argparse.Namespace) -> int:
    from octavo_server.cli.main import build_parser

    print(script(build_parser(), args.shell))
    return 0


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    import shtab

    _complete_files(parser, dict.fromkeys(FILES, shtab.FILE) | dict.fromkeys(FOLDERS, shtab.DIRECTORY))
    return shtab.complete(parser, shell)


def _complete_files(parser: argparse.ArgumentParser, kinds: Mapping[str, object]) -> None:
    """Complete file or folder names for each argument whose metavar is a key of `kinds`."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_files(command, kinds)
        elif isinstance(action.metavar, str) and action.metavar in kinds:
            action.complete = kinds[action.metavar]  # type: ignore[attr-defined]
