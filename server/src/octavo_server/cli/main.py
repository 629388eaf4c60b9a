"""The `octavo` command: its parser. The code of a command is imported only when that command runs."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NamedTuple

from octavo_server.bench.flags import add_bench_flags
from octavo_server.cli.chat_flags import add_chat_flags, add_complete_flags
from octavo_server.cli.config_file import ConfiguredParser, add_config_flag
from octavo_server.cli.declared_flags import add_flags
from octavo_server.cli.explain_flags import add_explain_flags
from octavo_server.cli.fetch import add_fetch_flags
from octavo_server.cli.flags import add_dry_run_flags, add_engine_flags
from octavo_server.cli.rollout import add_rollout_flags
from octavo_server.cli.route_flags import add_route_flags
from octavo_server.cli.shell_completion import add_completion_flags
from octavo_server.cli.up_flags import add_up_flags
from octavo_server.cli.vllm_flags import add_vllm_flags
from octavo_server.config import ServerConfig


class CommandSpec(NamedTuple):
    """A command of `octavo`. `run`: "module:function", which gets the parsed arguments and returns the exit code."""

    help: str
    run: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    usage: str | None = None
    description: str | None = None


def _add_serve_flags(parser: argparse.ArgumentParser) -> None:
    add_config_flag(parser)
    add_engine_flags(parser)
    add_dry_run_flags(parser)
    add_flags(parser, ServerConfig)
    add_vllm_flags(parser)


def _add_route_flags(parser: argparse.ArgumentParser) -> None:
    add_config_flag(parser)
    add_route_flags(parser)


def _add_replay_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="Trace that `octavo serve --trace FILE` has written.")


COMMANDS: dict[str, CommandSpec] = {
    "serve": CommandSpec(
        help="serve a model behind an OpenAI-compatible API",
        run="octavo_server.cli.serve:serve",
        add_flags=_add_serve_flags,
        usage="octavo serve [MODEL] [options]",
        description="Serve a model behind an OpenAI-compatible API. MODEL is a folder, a .gguf file, a name on the "
        "Hugging Face hub (ORG/NAME), or a URI that begins with s3://, gs://, az://, pvc:// or pkg://.",
    ),
    "up": CommandSpec(
        help="serve a model by several engines on this machine, behind the router",
        run="octavo_server.cli.up:up",
        add_flags=add_up_flags,
        usage="octavo up [MODEL] [--replicas N] [options]",
        description="Start several engines and a router in front of them; Ctrl-C stops them all. The options of "
        "`octavo serve` apply to each engine.",
    ),
    "route": CommandSpec(
        help="route requests to the replica that can answer them first",
        run="octavo_server.cli.route:route",
        add_flags=_add_route_flags,
        description="Run a router in front of several replicas (`octavo serve`). Each request goes to the replica that "
        "should send its first token soonest, mostly the one whose cache holds the start of the prompt.",
    ),
    "fetch": CommandSpec(
        help="download the files of a model",
        run="octavo_server.cli.fetch:fetch",
        add_flags=add_fetch_flags,
        description="Download the files of a model so that it can be served. Existing files are kept, and an "
        "interrupted download is resumed. The command prints the path that `octavo serve` can serve.",
    ),
    "chat": CommandSpec(
        help="chat with a served model",
        run="octavo_server.cli.chat:chat",
        add_flags=add_chat_flags,
        description="Chat with a served model, at the terminal or through a pipe.",
    ),
    "complete": CommandSpec(
        help="let a served model continue a text",
        run="octavo_server.cli.complete:complete",
        add_flags=add_complete_flags,
        description="Let a served model continue a text, at the terminal or through a pipe.",
    ),
    "bench": CommandSpec(
        help="measure a running server under load: latencies and throughput",
        run="",  # each kind of benchmark sets its own
        add_flags=add_bench_flags,
        description="Measure a running server with vLLM's options and figures.",
    ),
    "explain": CommandSpec(
        help="show the decisions of a router, or why an InferenceService is not ready",
        run="",  # each subject sets its own
        add_flags=add_explain_flags,
        description="Show the latest decisions of a router and their reasons, or why an InferenceService isn't ready.",
    ),
    "rollout": CommandSpec(
        help="follow, pause or resume the rollout of an InferenceService",
        run="octavo_server.cli.rollout:rollout",
        add_flags=add_rollout_flags,
        description="Follow, pause or resume the rollout of an InferenceService's new revision, as `kubectl rollout` "
        "does for Deployments.",
    ),
    "replay": CommandSpec(
        help="repeat the scheduling decisions of a recorded trace and compare them, without a model",
        run="octavo_server.cli.replay:replay",
        add_flags=_add_replay_flags,
    ),
    "completion": CommandSpec(
        help="print a shell script that completes octavo's commands and flags",
        run="octavo_server.cli.shell_completion:completion",
        add_flags=add_completion_flags,
        description="For bash: eval \"$(octavo completion bash)\"  For zsh: write the output of `octavo completion "
        "zsh` to a file `_octavo` in a folder of $fpath.",
    ),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    module, _, function = args.run.partition(":")
    try:
        code: int = getattr(import_module(module), function)(args)
    except BrokenPipeError:  # the process that reads our output has closed it: discard the buffered output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


class ShowVersion(argparse.Action):
    """Prints the version, which is read only here: reading package metadata takes longer than parsing all arguments."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"octavo {version('octavo-server')}")
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="octavo", description="LLM inference engine.", allow_abbrev=False)
    parser.add_argument("-v", "--version", action=ShowVersion, help="Print the version and exit.")
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
