"""Reads a manifest file: its InferenceServices, and the Secrets and ConfigMaps that they refer to.

As for `kubectl apply`, a file may hold several documents and Lists. Other kinds are ignored with a note.
"""

import base64
import binascii
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from octavo_operator.service import InferenceService
from octavo_operator.spec.service import GROUP, KIND, InvalidSpec, read_spec

_CONFIG_KINDS = ("Secret", "ConfigMap")


@dataclass(slots=True)
class Documents:
    """Contents of a manifest file. `configs`: entries of its Secrets and ConfigMaps. `notes`: about ignored objects."""

    services: dict[str, InferenceService] = field(default_factory=dict)
    configs: dict[tuple[str, str], dict[str, str]] = field(default_factory=dict, repr=False)  # kind, name -> entries
    notes: list[str] = field(default_factory=list)


def read_documents(text: str) -> Documents:
    """Parse a manifest file. Raises InvalidSpec; each line of its message begins with the kind and name concerned."""
    documents, faults = Documents(), list[str]()
    for manifest in _manifests(text):
        kind, name = manifest.get("kind"), _name(manifest)
        if kind in _CONFIG_KINDS and manifest.get("apiVersion") == "v1":
            documents.configs[kind, name] = _entries(manifest, f"{kind} {name}")
        elif kind != KIND and not str(manifest.get("apiVersion")).startswith(f"{GROUP}/"):
            documents.notes.append(
                f"{kind} {name}: ignored: octavo up runs InferenceServices, and reads Secrets and ConfigMaps"
            )
        else:
            try:
                service = _service(manifest, name)
            except InvalidSpec as error:
                faults += [f"{KIND} {name}: {line}" for line in str(error).splitlines()]
                continue
            if name in documents.services:
                faults.append(f"{KIND} {name}: the name occurs twice: give each its own metadata.name")
            documents.services[name] = service
    if faults:
        raise InvalidSpec("\n".join(faults))
    if not documents.services:
        raise InvalidSpec(f"the file has no {KIND}: apiVersion: {GROUP}/v1alpha1, kind: {KIND}")
    return documents


class _Loader(yaml.SafeLoader):
    """Refuses a mapping that has a key twice; YAML's own loader would ignore the first value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        places: dict[Any, yaml.Mark] = {}
        for key, _ in node.value:
            place = key.start_mark
            if (first := places.setdefault((key.tag, str(key.value)), place)) is not place:
                raise yaml.YAMLError(
                    f"the key {key.value!r} is in line {first.line + 1} and again in line {place.line + 1}: keep one "
                    "of them"
                )
        return super().construct_mapping(node, deep)


def _manifests(text: str) -> Iterator[dict[str, Any]]:
    try:
        documents = [document for document in yaml.load_all(text, _Loader) if document is not None]
    except (yaml.YAMLError, RecursionError) as error:
        raise InvalidSpec(f"the file is not valid YAML: {' '.join(str(error).split())}") from None
    for position, document in enumerate(documents, 1):
        if not isinstance(document, dict):
            raise InvalidSpec(
                f"document {position} is not a Kubernetes object: apiVersion, kind and metadata are missing"
            )
        if document.get("kind") == "List":
            yield from document.get("items") or ()
        else:
            yield document


def _name(manifest: Mapping[str, Any]) -> str:
    metadata = manifest.get("metadata")
    return str(metadata.get("name") or "") if isinstance(metadata, dict) else ""


def _service(manifest: dict[str, Any], name: str) -> InferenceService:
    spec = read_spec(manifest)
    namespace = str(manifest["metadata"].get("namespace") or "default")
    return InferenceService(name=name, namespace=namespace, uid="", generation=1, spec=spec)


def _entries(manifest: Mapping[str, Any], what: str) -> dict[str, str]:
    entries = {}
    for key, value in (manifest.get("data") or {}).items():
        entries[key] = _decoded(value, f"{what}: data.{key}") if manifest["kind"] == "Secret" else value
    entries.update(manifest.get("stringData") or {})
    for key, value in entries.items():
        if not isinstance(value, str):
            raise InvalidSpec(f"{what}: {key}: the value is not a string: put it into quotes")
    return entries


def _decoded(value: object, place: str) -> str:
    try:
        return base64.b64decode(str(value), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        raise InvalidSpec(f"{place}: the value is not text in base64: put plain text into stringData") from None
