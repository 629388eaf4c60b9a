"""What is kept of an object: all that is read, nothing else, and no text twice."""

import json
from typing import Any

from octavo_operator.cluster.trim import trimmed

LABEL = "serving.octavo.dev/service"


def _read(kind: str = "Service", **more: Any) -> dict[str, Any]:
    """As an answer of its own brings it."""
    metadata = {"name": "llm", "labels": {LABEL: "llm"}, "managedFields": [{"manager": "octavo-operator"}]}
    found: dict[str, Any] = json.loads(json.dumps({"kind": kind, "metadata": metadata, **more}))
    return found


def test_all_but_who_manages_it_is_kept() -> None:
    raw = _read(spec={"ports": [{"port": 80, "name": None}], "text": "x" * 1000})
    without = {"name": "llm", "labels": {LABEL: "llm"}}
    assert trimmed(raw) == {**raw, "metadata": without}
    assert "managedFields" in raw["metadata"]


def test_of_a_pod_only_what_became_of_it() -> None:
    assert set(trimmed(_read("Pod", spec={"containers": []}, status={"podIP": "10.0.0.1"}))) == {
        "kind",
        "metadata",
        "status",
    }


def test_two_objects_share_their_texts() -> None:
    first, second = (next(iter(trimmed(_read())["metadata"]["labels"].items())) for _ in range(2))
    assert first[0] is second[0]
    assert first[1] is second[1]
