"""The flags for the secret that a router shares with its replicas: the same for both."""

import os
from argparse import Namespace
from pathlib import Path
from typing import Any

SECRET_VARIABLE = "OCTAVO_ROUTER_SECRET"


def add_secret_flags(group: Any) -> None:
    group.add_argument(
        *("--router-secret",),
        nargs="+",
        metavar="SECRET",
        help="what a router sends to its replicas, so that they believe it whose a request is; several while one "
        f"replaces another (default: ${SECRET_VARIABLE}, else replicas trust no router)",
    )
    group.add_argument(
        *("--router-secret-file",),
        type=Path,
        metavar="FILE",
        help="the same from a file, one a line, or from a folder of files; it is read again when it "
        "changes; of several a router sends the first (default: none)",
    )


def secrets_of(args: Namespace) -> dict[str, Any]:
    """The fields of the settings that these flags set."""
    from_environment = os.environ.get(SECRET_VARIABLE)
    given = args.router_secret or ([from_environment] if from_environment else [])
    return {"router_secrets": tuple(given), "router_secret_file": args.router_secret_file}
