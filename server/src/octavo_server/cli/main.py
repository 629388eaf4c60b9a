"""The `octavo` command. Only the parser is built here: what a command needs is imported when that command runs."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NamedTuple

from octavo_server.bench.flags import add_bench_flags
from octavo_server.cli.chat_flags import add_chat_flags, add_complete_flags
from octavo_server.cli.config_file import ConfiguredParser, add_config_flag
from octavo_server.cli.explain_flags import add_explain_flags
from octavo_server.cli.fetch import add_fetch_flags
from octavo_server.cli.flags import add_compatibility_flags, add_dry_run_flags, add_engine_flags, add_server_flags
from octavo_server.cli.route_flags import add_route_flags
from octavo_server.cli.shell_completion import add_completion_flags
from octavo_server.cli.up_flags import add_up_flags


class CommandSpec(NamedTuple):
    """`run` is "module:function", called with the parsed arguments; it returns the exit code."""

    help: str
    run: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    usage: str | None = None
    description: str | None = None


def _add_serve_flags(parser: argparse.ArgumentParser) -> None:
    add_config_flag(parser)
    add_engine_flags(parser)
    add_dry_run_flags(parser)
    add_server_flags(parser)
    add_compatibility_flags(parser)


def _add_route_flags(parser: argparse.ArgumentParser) -> None:
    add_config_flag(parser)
    add_route_flags(parser)


def _add_replay_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="what `octavo serve --trace FILE` wrote")


COMMANDS: dict[str, CommandSpec] = {
    "serve": CommandSpec(
        help="serve a model behind an OpenAI-compatible API",
        run="octavo_server.cli.serve:serve",
        add_flags=_add_serve_flags,
        usage="octavo serve [MODEL] [options]",
        description="Serve a model behind an OpenAI-compatible API: a folder, a .gguf file, a hub id, s3://, "
        "pvc:// or pkg://NAME.",
    ),
    "up": CommandSpec(
        help="serve a model by several engines on this machine, behind the router",
        run="octavo_server.cli.up:up",
        add_flags=add_up_flags,
        usage="octavo up [MODEL] [--replicas N] [options]",
        description="Start several engines and the router before them; Ctrl-C stops all. Options of `octavo serve` "
        "are for each engine.",
    ),
    "route": CommandSpec(
        help="send requests to the replica that has most of their prompt",
        run="octavo_server.cli.route:route",
        add_flags=_add_route_flags,
        description="A router before several `octavo serve`: each request goes to the replica that will begin to "
        "answer it first, which is mostly the one that has its prompt's beginning in its cache.",
    ),
    "fetch": CommandSpec(
        help="bring a model's files onto this machine",
        run="octavo_server.cli.fetch:fetch",
        add_flags=add_fetch_flags,
        description="Bring a model's files onto this machine, ready to be served. What is there already isn't fetched "
        "again; what an interrupted fetch left is gone on with. Prints the path to serve.",
    ),
    "chat": CommandSpec(
        help="talk with a served model",
        run="octavo_server.cli.chat:chat",
        add_flags=add_chat_flags,
        description="Talk with a served model, at the terminal or through a pipe.",
    ),
    "complete": CommandSpec(
        help="let a served model go on with a text",
        run="octavo_server.cli.complete:complete",
        add_flags=add_complete_flags,
        description="Let a served model go on with a text, at the terminal or through a pipe.",
    ),
    "bench": CommandSpec(
        help="measure a running server or the engine: latencies, throughput, a plot",
        run="",  # each kind of benchmark says its own
        add_flags=add_bench_flags,
        description="Measure a running server or the engine, with vLLM's options and figures.",
    ),
    "explain": CommandSpec(
        help="why a router decided as it did; what is in the way of an InferenceService",
        run="",  # each subject says its own
        add_flags=add_explain_flags,
        description="Show what a running router decided, and why; or what is in the way of an InferenceService.",
    ),
    "replay": CommandSpec(
        help="repeat the decisions of a recorded trace, without a model",
        run="octavo_server.cli.replay:replay",
        add_flags=_add_replay_flags,
    ),
    "completion": CommandSpec(
        help="print a script that makes the shell complete octavo's commands and flags",
        run="octavo_server.cli.shell_completion:completion",
        add_flags=add_completion_flags,
        description="For bash: eval \"$(octavo completion bash)\"  For zsh: octavo completion zsh > a file `_octavo` "
        "in a folder of $fpath.",
    ),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    module, _, function = args.run.partition(":")
    try:
        code: int = getattr(import_module(module), function)(args)
    except BrokenPipeError:  # whoever read our output has enough of it: what is still buffered goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


class ShowVersion(argparse.Action):
    """Looked up when asked for: reading package metadata takes longer than all the parsing."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"octavo {version('octavo-server')}")
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="octavo", description="LLM inference engine.", allow_abbrev=False)
    parser.add_argument("-v", "--version", action=ShowVersion, help="show the version and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=ConfiguredParser)
    for name, spec in COMMANDS.items():
        command = commands.add_parser(
            name, help=spec.help, description=spec.description, usage=spec.usage, allow_abbrev=False
        )
        spec.add_flags(command)
        if spec.run:
            command.set_defaults(run=spec.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
