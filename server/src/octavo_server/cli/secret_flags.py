"""The flags for keys and secrets, which the engine's server and the router have in common. An empty one is refused: a
variable that a script forgot to set would let everybody in.
"""

import os
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from octavo_engine.wire.errors import StartupError

KEY_VARIABLES = ("OCTAVO_API_KEY", "VLLM_API_KEY")
SECRET_VARIABLE = "OCTAVO_ROUTER_SECRET"


def add_api_key_flags(group: Any) -> None:
    group.add_argument(
        *("--api-key",),
        nargs="+",
        action="extend",
        metavar="KEY",
        help="API keys of clients; routes of administrators need one named `admin` of --api-key-file (default: "
        "$OCTAVO_API_KEY or $VLLM_API_KEY, else none is needed)",
    )
    group.add_argument(
        *("--api-key-file",),
        nargs="+",
        action="extend",
        type=Path,
        metavar="FILE",
        help="named keys: a file of `name: key` lines, or a folder with one file a key, as Kubernetes mounts a Secret; "
        "read again when it changes (default: none)",
    )


def add_secret_flags(group: Any) -> None:
    group.add_argument(
        *("--router-secret",),
        nargs="+",
        metavar="SECRET",
        help="secret that a router sends to its replicas, so that they accept the tenant it names; several while one "
        f"replaces another (default: ${SECRET_VARIABLE}, else replicas trust no router)",
    )
    group.add_argument(
        *("--router-secret-file",),
        type=Path,
        metavar="FILE",
        help="the same from a file, one a line, or from a folder of files; it is read again when it "
        "changes; of several a router sends the first (default: none)",
    )


def keys_of(args: Namespace) -> dict[str, Any]:
    """The fields of the settings that the flags of keys and secrets set. Raises StartupError for an empty one."""
    keys = checked("--api-key", args.api_key) if args.api_key is not None else _of_environment(KEY_VARIABLES)
    given = args.router_secret
    secrets = checked("--router-secret", given) if given is not None else _of_environment((SECRET_VARIABLE,))
    return {
        "api_keys": tuple(dict.fromkeys(keys)),
        "api_key_files": tuple(args.api_key_file or ()),
        "router_secrets": tuple(secrets),
        "router_secret_file": args.router_secret_file,
    }


def checked(flag: str, given: Iterable[str]) -> list[str]:
    """Raises StartupError, which names the flag."""
    found = list(given)
    if not all(value.strip() for value in found):
        raise StartupError(f"{flag} is empty, which would let everybody in: give a value, or leave {flag} out.")
    return found


def _of_environment(names: Iterable[str]) -> list[str]:
    return [value for name in names if name in os.environ for value in checked(f"${name}", [os.environ[name]])]
