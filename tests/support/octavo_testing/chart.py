"""The Helm chart in tests: default values, their schema, every change of a setting, and the rendered manifests."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from octavo_testing.cluster import local_binaries

CHART = Path(__file__).parents[3] / "charts" / "octavo"
HELM_MISSING = "helm is missing: install helm 3 (https://helm.sh), or start the local cluster, which brings it"
PATIENCE_S = 240

Json = Any


@dataclass(frozen=True, slots=True)
class SettingChange:
    """A value of one setting that differs from its default."""

    path: tuple[str, ...]
    value: Json

    @property
    def id(self) -> str:
        return f"{'.'.join(self.path)}={self.value}"

    def apply_to(self, values: Mapping[str, Json]) -> dict[str, Json]:
        """Return `values` with this setting changed."""
        head, rest = self.path[0], self.path[1:]
        below = values.get(head, {})
        return {**values, head: SettingChange(rest, self.value).apply_to(below) if rest else self.value}


def default_values() -> dict[str, Json]:
    loaded: dict[str, Json] = yaml.safe_load((CHART / "values.yaml").read_text())
    return loaded


def values_schema() -> dict[str, Json]:
    loaded: dict[str, Json] = yaml.safe_load((CHART / "values.schema.json").read_text())
    return loaded


def settings(schema: Mapping[str, Json]) -> Iterator[tuple[tuple[str, ...], dict[str, Json]]]:
    """Yield the path and schema of each setting; an object that only groups settings is not a setting."""
    definitions = schema["definitions"]
    pending = [((name,), node) for name, node in schema["properties"].items() if name != "global"]
    while pending:
        path, node = pending.pop(0)
        full = definitions[node["$ref"].rsplit("/", 1)[1]] | node if "$ref" in node else node
        if "properties" in full and "examples" not in full:
            pending += [((*path, name), below) for name, below in full["properties"].items()]
        else:
            yield path, full


def setting_changes() -> list[SettingChange]:
    """Return changes of every setting: each choice of an enum, both bounds of a number, the examples of other types."""
    return [
        SettingChange(path, value)
        for path, node in settings(values_schema())
        for value in _offered(node)
        if value != value_at(default_values(), path)
    ]


def _offered(node: Mapping[str, Json]) -> list[Json]:
    if node.get("type") == "boolean":
        return [False, True]
    if node.get("type") == "integer":
        return [node["minimum"], node["maximum"]]
    found: list[Json] = node["enum"] if "enum" in node else node["examples"]
    return found


def value_at(values: Json, path: tuple[str, ...]) -> Json:
    return value_at(values[path[0]], path[1:]) if path else values


@cache
def helm_binary() -> str | None:
    """Return the path of helm, or None where it is not installed."""
    return shutil.which("helm") or shutil.which("helm", path=local_binaries() or "")


def run_helm(
    *arguments: str, values: Mapping[str, Json] | None = None, kubeconfig: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run helm. Without `kubeconfig` helm has no access to any cluster."""
    executable = helm_binary()
    assert executable is not None, HELM_MISSING
    env = os.environ | {"KUBECONFIG": str(kubeconfig or os.devnull)}
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(dict(values or {}), file)
        file.flush()
        command = [executable, *arguments, *(["--values", file.name] if values else [])]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S, env=env)


def render(values: Mapping[str, Json], *, namespace: str = "octavo-system") -> list[dict[str, Json]]:
    """Return the manifests that `helm template` renders without a cluster; fail with helm's message."""
    made = run_helm("template", "octavo", str(CHART), "--namespace", namespace, values=values)
    assert made.returncode == 0, made.stderr
    return [manifest for manifest in yaml.safe_load_all(made.stdout) if manifest]
