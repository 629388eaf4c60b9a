"""`octavo replay FILE`: every scheduling decision of a trace, taken again and compared. No model is needed."""

import argparse
import sys
from pathlib import Path


def replay(args: argparse.Namespace) -> int:
    from octavo_engine.core.replay import replay_file

    try:
        report = replay_file(Path(args.file))
    except (OSError, ValueError) as error:
        print(f"octavo: cannot replay {args.file}: {error}", file=sys.stderr)
        return 1
    print(report)
    return 0
