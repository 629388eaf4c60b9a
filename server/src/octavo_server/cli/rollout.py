"""`octavo rollout`: calls the operator's package, which reads the cluster and pauses rollouts."""

import argparse
import sys

from octavo_engine.settings.arg_types import seconds
from octavo_engine.wire.errors import StartupError

from octavo_server.cli.explain_flags import add_cluster_flags
from octavo_server.cli.plugins import operator_plugin


def add_rollout_flags(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    text = "wait until the rollout is complete, and print its progress; the exit code is 0 if it is"
    status = actions.add_parser("status", help=text, description=f"Do this: {text}.", allow_abbrev=False)
    text = "Print the present state and exit; the exit code is 0 unless the rollout was stopped."
    status.add_argument("--no-watch", action="store_false", dest="watch", help=text)
    text = "Longest wait in seconds. 0: no limit. Default: 0."
    status.add_argument("--timeout", type=seconds, default=0.0, metavar="S", help=text)
    pause = actions.add_parser(
        "pause", help="start no further replica of the new revision (spec.rollout.paused)", allow_abbrev=False
    )
    resume = actions.add_parser("resume", help="let a paused rollout continue", allow_abbrev=False)
    for each in (status, pause, resume):
        each.add_argument("name", metavar="NAME", help="Name of the InferenceService.")
        add_cluster_flags(each)


def rollout(args: argparse.Namespace) -> int:
    try:
        run = operator_plugin("rollout", command="octavo rollout")
    except StartupError as error:
        print(f"octavo: {error}", file=sys.stderr)
        return 1
    how = {"watch": args.watch, "timeout_s": args.timeout} if args.action == "status" else {}
    code: int = run(
        args.action, args.name, namespace=args.namespace, kubeconfig=args.kubeconfig, context=args.context, **how
    )
    return code
