"""Flags of `octavo up`: its own, and the flags of `octavo serve`, which apply to each engine."""

import argparse
import shlex

from octavo_server.cli.config_file import add_config_flag
from octavo_server.cli.declared_flags import add_flags
from octavo_server.cli.flags import add_engine_flags
from octavo_server.cli.vllm_flags import add_vllm_flags
from octavo_server.config import ServerConfig


def add_up_flags(parser: argparse.ArgumentParser) -> None:
    add_config_flag(parser)
    add_platform_flags(parser)
    add_engine_flags(parser)
    add_flags(parser, ServerConfig)
    add_vllm_flags(parser)


def add_platform_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("platform")
    group.add_argument(
        *("-f", "--file"),
        metavar="MANIFEST",
        help="File with InferenceServices (-: standard input) to run on this machine, instead of MODEL. Default: none.",
    )
    group.add_argument("--replicas", type=replica_count, default=2, metavar="N", help="Number of engines. Default: 2.")
    group.add_argument(
        "--router-args",
        type=shlex.split,
        default=[],
        metavar="TEXT",
        help="Flags for the router (`octavo route`), as one string after `=`: --router-args='--workers 2'. Default: "
        "none.",
    )


def replica_count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 64:
        raise argparse.ArgumentTypeError(f"{text!r} must be from 1 to 64")
    return int(text)
