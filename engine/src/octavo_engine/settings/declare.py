"""Declares settings; each is declared once: `max_n: int = setting(256, "Largest n, the number of sequences.", ge=1)`.

The line above is a field of a frozen dataclass. Its flag (named like the field), key in a YAML file, environment
variable, help, range check and row in the docs are derived from it. After the start, nothing reads declarations.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from math import inf
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import msgspec

from octavo_engine.wire.errors import StartupError

_KEY = "setting"
_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    tuple: "a list of values",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A declaration, made by `setting`. `name`, `annotation`: name and type annotation of the field. `kind`: the
    annotation without None.

    `text`: a noun phrase with unit, to which the help adds the default.
    `unset`: the default in words, if its value does not explain itself.
    `group`: title of its part of the help, up to the next setting with one; a description may follow ": ".
    `flags`: further flags, such as "-q". `repeats`: the flag may be given several times. `nargs`: of a list's flag.
    `ge`, `le`: least and largest value.
    `parse`: makes the value from text; without it, the type of the field decides.
    `aliases`: other words for values, or for the fields of a JSON object.
    `convert`: makes the field's value from a flag's, a file's or a script's; a field's value stays unchanged.
    `metavar`: word for the value in the help; "": the type of the field decides; None: the flag's name.
    `env`: variables that replace a missing flag: the first that is set; for a list, all of them.
    `secret`: the value is hidden. An empty one is refused: a variable that a script forgot to set would give everyone
    access.
    """

    text: str
    default: Any = None
    unset: str = ""
    group: str = ""
    flags: tuple[str, ...] = ()
    repeats: bool = False
    nargs: str = "+"
    ge: float = -inf
    le: float = inf
    parse: Callable[[str], Any] | None = None
    aliases: Mapping[str, Any] = field(default_factory=dict)
    convert: Callable[[Any], Any] | None = None
    metavar: str | None = ""
    env: tuple[str, ...] = ()
    secret: bool = False
    name: str = ""
    annotation: Any = None
    kind: Any = None

    @property
    def flag(self) -> str:
        return ("--" if len(self.name) > 1 else "-") + self.name.replace("_", "-")

    @property
    def is_list(self) -> bool:
        """True if the flag takes several texts, each a value."""
        return get_origin(self.kind) is tuple and self.parse is None

    @property
    def choices(self) -> tuple[Any, ...]:
        """The accepted words, if the type lists them."""
        return (*get_args(self.kind), *self.aliases) if get_origin(self.kind) is Literal and not self.parse else ()

    @property
    def value_type(self) -> Any:
        """The type of a single value, such as an entry of a list."""
        if self.choices:
            return type(self.choices[0])
        return get_args(self.kind)[0] if self.is_list else self.kind

    @property
    def default_text(self) -> str:
        """The default in words."""
        value = self.default
        if isinstance(value, bool):
            shown = "on" if value else "off"
        elif isinstance(value, float):
            shown = f"{value:g}"
        else:
            shown = "none" if value in (None, "", (), {}) else str(value)
        variables = " or ".join(f"${name}" for name in self.env)
        return f"{variables}, else {self.unset or shown}" if variables else self.unset or shown

    @property
    def bounds(self) -> str:
        """The accepted values in words, such as "at least 1"; empty if every value is."""
        if self.choices:
            return f"one of {', '.join(map(str, self.choices))}"
        if self.le == inf:
            return "" if self.ge == -inf else f"at least {self.ge}"
        return f"at most {self.le}" if self.ge == -inf else f"between {self.ge} and {self.le}"

    def allows(self, value: Any) -> bool:
        """Return whether a value, or each value of a list, is within `bounds`. None is always allowed."""
        if isinstance(value, tuple):
            return all(map(self.allows, value))
        if self.choices:
            return value is None or value in self.choices
        return value is None or (self.ge, self.le) == (-inf, inf) or bool(self.ge <= value <= self.le)

    def checked(self, value: Any) -> Any:
        """Convert a value from a flag, a file or a script to the field's type; a `str` field accepts a `Path`.

        Raises StartupError for a value of a wrong type or out of range.
        """
        given = value
        if self.is_json:
            given = self._from_json(value)
        elif self.kind is str and isinstance(value, Path):
            given = str(value)
        elif isinstance(value, str):
            given = self.aliases.get(value, value)
        try:
            made = msgspec.convert(given if self.convert is None else self.convert(given), self.annotation)
        except (TypeError, ValueError, OverflowError):
            word = _WORDS.get(get_origin(self.kind) or self.kind, "")
            rule = ", ".join(filter(None, (word, self.bounds))) or "a JSON object"
            raise StartupError(f"{self.name} must be {rule}, got {value!r}.") from None
        if not self.allows(made):
            raise StartupError(f"{self.name} must be {self.bounds}, got {value!r}.")
        return self._checked_secrets(made) if self.secret else made

    def _checked_secrets(self, given: Any) -> Any:
        texts = given if self.is_list else () if given is None else (given,)
        if not all(text.strip() for text in texts):
            places = " or ".join((self.flag, *(f"${name}" for name in self.env)))
            raise StartupError(f"{places} is empty, which would give everyone access: give a value, or leave it out.")
        return tuple(dict.fromkeys(given)) if self.is_list else given

    @property
    def is_json(self) -> bool:
        """True if the value is a mapping, or a record that is made from one."""
        return get_origin(self.kind) is dict or (isinstance(self.kind, type) and issubclass(self.kind, Declared))

    def _from_json(self, value: Any) -> Any:
        if value is None or isinstance(value, Declared):
            return {} if value is None and get_origin(self.kind) is dict else value
        given = as_mapping(self.name, value)
        if get_origin(self.kind) is dict:
            return given
        given = {self.aliases.get(key, key): entry for key, entry in given.items()}
        names = [entry.name for entry in fields(self.kind)]
        if unknown := [key for key in given if key not in names]:
            raise StartupError(f"{self.name} has no field {unknown[0]!r} in this version: use {', '.join(names)}.")
        try:
            return self.kind(**given)
        except StartupError as error:
            raise StartupError(f"{self.name}: {error}") from None


