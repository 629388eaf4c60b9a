"""Flags of `octavo explain decisions` (decisions of a router), and of the commands that read a cluster."""

import argparse
from dataclasses import dataclass
from typing import Literal

from octavo_engine.settings.declare import Declared, setting

from octavo_server.cli.chat_flags import DEFAULT_URL, KEY_VARIABLES
from octavo_server.cli.declared_flags import add_flags
from octavo_server.config import ADMIN_SECRET_VARIABLE, SECRET_VARIABLE

MAX_DECISIONS = 1000  # in one response of the router


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionFlags(Declared):
    url: str = setting(DEFAULT_URL, "URL of the router, with the port of its --admin-port if it has one.", metavar=None)
    api_key: str | None = setting(
        None,
        f"API key named `admin`; not needed if ${ADMIN_SECRET_VARIABLE} or, for a router without one, "
        f"${SECRET_VARIABLE} is set.",
        env=KEY_VARIABLES,
        metavar="KEY",
    )
    n: int = setting(10, "Number of latest decisions to show.", ge=1, le=MAX_DECISIONS)
    candidates: int = setting(4, "Number of candidate replicas to show per decision.", ge=1)
    json: bool = setting(False, "Print each decision with all fields as a line of JSON, oldest first.")
    follow: bool = setting(False, "Keep printing decisions, each when its request has ended.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFlags(Declared):
    namespace: str | None = setting(
        None, "Namespace of the InferenceService.", flags=("-n",), metavar="NS", unset="the context's"
    )
    kubeconfig: str | None = setting(
        None,
        "Kubeconfig file.",
        metavar="FILE",
        unset="$KUBECONFIG, else ~/.kube/config, else the service account of this pod",
    )
    context: str | None = setting(None, "Context in the kubeconfig.", metavar="NAME", unset="the current one")


@dataclass(frozen=True, slots=True, kw_only=True)
class InfsvcFlags(ClusterFlags):
    all_namespaces: bool = setting(False, "Show the InferenceServices of all namespaces.", flags=("-A",))
    output: Literal["text", "json"] = setting("text", "Format of the output.", flags=("-o",))


def add_decision_flags(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, DecisionFlags, negatable=False)


def add_infsvc_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", nargs="?", help="Name of the InferenceService. Default: all.")
    add_flags(parser, InfsvcFlags, negatable=False)
