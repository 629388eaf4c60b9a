"""Flags that say where `octavo route` finds its replicas."""

import argparse

from octavo_server.cli.durations import some_seconds


def add_discovery_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("where replicas are")
    group.add_argument(
        *("--replica",),
        nargs="+",
        action="extend",
        default=[],
        metavar="URL",
        help="http://HOST:PORT of each replica; may be given again",
    )
    group.add_argument("--service", metavar="HOST:PORT", help="replicas are at all addresses of this DNS name")
    group.add_argument(
        *("--service-interval",),
        type=some_seconds,
        default=1.0,
        metavar="N",
        help="seconds between look-ups (default: 1)",
    )
    group.add_argument(
        "--kubernetes",
        metavar="[NAMESPACE/]SERVICE[:PORT]",
        help="replicas are the pods of this Service, ready or not; PORT: name or number (default: the first)",
    )
    group.add_argument(
        "--kubernetes-api", metavar="URL", help="for example of `kubectl proxy` (default: the cluster this runs in)"
    )
