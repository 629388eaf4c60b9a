"""The `octavo` command: its parser. The code of a command is imported only when that command runs."""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from octavo_engine.wire.errors import StartupError

from octavo_server.cli.config_file import ConfiguredParser
from octavo_server.cli.termination_message import write_termination_message


class CommandSpec(NamedTuple):
    """A command of `octavo`. `text`: its description, whose first sentence is in the list of commands.

    `run`, `add_flags`: "module:function"; `run` gets the parsed arguments and returns the exit code, `add_flags` gets
    the command's parser. `commands`: its subcommands. `runs_in_pods`: pods run it, so an error also becomes the
    termination message.
    """

    text: str
    run: str = ""
    add_flags: str = ""
    usage: str | None = None
    runs_in_pods: bool = False
    commands: "Mapping[str, CommandSpec] | None" = None


COMMANDS: dict[str, CommandSpec] = {
    "serve": CommandSpec(
        "Serve a model behind an OpenAI-compatible API. MODEL is a folder, a .gguf file, a name on the Hugging Face "
        "hub (ORG/NAME), or a URI that begins with s3://, gs://, az://, pvc:// or pkg://.",
        "octavo_server.cli.serve:serve",
        "octavo_server.cli.flags:add_serve_flags",
        usage="octavo serve [MODEL] [options]",
        runs_in_pods=True,
    ),
    "up": CommandSpec(
        "Serve a model with several engines on this machine, behind the router. Ctrl-C stops them all. The options of "
        "`octavo serve` apply to each engine.",
        "octavo_server.cli.up:up",
        "octavo_server.cli.flags:add_up_flags",
        usage="octavo up [MODEL] [--replicas N] [options]",
    ),
    "route": CommandSpec(
        "Route requests to the replica that can answer them first. Replicas are engines (`octavo serve`). Each request "
        "goes to the one that should send its first token soonest, usually the one whose cache holds the start of the "
        "prompt.",
        "octavo_server.cli.route:route",
        "octavo_server.cli.route_flags:add_route_flags",
        runs_in_pods=True,
    ),
    "fetch": CommandSpec(
        "Download the files of a model so that it can be served. Existing files are kept, and an interrupted download "
        "is resumed. The command prints the path that `octavo serve` can serve.",
        "octavo_server.cli.fetch:fetch",
        "octavo_server.cli.fetch:add_fetch_flags",
        runs_in_pods=True,
    ),
    "chat": CommandSpec(
        "Chat with a served model, at the terminal or through a pipe.",
        "octavo_server.cli.chat:chat",
        "octavo_server.cli.chat_flags:add_chat_flags",
    ),
    "complete": CommandSpec(
        "Let a served model continue a text, at the terminal or through a pipe.",
        "octavo_server.cli.complete:complete",
        "octavo_server.cli.chat_flags:add_complete_flags",
    ),
    "bench": CommandSpec(
        "Measure a running server with vLLM's options and figures.",
        commands={
            "serve": CommandSpec(
                "Measure a running server under load: latencies and throughput.",
                "octavo_server.bench.serve:bench_serve",
                "octavo_server.bench.flags:add_bench_flags",
            )
        },
    ),
    "explain": CommandSpec(
        "Show the decisions of a router, or why an InferenceService is not ready.",
        commands={
            "decisions": CommandSpec(
                "Show why the router chose a replica for each of its latest requests, and how many tokens were cached "
                "there.",
                "octavo_server.cli.explain:explain_decisions",
                "octavo_server.cli.explain_flags:add_decision_flags",
            ),
            "infsvc": CommandSpec(
                "Show why an InferenceService is not ready, and what to do. Shown are the conditions up to the first "
                "that is not True, the meaning of that condition, the remedy, the pods with their last log lines, and "
                "the latest events. Without NAME, show a table of all services. The exit code is 0 if all shown "
                "services are Ready.",
                "octavo_server.cli.explain:explain_infsvc",
                "octavo_server.cli.explain_flags:add_infsvc_flags",
            ),
        },
    ),
    "rollout": CommandSpec(
        "Follow, pause or resume the rollout of an InferenceService's new revision, as `kubectl rollout` does for "
        "Deployments.",
        commands={
            "status": CommandSpec(
                "Wait until the rollout is complete, and print its progress. The exit code is 0 if it is.",
                "octavo_server.cli.rollout:rollout",
                "octavo_server.cli.rollout:add_status_flags",
            ),
            "pause": CommandSpec(
                "Start no further replica of the new revision (spec.rollout.paused).",
                "octavo_server.cli.rollout:rollout",
                "octavo_server.cli.rollout:add_pause_flags",
            ),
            "resume": CommandSpec(
                "Let a paused rollout continue.",
                "octavo_server.cli.rollout:rollout",
                "octavo_server.cli.rollout:add_pause_flags",
            ),
        },
    ),
    "replay": CommandSpec(
        "Repeat the scheduling decisions of a recorded trace and compare them, without a model.",
        "octavo_server.cli.replay:replay",
        "octavo_server.cli.replay:add_replay_flags",
    ),
    "completion": CommandSpec(
        "Print a shell script that completes octavo's commands and flags. For bash: eval \"$(octavo completion bash)\" "
        "For zsh: write the output of `octavo completion zsh` to a file `_octavo` in a folder of $fpath.",
        "octavo_server.cli.shell_completion:completion",
        "octavo_server.cli.shell_completion:add_completion_flags",
    ),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = build_parser("".join(argv[:1])).parse_args(argv)
    try:
        code: int = _function(args.run)(args)
    except StartupError as error:
        for line in str(error).splitlines():
            print(f"octavo: {line}", file=sys.stderr)
        if COMMANDS[args.command].runs_in_pods:
            write_termination_message(error)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
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


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """Build the parser. `only`: the one command that gets its flags, as importing all of them takes time."""
    parser = argparse.ArgumentParser(prog="octavo", description="LLM inference engine.", allow_abbrev=False)
    parser.add_argument("-v", "--version", action=ShowVersion, help="Print the version and exit.")
    _add_commands(parser, "command", COMMANDS, only)
    return parser


def _add_commands(
    parser: argparse.ArgumentParser, dest: str, specs: Mapping[str, CommandSpec], only: str | None = None
) -> None:
    commands = parser.add_subparsers(dest=dest, required=True, metavar="COMMAND", parser_class=ConfiguredParser)
    for name, spec in specs.items():
        text = spec.text.partition(". ")[0].removesuffix(".") + "."
        command = commands.add_parser(name, help=text, description=spec.text, usage=spec.usage, allow_abbrev=False)
        command.leaves_message = spec.runs_in_pods
        command.set_defaults(run=spec.run)
        if only not in (None, name):
            continue
        if spec.add_flags:
            _function(spec.add_flags)(command)
        if spec.commands is not None:
            _add_commands(command, "action", spec.commands)


def _function(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function


if __name__ == "__main__":
    sys.exit(main())
