"""Flags of `octavo serve`, with vLLM's names and defaults; `vllm_flags` adds vLLM's other flags. `octavo up` has flags
of its own and those of `octavo serve`, which apply to each engine.
"""

import argparse
import shlex
from dataclasses import dataclass

from octavo_engine.settings.config import EngineConfig
from octavo_engine.settings.declare import Declared, setting

from octavo_server.cli.config_file import add_config_flag
from octavo_server.cli.declared_flags import add_flags
from octavo_server.cli.vllm_flags import add_vllm_flags
from octavo_server.config import ServerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunFlags(Declared):
    dry_run: bool = setting(
        False,
        "Print how much memory the model needs and how many requests fit, then exit without loading the model.",
        group="dry run",
    )
    json: bool = setting(False, "Print the report of --dry-run as JSON.")


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, DryRunFlags, negatable=False)
    add_server_flags(parser)


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the engine and of its server."""
    add_config_flag(parser)
    parser.add_argument("model_tag", metavar="MODEL", nargs="?", help="Model to serve. Default: that of --model.")
    parser.add_argument(
        *("--hf-token",),
        nargs="?",
        const=True,
        metavar="TOKEN",
        help="Token of the Hugging Face hub; without a value, the one that `hf auth login` stored. Default: $HF_TOKEN, "
        "else the stored one.",
    )
    add_flags(parser, EngineConfig, ServerConfig)
    add_vllm_flags(parser)


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
