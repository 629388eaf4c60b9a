"""`octavo replay FILE`: repeats every scheduling decision of a trace, without a model, and compares the results."""

import argparse
import sys
from pathlib import Path

from octavo_engine.core.replay import replay_file
from octavo_engine.wire.errors import StartupError


def replay(args: argparse.Namespace) -> int:
    """Return the exit code: 0 if every decision is the same as recorded."""
    try:
        report = replay_file(Path(args.file))
    except StartupError as error:
        print(f"octavo: {error}", file=sys.stderr)
        return 1
    print(report)
    return 0 if report.ok else 1
