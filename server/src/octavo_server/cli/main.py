"""The `octavo` command. Only the parser is built here: what a command needs is imported when that command runs."""

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version

from octavo_server.cli.flags import add_compatibility_flags, add_engine_flags, add_server_flags


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    if args.command == "serve":
        from octavo_server.cli.serve import serve

        return serve(args)
    from octavo_server.cli.replay import replay

    return replay(args)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="octavo", description="LLM inference engine.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"octavo {version('octavo-server')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="serve a model behind an OpenAI-compatible API",
        description=_SERVE,
        usage="octavo serve [MODEL] [options]",
        allow_abbrev=False,
    )
    add_engine_flags(serve)
    add_server_flags(serve)
    add_compatibility_flags(serve)
    replay = commands.add_parser(
        "replay", help="repeat the decisions of a recorded trace, without a model", allow_abbrev=False
    )
    replay.add_argument("file", metavar="FILE", help="what `octavo serve --trace FILE` wrote")
    return parser


_SERVE = "Serve a model behind an OpenAI-compatible API: a folder, a .gguf file, a hub id, or pkg://NAME."

if __name__ == "__main__":
    sys.exit(main())
