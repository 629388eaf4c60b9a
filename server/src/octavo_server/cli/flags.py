"""Flags of `octavo serve` for the engine, generated from `EngineConfig`, with vLLM's names and defaults.

`vllm_flags` adds vLLM's other flags.
"""

import argparse

from octavo_engine.settings.config import EngineConfig

from octavo_server.cli.declared_flags import add_flags


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model_tag", metavar="MODEL", nargs="?", help=f"Model to serve. Default: {EngineConfig().model}."
    )
    parser.add_argument("--model", help="Model to serve, if the argument MODEL is not given.")
    parser.add_argument(
        *("--hf-token",),
        nargs="?",
        const=True,
        metavar="TOKEN",
        help="Token of the Hugging Face hub; without a value, the one that `hf auth login` stored. Default: $HF_TOKEN, "
        "else the stored one.",
    )
    add_flags(parser, EngineConfig, but=("model",))


def add_dry_run_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("dry run")
    group.add_argument(
        "--dry-run",
        action="store_true",
        help="Print how much memory the model needs and how many requests fit, then exit without loading the model.",
    )
    group.add_argument("--json", action="store_true", help="Print the report of --dry-run as JSON.")
