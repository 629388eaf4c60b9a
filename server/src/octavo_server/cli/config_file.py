"""`--config FILE`: flags from a YAML file in vLLM's form, `max-model-len: 4096`, with dashes or underscores.

The flags of the file are appended to the command line, so that the same parser checks every value. A flag of the file
that is also on the command line is left out: the command line takes precedence. The error for an unknown flag, in the
file or on the command line, suggests similar flags.

On the command line, spellings of vLLM's parser are accepted: `--max_model_len 4096`, and `--kv-events-config.topic a`
for an entry of a JSON object, with `+` after the name for an entry of a list.
"""

import argparse
import difflib
import json
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from octavo_engine.wire.errors import StartupError

from octavo_server.cli.termination_message import write_termination_message

CONFIG_FLAG = "--config"
#: Key for a positional argument, with two dashes -> flag with the same meaning.
_POSITIONAL = {"--model-tag": "--model"}
_CONSTANTS = {"true": True, "false": False, "null": None, "none": None}


def add_config_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        CONFIG_FLAG,
        metavar="FILE",
        help="YAML file with flags as keys, such as `max-model-len: 4096`; flags on the command line take precedence. "
        "Default: none.",
    )


class ConfiguredParser(argparse.ArgumentParser):
    """Parser that also reads the file of --config, if the command has that flag.

    The attribute `typed` of the result holds all arguments of the command line, then those of the file as arguments.
    """

    #: True for the command of a container, whose refusals Kubernetes reports.
    leaves_message = False

    def error(self, message: str) -> NoReturn:
        if self.leaves_message:
            write_termination_message(StartupError(message))
        super().error(message)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        try:
            given = normalise_flags(args or (), self._option_string_actions)
        except ValueError as error:
            self.error(str(error))
        if CONFIG_FLAG in self._option_string_actions and (path := _config_path(given)) is not None:
            try:
                given += self._from_file(Path(path), given)
            except ValueError as error:
                self.error(f"{CONFIG_FLAG} {path}: {error}")
        parsed, unknown = super().parse_known_args(given, namespace)
        if unknown:
            flags = [flag for flag in _flags(unknown) if flag.startswith("--")]
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._hint(flags[0]) if flags else ''}")
        parsed.typed = tuple(given)
        return parsed, unknown

    def _from_file(self, path: Path, given: list[str]) -> Iterator[str]:
        taken = {action.dest for action in map(self._action, _flags(given)) if action is not None}
        keys: dict[str, Any] = {}
        for key, value in _read(path).items():
            flag = "--" + str(key).replace("_", "-")
            flag = _POSITIONAL.get(flag, flag)
            action = self._action(flag)
            if action is None or flag == CONFIG_FLAG:
                raise ValueError(f"{key!r} is not a flag of this command{self._hint(flag).replace('--', '') or '.'}")
            if (first := keys.setdefault(action.dest, key)) != key:
                raise ValueError(f"{first!r} and {key!r} set the same flag: keep one of them")
            if action.dest not in taken and value is not None:
                yield from _as_typed(action, flag, value)

    def _action(self, flag: str) -> argparse.Action | None:
        return self._option_string_actions.get(flag)

    def _hint(self, flag: str) -> str:
        near = difflib.get_close_matches(flag, self._option_string_actions, n=3)
        return f". Did you mean {' or '.join(near)}?" if near else ""


def _config_path(args: Sequence[str]) -> str | None:
    for position, arg in enumerate(args):
        if arg == CONFIG_FLAG and position + 1 < len(args):
            return args[position + 1]
        if arg.startswith(CONFIG_FLAG + "="):
            return arg.partition("=")[2]
    return None


def _flags(args: Iterable[str]) -> Iterator[str]:
    return (arg.partition("=")[0] for arg in args if arg.startswith("-"))


def _read(path: Path) -> dict[Any, Any]:
    import yaml

    from octavo_server.http.tenants_file import load_yaml

    try:
        content = load_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"is not YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError("must contain `flag: value` lines")
    return content


def _as_typed(action: argparse.Action, flag: str, value: Any) -> list[str]:
    if isinstance(value, bool) and action.nargs in (0, "?"):
        return _switch(action, flag, value)
    if isinstance(value, list) and action.nargs == "+":
        return [flag, *map(_text, value)]
    return [f"{flag}={_text(value)}"]


def _switch(action: argparse.Action, flag: str, value: bool) -> list[str]:
    if value:
        return [flag]
    other = "--" + flag.removeprefix("--no-") if flag.startswith("--no-") else "--no-" + flag.removeprefix("--")
    if other in action.option_strings:
        return [other]
    return [] if action.nargs == 0 else [f"{flag}=false"]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


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
