"""The flags of `octavo explain`: what a router decided, and what is in the way of an InferenceService."""

import argparse
from typing import Any

from octavo_server.cli.arg_types import positive_count
from octavo_server.cli.chat_flags import DEFAULT_URL, KEY_VARIABLES
from octavo_server.cli.secret_flags import SECRET_VARIABLE

MOST = 1000  # decisions that a router tells at once


def add_explain_flags(parser: argparse.ArgumentParser) -> None:
    subjects = parser.add_subparsers(dest="subject", required=True, metavar="SUBJECT")
    _add_decisions(subjects)
    _add_infsvc(subjects)


def _add_decisions(subjects: Any) -> None:
    text = "why a router's latest requests went where they went, and what was found there"
    decisions = subjects.add_parser("decisions", help=text, description=f"Show {text}.", allow_abbrev=False)
    decisions.set_defaults(run="octavo_server.cli.explain:explain_decisions")
    text = f"address of a router, with its --admin-port where it has one (default: {DEFAULT_URL})"
    decisions.add_argument("--url", default=DEFAULT_URL, help=text)
    variables = " or ".join(f"${name}" for name in KEY_VARIABLES)
    text = f"the admin's key (default: {variables}); not needed where ${SECRET_VARIABLE} is the router's secret"
    decisions.add_argument("--api-key", metavar="KEY", help=text)
    decisions.add_argument("-n", type=_decisions, default=10, metavar="N", help="how many of the latest (default: 10)")
    decisions.add_argument(
        "--candidates", type=positive_count, default=4, metavar="N", help="most of each to show (default: 4)"
    )
    decisions.add_argument("--json", action="store_true", help="everything, a JSON object a line, the oldest first")
    decisions.add_argument("--follow", action="store_true", help="go on with each decision whose request has ended")


def _decisions(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MOST:
        raise argparse.ArgumentTypeError(f"{text!r}: from 1 to {MOST}")
    return int(text)


def _add_infsvc(subjects: Any) -> None:
    text = "what is in the way of an InferenceService, and what to do"
    description = (
        "Say what is in the way of an InferenceService: its conditions to the first that isn't true, what that means, "
        "what to do, its pods with their last words, events. Without NAME a table of all. Exit code 0 where Ready."
    )
    infsvc = subjects.add_parser("infsvc", help=text, description=description, allow_abbrev=False)
    infsvc.set_defaults(run="octavo_server.cli.explain_infsvc:explain_infsvc")
    infsvc.add_argument("name", metavar="NAME", nargs="?", help="which one (default: all, as a table)")
    infsvc.add_argument("-n", "--namespace", metavar="NS", help="where it is (default: the context's)")
    infsvc.add_argument("-A", "--all-namespaces", action="store_true", help="those of all namespaces")
    infsvc.add_argument("-o", "--output", choices=["text", "json"], default="text", help="(default: text)")
    infsvc.add_argument("--kubeconfig", metavar="FILE", help="(default: $KUBECONFIG, ~/.kube/config, a pod's account)")
    infsvc.add_argument("--context", metavar="NAME", help="of the kubeconfig (default: its current one)")
