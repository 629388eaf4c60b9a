"""Flags of `octavo explain decisions` (decisions of a router) and `octavo explain infsvc` (state of a service)."""

import argparse
from typing import Any

from octavo_engine.settings.arg_types import positive_count

from octavo_server.cli.chat_flags import DEFAULT_URL, KEY_VARIABLES
from octavo_server.config import ADMIN_SECRET_VARIABLE, SECRET_VARIABLE

MAX_DECISIONS = 1000  # in one response of the router


def add_explain_flags(parser: argparse.ArgumentParser) -> None:
    subjects = parser.add_subparsers(dest="subject", required=True, metavar="SUBJECT")
    _add_decisions(subjects)
    _add_infsvc(subjects)


def _add_decisions(subjects: Any) -> None:
    text = "why the router chose a replica for each of its latest requests, and how many tokens were cached there"
    decisions = subjects.add_parser("decisions", help=text, description=f"Show {text}.", allow_abbrev=False)
    decisions.set_defaults(run="octavo_server.cli.explain:explain_decisions")
    text = f"URL of the router, with the port of its --admin-port if it has one. Default: {DEFAULT_URL}."
    decisions.add_argument("--url", default=DEFAULT_URL, help=text)
    variables = " or ".join(f"${name}" for name in KEY_VARIABLES)
    text = (
        f"API key named `admin`; not needed if ${ADMIN_SECRET_VARIABLE} or, for a router without one, "
        f"${SECRET_VARIABLE} is set. Default: {variables}."
    )
    decisions.add_argument("--api-key", metavar="KEY", help=text)
    decisions.add_argument(
        "-n", type=_decisions, default=10, metavar="N", help="Number of latest decisions to show. Default: 10."
    )
    decisions.add_argument(
        "--candidates",
        type=positive_count,
        default=4,
        metavar="N",
        help="Number of candidate replicas to show per decision. Default: 4.",
    )
    text = "Print each decision with all fields as a line of JSON, oldest first."
    decisions.add_argument("--json", action="store_true", help=text)
    decisions.add_argument(
        "--follow", action="store_true", help="Keep printing decisions, each when its request has ended."
    )


def _decisions(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_DECISIONS:
        raise argparse.ArgumentTypeError(f"{text!r} must be from 1 to {MAX_DECISIONS}")
    return int(text)


def _add_infsvc(subjects: Any) -> None:
    text = "why an InferenceService is not ready, and what to do"
    description = (
        "Show why an InferenceService is not ready: its conditions up to the first that is not True, the meaning of "
        "that condition, the remedy, the pods with their last log lines, and the latest events. Without NAME, show a "
        "table of all services. The exit code is 0 if all shown services are Ready."
    )
    infsvc = subjects.add_parser("infsvc", help=text, description=description, allow_abbrev=False)
    infsvc.set_defaults(run="octavo_server.cli.explain_infsvc:explain_infsvc")
    infsvc.add_argument("name", metavar="NAME", nargs="?", help="Name of the InferenceService. Default: all.")
    infsvc.add_argument(
        "-A", "--all-namespaces", action="store_true", help="Show the InferenceServices of all namespaces."
    )
    infsvc.add_argument(
        "-o", "--output", choices=["text", "json"], default="text", help="Format of the output. Default: text."
    )
    add_cluster_flags(infsvc)


def add_cluster_flags(parser: Any) -> None:
    """Flags of commands that read a cluster."""
    add = parser.add_argument
    add("-n", "--namespace", metavar="NS", help="Namespace of the InferenceService. Default: the context's.")
    text = "Kubeconfig file. Default: $KUBECONFIG, else ~/.kube/config, else the service account of this pod."
    add("--kubeconfig", metavar="FILE", help=text)
    add("--context", metavar="NAME", help="Context in the kubeconfig. Default: the current one.")
