"""The flags of `octavo explain decisions`."""

import argparse

from octavo_server.cli.chat_flags import DEFAULT_URL, KEY_VARIABLES


def add_explain_flags(parser: argparse.ArgumentParser) -> None:
    subjects = parser.add_subparsers(dest="subject", required=True, metavar="SUBJECT")
    text = "why a router's latest requests went where they went, and what was found there"
    decisions = subjects.add_parser("decisions", help=text, description=f"Show {text}.", allow_abbrev=False)
    decisions.set_defaults(run="octavo_server.cli.explain:explain_decisions")
    decisions.add_argument("--url", default=DEFAULT_URL, help=f"the API of a running router (default: {DEFAULT_URL})")
    variables = " or ".join(f"${name}" for name in KEY_VARIABLES)
    decisions.add_argument("--api-key", metavar="KEY", help=f"the operator's (default: {variables})")
    decisions.add_argument("-n", type=int, default=10, metavar="N", help="how many of the latest (default: 10)")
    decisions.add_argument("--candidates", type=int, default=4, metavar="N", help="most of each to show (default: 4)")
    decisions.add_argument("--json", action="store_true", help="everything, a JSON object a line, the oldest first")
    decisions.add_argument("--follow", action="store_true", help="go on with each decision whose request has ended")
