"""`octavo rollout`: calls the operator's package, which reads the cluster and pauses rollouts."""

import argparse
from dataclasses import dataclass

from octavo_engine.settings.arg_types import seconds
from octavo_engine.settings.declare import setting

from octavo_server.cli.declared_flags import add_flags
from octavo_server.cli.explain_flags import ClusterFlags
from octavo_server.cli.plugins import operator_plugin


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusFlags(ClusterFlags):
    no_watch: bool = setting(
        False, "Print the present state and exit; the exit code is 0 unless the rollout was stopped."
    )
    timeout: float = setting(0.0, "Longest wait in seconds; 0: no limit.", parse=seconds)


def add_pause_flags(parser: argparse.ArgumentParser, flags: type = ClusterFlags) -> None:
    parser.add_argument("name", metavar="NAME", help="Name of the InferenceService.")
    add_flags(parser, flags, negatable=False)


def add_status_flags(parser: argparse.ArgumentParser) -> None:
    add_pause_flags(parser, StatusFlags)


def rollout(args: argparse.Namespace) -> int:
    run = operator_plugin("rollout", command="octavo rollout")
    how = {"watch": not args.no_watch, "timeout_s": args.timeout} if args.action == "status" else {}
    code: int = run(
        args.action, args.name, namespace=args.namespace, kubeconfig=args.kubeconfig, context=args.context, **how
    )
    return code
