"""Flags for API keys and router secrets, shared by `octavo serve` and `octavo route`.

An empty key or secret is an error: an environment variable that a script forgot to set would give everyone access.
"""

import os
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from octavo_engine.wire.errors import StartupError

KEY_VARIABLES = ("OCTAVO_API_KEY", "VLLM_API_KEY")
SECRET_VARIABLE = "OCTAVO_ROUTER_SECRET"
ADMIN_SECRET_VARIABLE = "OCTAVO_ADMIN_SECRET"


def add_api_key_flags(group: Any) -> None:
    group.add_argument(
        *("--api-key",),
        nargs="+",
        action="extend",
        metavar="KEY",
        help="API keys of which each request must have one; admin routes need the key named `admin` from "
        "--api-key-file. Default: $OCTAVO_API_KEY or $VLLM_API_KEY, else no key is required.",
    )
    group.add_argument(
        *("--api-key-file",),
        nargs="+",
        action="extend",
        type=Path,
        metavar="FILE",
        help="Named API keys: a file of `name: key` lines, or a folder with one file per key, as Kubernetes mounts a "
        "Secret; reloaded when it changes. Default: none.",
    )


def add_secret_flags(group: Any) -> None:
    group.add_argument(
        *("--router-secret",),
        nargs="+",
        metavar="SECRET",
        help="Secret that a router sends to its replicas, so that they accept its requests and tenants; several "
        f"secrets during a rotation. Default: ${SECRET_VARIABLE}, else replicas trust no router.",
    )
    group.add_argument(
        *("--router-secret-file",),
        type=Path,
        metavar="FILE",
        help="File with a secret per line, or folder with a secret per file, instead of --router-secret; reloaded when "
        "it changes. Replicas accept each secret, a router sends the first. Default: none.",
    )


def add_admin_secret_flag(group: Any) -> None:
    group.add_argument(
        *("--admin-secret",),
        nargs="+",
        metavar="SECRET",
        help="Secret that opens the admin routes of the router instead of --router-secret, which every replica has; "
        f"several secrets during a rotation. Default: ${ADMIN_SECRET_VARIABLE}, else the router secret opens them.",
    )


def admin_secrets_of(args: Namespace) -> tuple[str, ...]:
    """Raises StartupError for an empty value."""
    return tuple(_given("--admin-secret", args.admin_secret, ADMIN_SECRET_VARIABLE))


def keys_of(args: Namespace) -> dict[str, Any]:
    """Arguments of `HttpSettings` that the flags for keys and secrets set. Raises StartupError for an empty value."""
    return {
        "api_keys": tuple(dict.fromkeys(_given("--api-key", args.api_key, *KEY_VARIABLES))),
        "api_key_files": tuple(args.api_key_file or ()),
        "router_secrets": tuple(_given("--router-secret", args.router_secret, SECRET_VARIABLE)),
        "router_secret_file": args.router_secret_file,
    }


def checked(flag: str, given: Iterable[str]) -> list[str]:
    """Return the values of a flag as a list. Raises StartupError, which names the flag, if a value is empty."""
    values = list(given)
    if not all(value.strip() for value in values):
        raise StartupError(f"{flag} is empty, which would give everyone access: give a value, or leave {flag} out.")
    return values


def _given(flag: str, given: Iterable[str] | None, *variables: str) -> list[str]:
    """Return the values of the flag or, without it, of the variables that are set."""
    if given is not None:
        return checked(flag, given)
    return [value for name in variables if name in os.environ for value in checked(f"${name}", [os.environ[name]])]
