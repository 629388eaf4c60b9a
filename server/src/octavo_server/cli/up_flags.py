"""The flags of `octavo up`: its own, and those of `octavo serve` that make sense for each of several replicas."""

import argparse
import shlex

from octavo_server.cli.config_file import add_config_flag
from octavo_server.cli.flags import add_compatibility_flags, add_engine_flags, add_server_flags


def add_up_flags(parser: argparse.ArgumentParser) -> None:
    add_config_flag(parser)
    add_platform_flags(parser)
    add_engine_flags(parser)
    add_server_flags(parser)
    add_compatibility_flags(parser)


def add_platform_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("platform")
    group.add_argument(
        *("-f", "--file"),
        metavar="MANIFEST",
        help="run the InferenceServices of this file (- for standard input), as Kubernetes would, instead of MODEL",
    )
    group.add_argument("--replicas", type=replica_count, default=2, metavar="N", help="engines to start (default: 2)")
    group.add_argument(
        "--router-args",
        type=shlex.split,
        default=[],
        metavar="TEXT",
        help="more flags for `octavo route`, in one string with a = before it: --router-args='--workers 2' "
        "(default: none)",
    )


def replica_count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 64:
        raise argparse.ArgumentTypeError(f"{text!r}: from 1 to 64")
    return int(text)
