"""`VllmArgument`: what the values of one of vLLM's arguments mean in Octavo, which has no setting of that name.

A value is *fulfilled* (it asks for what Octavo does anyway), *harmless* (accepted without effect, since no output
depends on it; a start names it once), or refused with a reason and a remedy. Nothing is ignored silently.
"""

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from octavo_engine.wire.errors import StartupError


class _AnyValue:
    def __contains__(self, value: object) -> bool:
        return True


ANY: Container[Any] = _AnyValue()


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmArgument:
    """`missing` and `remedy`: sentences about refused values. `note`: what the start's line says in parentheses.

    `is_switch`, `is_list`, `flags`: form of the flag, and its further spellings. `fields`: arguments in a JSON object.
    """

    fulfilled: Container[Any] = ()
    harmless: Container[Any] = ()
    missing: str = "it is not built."
    remedy: str = ""
    note: str = ""
    is_switch: bool = False
    is_list: bool = False
    is_deprecated: bool = False
    flags: tuple[str, ...] = ()
    fields: Mapping[str, "VllmArgument"] = field(default_factory=dict)


class UnusedArgument(NamedTuple):
    """An argument that was accepted without effect."""

    name: str
    value: Any
    argument: VllmArgument


def find_unused(table: Mapping[str, VllmArgument], given: Mapping[str, Any]) -> Iterator[UnusedArgument]:
    """Check arguments of the table; yield those without effect. None is "not given". Raises StartupError."""
    for name, value in given.items():
        argument = table[name]
        if value is None or _contains(argument.fulfilled, value):
            continue
        if argument.fields and isinstance(value, Mapping):
            yield from _find_unused_fields(name, argument, value)
        elif _contains(argument.harmless, value):
            yield UnusedArgument(name, value, argument)
        else:
            raise StartupError(_refusal(name, value, argument))


def describe_unused(unused: Iterable[UnusedArgument], *, as_flags: bool) -> list[str]:
    """Lines for the start's log: one about arguments without effect, one about those that vLLM has deprecated."""
    arguments = list(unused)
    kinds = (
        ("accepted without effect here", [u for u in arguments if not u.argument.is_deprecated]),
        ("deprecated by vLLM and without effect here, leave out", [u for u in arguments if u.argument.is_deprecated]),
    )
    spell = _as_flag if as_flags else _as_keyword
    return [f"{title}: {', '.join(map(spell, entries))}" for title, entries in kinds if entries]


def _find_unused_fields(name: str, argument: VllmArgument, value: Mapping[str, Any]) -> Iterator[UnusedArgument]:
    if unknown := sorted(value.keys() - argument.fields.keys()):
        fields = ", ".join(argument.fields)
        raise StartupError(f"{name} has no field {unknown[0]!r}: leave it out, or use one of {fields}.")
    table = {f"{name}.{key}": argument.fields[key] for key in value}
    yield from find_unused(table, {f"{name}.{key}": entry for key, entry in value.items()})


def _contains(values: Container[Any], value: Any) -> bool:
    """True if `values` has the value with the same type, as True is no 1 here."""
    if isinstance(values, tuple):
        return any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in values)
    return value in values


def _refusal(name: str, value: Any, argument: VllmArgument) -> str:
    accepted = argument.fulfilled, argument.harmless
    choices = [repr(choice) for values in accepted if isinstance(values, tuple) for choice in values]
    rule = f"Leave it out, or set it to {' or '.join(choices)}" if choices else "Leave it out"
    remedy = f"; {argument.remedy}" if argument.remedy else "."
    return f"{name}={value!r} is not supported by this version: {argument.missing} {rule}{remedy}"


def _as_flag(unused: UnusedArgument) -> str:
    head, dot, rest = unused.name.partition(".")
    prefix = "--no-" if unused.value is False and not dot else "--"
    return prefix + head.replace("_", "-") + dot + rest + _note(unused)


def _as_keyword(unused: UnusedArgument) -> str:
    return f"{unused.name}={unused.value!r}{_note(unused)}"


def _note(unused: UnusedArgument) -> str:
    return f" ({unused.argument.note})" if unused.argument.note else ""
