"""Stored objects have only the fields that are read, and share equal strings."""

import json
from typing import Any

from octavo_operator.cluster.trim import trimmed

LABEL = "serving.octavo.dev/service"


def _response(kind: str = "Service", **more: Any) -> dict[str, Any]:
    """An object from a response of its own, so that it shares no strings."""
    metadata = {"name": "llm", "labels": {LABEL: "llm"}, "managedFields": [{"manager": "octavo-operator"}]}
    found: dict[str, Any] = json.loads(json.dumps({"kind": kind, "metadata": metadata, **more}))
    return found


def test_managed_fields_are_dropped() -> None:
    raw = _response(spec={"ports": [{"port": 80, "name": None}], "text": "x" * 1000})
    without = {"name": "llm", "labels": {LABEL: "llm"}}
    assert trimmed(raw) == {**raw, "metadata": without}
    assert "managedFields" in raw["metadata"]


def test_the_spec_of_a_pod_is_dropped() -> None:
    assert set(trimmed(_response("Pod", spec={"containers": []}, status={"podIP": "10.0.0.1"}))) == {
        "kind",
        "metadata",
        "status",
    }


def test_two_objects_share_equal_strings() -> None:
    first, second = (next(iter(trimmed(_response())["metadata"]["labels"].items())) for _ in range(2))
    assert first[0] is second[0]
    assert first[1] is second[1]
