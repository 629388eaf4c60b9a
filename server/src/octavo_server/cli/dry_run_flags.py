"""The flags of a dry run, apart from it: the parser imports no engine."""

import argparse


def add_dry_run_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("dry run")
    group.add_argument(
        "--dry-run", action="store_true", help="say what the model takes and how many requests fit, and load nothing"
    )
    group.add_argument("--json", action="store_true", help="the answer of --dry-run as JSON")
