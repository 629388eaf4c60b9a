"""The chart's values and schema have the same settings, all described; unknown settings are refused."""

from typing import Any

import jsonschema
import pytest
import yaml
from octavo_testing.chart import (
    CHART,
    SettingChange,
    default_values,
    setting_changes,
    settings,
    value_at,
    values_schema,
)


def _paths(values: Any, known: set[tuple[str, ...]], path: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    """Paths of the settings; a dictionary that is one setting in the schema is not split."""
    if path in known or not isinstance(values, dict):
        return {path}
    return {found for name, below in values.items() for found in _paths(below, known, (*path, name))}


def test_values_and_schema_have_the_same_settings() -> None:
    known = {path for path, _ in settings(values_schema())}
    assert _paths(default_values(), known) == known


def test_a_null_gives_a_setting_its_default() -> None:
    """The template that fills such values in has the defaults of all settings that are neither empty nor a map."""
    text = (CHART / "templates" / "_values.tpl").read_text()
    filled = yaml.safe_load(text.split('define "octavo.defaults" -}}')[1].split("{{- end }}")[0])
    for path, _ in settings(values_schema()):
        default = value_at(default_values(), path)
        if default and not isinstance(default, dict | list):
            assert value_at(filled, path) == default, path
    assert filled.keys() >= {path[0] for path, _ in settings(values_schema()) if len(path) > 1}
    missing = [group for group, values in filled.items() if group not in default_values()]
    assert missing == []


def test_the_defaults_are_valid() -> None:
    jsonschema.Draft7Validator.check_schema(values_schema())
    jsonschema.validate(default_values(), values_schema())


def test_every_setting_and_group_is_described() -> None:
    def silent(node: dict[str, Any], path: str) -> list[str]:
        below = [f for name, n in node.get("properties", {}).items() for f in silent(n, f"{path}.{name}")]
        return below if node.get("description", "").endswith((".", ")")) else [path, *below]

    assert [path for name, node in values_schema()["properties"].items() for path in silent(node, name)] == []


def test_every_group_refuses_unknown_settings() -> None:
    def open_groups(node: Any, path: str) -> list[str]:
        if not isinstance(node, dict):
            return []
        here = [path] if "properties" in node and node.get("additionalProperties") is not False else []
        return here + [found for name, below in node.items() for found in open_groups(below, f"{path}/{name}")]

    assert open_groups(values_schema(), "") == []


@pytest.mark.parametrize("flip", setting_changes(), ids=lambda flip: flip.id)
def test_the_schema_accepts_its_own_examples(flip: SettingChange) -> None:
    jsonschema.validate(flip.apply_to(default_values()), values_schema())


def test_every_setting_can_be_flipped() -> None:
    assert {flip.path for flip in setting_changes()} == {path for path, _ in settings(values_schema())}
