"""API keys and secrets of `octavo serve` and `octavo route`, from their flags and variables.

An empty key or secret is an error: an environment variable that a script forgot to set would give everyone access.
"""

import os
from argparse import Namespace
from collections.abc import Iterable

from octavo_engine.settings.declare import own_settings
from octavo_engine.wire.errors import StartupError


def secrets_of(record: type, args: Namespace) -> dict[str, tuple[str, ...]]:
    """Return the fields that keys and secrets set. Without its flag, a field has the values of all its variables.

    Raises StartupError for an empty value.
    """
    found = {}
    for declared in own_settings(record):
        if declared.env and declared.is_list:
            given = getattr(args, declared.name)
            values = _of_variables(declared.env) if given is None else checked(declared.flag, given)
            found[declared.name] = tuple(dict.fromkeys(values))
    return found


def checked(flag: str, given: Iterable[str]) -> list[str]:
    """Return the values of a flag as a list. Raises StartupError, which names the flag, if a value is empty."""
    values = list(given)
    if not all(value.strip() for value in values):
        raise StartupError(f"{flag} is empty, which would give everyone access: give a value, or leave {flag} out.")
    return values


def _of_variables(names: Iterable[str]) -> list[str]:
    return [value for name in names if name in os.environ for value in checked(f"${name}", [os.environ[name]])]
