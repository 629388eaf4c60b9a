"""Spellings of flags that vLLM's parser accepts: `--max_model_len 4096`, and `--kv-events-config.topic a` for an entry
of a JSON object, with `+` after the name for an entry of a list.
"""

import json
from collections.abc import Container, Iterator, Sequence
from typing import Any

_CONSTANTS = {"true": True, "false": False, "null": None, "none": None}


def normalise_flags(args: Sequence[str], known: Container[str]) -> list[str]:
    """Arguments with dashes and whole JSON objects. Flags that are not in `known` stay as they are.

    Raises ValueError if an object is given as a whole and by its entries.
    """
    plain, rest = _split_at_separator(args)
    flags: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    position = iter(range(len(plain)))
    for at in position:
        name, equals, value = _dashed(plain[at], known)
        flag, dot, path = name.partition(".")
        if not dot or flag not in known or name in known:
            flags.append(name + equals + value)
            continue
        if not equals and at + 1 < len(plain) and not _is_flag(plain[at + 1]):
            value = plain[next(position)]
        _insert(objects.setdefault(flag, {}), path, value or "true")
    for flag, entries in objects.items():
        if any(arg.partition("=")[0] == flag for arg in flags):
            raise ValueError(f"{flag} is given both as a whole and by entries: put all entries into its JSON")
        flags.append(f"{flag}={json.dumps(entries)}")
    return flags + rest


def _split_at_separator(args: Sequence[str]) -> tuple[list[str], list[str]]:
    at = args.index("--") if "--" in args else len(args)
    return list(args[:at]), list(args[at:])


def _dashed(arg: str, known: Container[str]) -> tuple[str, str, str]:
    """Name, "=" and value of an argument; an unknown flag and a positional argument is all name."""
    name, equals, value = arg.partition("=")
    flag, dot, path = name.partition(".")
    spelled = flag.replace("_", "-")
    if not flag.startswith("-") or spelled not in known:
        return arg, "", ""
    return spelled + dot + path, equals, value


def _is_flag(arg: str) -> bool:
    return arg.startswith("-") and not arg.lstrip("-").replace(".", "", 1).isdecimal()


def _insert(entries: dict[str, Any], path: str, text: str) -> None:
    *parents, last = path.split(".")
    for parent in parents:
        entries = entries.setdefault(parent, {})
    if last.endswith("+"):
        entries.setdefault(last[:-1], []).extend(_values(text))
    else:
        entries[last] = _value(text)


def _values(text: str) -> Iterator[Any]:
    return map(_value, text.split(","))


def _value(text: str) -> Any:
    if text.lower() in _CONSTANTS:
        return _CONSTANTS[text.lower()]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
