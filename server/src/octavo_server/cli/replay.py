"""`octavo replay FILE`: repeats every scheduling decision of a trace, without a model, and compares the results."""

import argparse
from pathlib import Path

from octavo_engine.core.replay import replay_file


def add_replay_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="Trace that `octavo serve --trace FILE` has written.")


def replay(args: argparse.Namespace) -> int:
    """Return the exit code: 0 if every decision is the same as recorded."""
    report = replay_file(Path(args.file))
    print(report)
    return 0 if report.ok else 1
