"""Flags of `octavo up`: its own, and the flags of `octavo serve`, which apply to each engine."""

import argparse
import shlex
from dataclasses import dataclass

from octavo_engine.settings.declare import Declared, setting

from octavo_server.cli.declared_flags import add_flags
from octavo_server.cli.flags import add_server_flags


@dataclass(frozen=True, slots=True, kw_only=True)
class UpFlags(Declared):
    file: str | None = setting(
        None,
        "File with InferenceServices (-: standard input) to run on this machine, instead of MODEL.",
        group="platform",
        flags=("-f",),
        metavar="MANIFEST",
    )
    replicas: int = setting(2, "Number of engines.", ge=1, le=64)
    router_args: tuple[str, ...] = setting(
        (),
        "Flags for the router (`octavo route`), as one string after `=`: --router-args='--workers 2'.",
        parse=shlex.split,
    )


def add_up_flags(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, UpFlags)
    add_server_flags(parser)
