"""Flags of `octavo explain decisions` (decisions of a router) and `octavo explain infsvc` (state of a service)."""

import argparse
from typing import Any

from octavo_server.cli.arg_types import positive_count
from octavo_server.cli.chat_flags import DEFAULT_URL, KEY_VARIABLES
from octavo_server.cli.secret_flags import SECRET_VARIABLE

MAX_DECISIONS = 1000  # of one response of the router


def add_explain_flags(parser: argparse.ArgumentParser) -> None:
    subjects = parser.add_subparsers(dest="subject", required=True, metavar="SUBJECT")
    _add_decisions(subjects)
    _add_infsvc(subjects)


def _add_decisions(subjects: Any) -> None:
    text = "why the router chose a replica for each of its latest requests, and how many tokens were cached there"
    decisions = subjects.add_parser("decisions", help=text, description=f"Show {text}.", allow_abbrev=False)
    decisions.set_defaults(run="octavo_server.cli.explain:explain_decisions")
    text = f"URL of the router, with the port of --admin-port if it has one. Default: {DEFAULT_URL}."
    decisions.add_argument("--url", default=DEFAULT_URL, help=text)
    variables = " or ".join(f"${name}" for name in KEY_VARIABLES)
    text = f"Key named `admin`; not needed if ${SECRET_VARIABLE} is the router's secret. Default: {variables}."
    decisions.add_argument("--api-key", metavar="KEY", help=text)
    decisions.add_argument(
        "-n", type=_decisions, default=10, metavar="N", help="Number of latest decisions. Default: 10."
    )
    decisions.add_argument(
        "--candidates",
        type=positive_count,
        default=4,
        metavar="N",
        help="Most candidate replicas to show per decision. Default: 4.",
    )
    decisions.add_argument("--json", action="store_true", help="All fields, as one JSON object per line, oldest first.")
    decisions.add_argument(
        "--follow", action="store_true", help="Continuous output of each decision whose request has ended."
    )


def _decisions(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_DECISIONS:
        raise argparse.ArgumentTypeError(f"{text!r} must be from 1 to {MAX_DECISIONS}")
    return int(text)


def _add_infsvc(subjects: Any) -> None:
    text = "why an InferenceService is not ready, and what to do"
    description = (
        "Show why an InferenceService is not ready: its conditions up to the first that is not true, their meaning, "
        "what to do, its pods with their last log lines, and events. Without NAME, a table of all services. Exit "
        "code 0 if the service is Ready."
    )
    infsvc = subjects.add_parser("infsvc", help=text, description=description, allow_abbrev=False)
    infsvc.set_defaults(run="octavo_server.cli.explain_infsvc:explain_infsvc")
    infsvc.add_argument("name", metavar="NAME", nargs="?", help="Name of the InferenceService. Default: list all.")
    infsvc.add_argument(
        "-n", "--namespace", metavar="NS", help="Namespace of the InferenceService. Default: that of the context."
    )
    infsvc.add_argument(
        "-A", "--all-namespaces", action="store_true", help="List of the InferenceServices of all namespaces."
    )
    infsvc.add_argument(
        "-o", "--output", choices=["text", "json"], default="text", help="Format of the output. Default: text."
    )
    infsvc.add_argument(
        "--kubeconfig",
        metavar="FILE",
        help="Kubeconfig file. Default: $KUBECONFIG, ~/.kube/config, or the pod's service account.",
    )
    infsvc.add_argument("--context", metavar="NAME", help="Context of the kubeconfig. Default: its current context.")
