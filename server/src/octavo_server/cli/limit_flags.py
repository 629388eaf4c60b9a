"""The flags of `octavo serve` about who may ask, how much, and how the server ends."""

from argparse import BooleanOptionalAction
from pathlib import Path
from typing import Any


def add_key_flags(parser: Any) -> None:
    group = parser.add_argument_group("API keys")
    group.add_argument(
        *("--api-key",),
        nargs="+",
        action="extend",
        metavar="KEY",
        help="keys that clients must send (default: $OCTAVO_API_KEY or $VLLM_API_KEY, else none is needed)",
    )
    group.add_argument(
        *("--api-key-file",),
        nargs="+",
        action="extend",
        type=Path,
        metavar="PATH",
        help="named keys: a file of `name: key` lines, or a folder with one file a key, as Kubernetes mounts a Secret; "
        "read again when it changes (default: none)",
    )
    group.add_argument(
        "--cache-isolation",
        action=BooleanOptionalAction,
        default=False,
        help="a prefix cache of its own for each key, so that no key can probe another's prompts (default: off)",
    )
