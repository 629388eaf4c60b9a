"""examples/shared_router.yaml: the model name selects one of two services behind one router and host."""

import json
from collections.abc import Sequence

import pytest
from octavo_e2e.cluster import Cluster, Raw
from octavo_e2e.providers import ROOT
from openai import NotFoundError

HOST, KEY = "team.example.test", "change-this-key-of-team-a"
NAMES = ("chat", "summaries")


def test_the_model_name_selects_the_service(cluster: Cluster, namespace: str) -> None:
    cluster.apply(ROOT / "examples" / "shared_router.yaml", namespace)
    for name in NAMES:
        cluster.until_ready(namespace, name)
    routers = cluster.find("Pod", namespace, "app.kubernetes.io/component=router")
    assert [pod["metadata"]["labels"]["serving.octavo.dev/service"] for pod in routers] == ["chat", "chat"]
    with cluster.openai(HOST, KEY) as client:
        assert {model.id for model in client.models.list().data} == set(NAMES)
        for name in NAMES:
            raw = client.completions.with_raw_response.create(model=name, prompt="Once", max_tokens=2)
            assert raw.parse().model == name
            assert not [header for header in raw.headers if header.startswith("x-octavo-")]
            assert _chosen(cluster, routers)[raw.headers["x-request-id"]].startswith(f"{name}-engine-")
        with pytest.raises(NotFoundError, match="third"):
            client.completions.create(model="third", prompt="Once")


def _chosen(cluster: Cluster, routers: Sequence[Raw]) -> dict[str, str]:
    """Request id -> replica, as the routers report their latest decisions."""
    command = ("octavo", "explain", "decisions", "--url", "http://127.0.0.1:8001", "--json")
    pods = (pod["metadata"] for pod in routers)
    outputs = [cluster.kubectl("exec", "-n", pod["namespace"], pod["name"], "--", *command) for pod in pods]
    decisions = map(json.loads, "".join(outputs).splitlines())
    return {decision["request_id"]: decision["chosen"] for decision in decisions}