def as_mapping(name: str, value: Any) -> Mapping[str, Any]:
    """Return `value`, or the mapping in its JSON text. Raises StartupError with the setting's name for other values."""
    try:
        given = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, Mapping):
        raise StartupError(f"{name} must be a JSON object, got {value!r}.")
    return given


class Declared:
    """Base class of settings dataclasses: converts and checks the values of a new object. Raises StartupError."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for declared in own_settings(type(self)):
            object.__setattr__(self, declared.name, declared.checked(getattr(self, declared.name)))


def setting(default: Any, text: str, **details: Any) -> Any:
    """Declare a field of a record. `details`: further fields of `Setting`.

    `default`: the field's default, or a function that makes it, such as `tuple`; a flag that is not given is then None.
    """
    makes, at_start = callable(default), None if callable(default) else default
    declared = Setting(text=text, default=at_start, **details)
    shown: dict[str, Any] = {"repr": not declared.secret, "metadata": {_KEY: declared}}
    if makes or isinstance(default, dict):
        return field(default_factory=default if makes else default.copy, **shown)
    return field(default=default, **shown)


def own_settings(record: type) -> tuple[Setting, ...]:
    """Return the declarations of a record's own fields, in their order."""
    group, found = "options", []
    for entry in fields(record):
        if _KEY in entry.metadata:
            declared: Setting = entry.metadata[_KEY]
            group = declared.group or group
            kinds = [kind for kind in get_args(entry.type) if kind is not NoneType]
            kind = kinds[0] if NoneType in get_args(entry.type) else entry.type
            found.append(replace(declared, name=entry.name, annotation=entry.type, kind=kind, group=group))
    return tuple(found)


def records_of(record: type) -> dict[str, type]:
    """Return the types of the fields of a record that are records themselves."""
    return {
        entry.name: entry.type for entry in fields(record) if isinstance(entry.type, type) and is_dataclass(entry.type)
    }


def all_settings(record: type) -> list[Setting]:
    """Return the declarations of a record, then those of the records in it."""
    inner = (declared for kind in records_of(record).values() for declared in all_settings(kind))
    return [*own_settings(record), *inner]
