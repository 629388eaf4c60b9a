"""A setting is declared once: `max_n: int = setting(256, "Largest n, the number of sequences.", ge=1)`.

The line is a field of a frozen dataclass. Flag, key of a YAML file, environment variable, help, range check and the
tables of the docs follow from it; the flag is the name of the field. Nothing reads declarations after the start.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from math import inf
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

_KEY = "setting"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One declaration; `setting` describes `default`. `name`: of the field. `kind`: type of its values but None.

    `text`: a noun phrase with unit, to which the help adds the default.
    `unset`: the default in words, where the value does not say it.
    `group`: title of its part of the help, up to the next setting with one; a description may follow ": ".
    `flags`: further flags, such as "-q". `repeats`: the flag may be given several times.
    `ge`, `le`: least and largest value.
    `parse`: makes the value from text; without it, the type of the field decides.
    `aliases`: other words for values. `convert`: makes the field's value from one of any source.
    `metavar`: word for the value in the help; "": the type of the field decides; None: the flag's name.
    `env`: variables that count if the flag is not given: of a list all that are set, else the first one.
    """

    text: str
    default: Any = None
    unset: str = ""
    group: str = ""
    flags: tuple[str, ...] = ()
    repeats: bool = False
    ge: float = -inf
    le: float = inf
    parse: Callable[[str], Any] | None = None
    aliases: Mapping[str, Any] = field(default_factory=dict)
    convert: Callable[[Any], Any] | None = None
    metavar: str | None = ""
    env: tuple[str, ...] = ()
    name: str = ""
    kind: Any = None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def is_list(self) -> bool:
        """True if several texts follow the flag, each of which is a value."""
        return get_origin(self.kind) is tuple and self.parse is None

    @property
    def choices(self) -> tuple[Any, ...]:
        """The accepted words, if the type lists them."""
        return (*get_args(self.kind), *self.aliases) if get_origin(self.kind) is Literal and not self.parse else ()

    @property
    def value_type(self) -> Any:
        """The type of one value: of an entry of a list, of a word."""
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
        """Return whether a value is one of `bounds`; None always is."""
        if self.choices:
            return value is None or value in self.choices
        return value is None or (self.ge, self.le) == (-inf, inf) or bool(self.ge <= value <= self.le)

    def converted(self, value: Any) -> Any:
        """Return the field's value for a value from a flag, a file or a script, where a path may be given for text."""
        value = str(value) if self.kind is str and isinstance(value, Path) else value
        value = self.aliases.get(value, value) if isinstance(value, str) else value
        return value if self.convert is None else self.convert(value)


def setting(default: Any, text: str, *, repr: bool = True, **details: Any) -> Any:
    """Declare a field of a record. `details`: further fields of `Setting`. `repr=False` hides a key or a secret.

    `default`: the field's default, or a function that makes it, such as `tuple`; a flag is then None if it isn't given.
    """
    makes, at_start = callable(default), None if callable(default) else default
    metadata = {_KEY: Setting(text=text, default=at_start, **details)}
    if makes or isinstance(default, dict):
        return field(default_factory=default if makes else default.copy, repr=repr, metadata=metadata)
    return field(default=default, repr=repr, metadata=metadata)


def own_settings(record: type) -> list[Setting]:
    """Return the declarations of a record's own fields, in their order."""
    group, found = "", []
    for entry in fields(record):
        if _KEY in entry.metadata:
            declared: Setting = entry.metadata[_KEY]
            group = declared.group or group
            found.append(replace(declared, name=entry.name, kind=_without_none(entry.type), group=group))
    return found


def records_of(record: type) -> dict[str, type]:
    """Return the types of the fields of a record that are records themselves."""
    return {
        entry.name: entry.type for entry in fields(record) if isinstance(entry.type, type) and is_dataclass(entry.type)
    }


def all_settings(record: type) -> list[Setting]:
    """Return the declarations of a record, then those of the records in it."""
    inner = (declared for kind in records_of(record).values() for declared in all_settings(kind))
    return [*own_settings(record), *inner]


def _without_none(kind: Any) -> Any:
    parts = [part for part in get_args(kind) if part is not NoneType]
    return parts[0] if NoneType in get_args(kind) else kind
