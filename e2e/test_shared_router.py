"""Two services of a namespace behind one router and one host, chosen by the name of the model."""

import pytest
from octavo_e2e.cluster import Cluster, exposed
from openai import NotFoundError

HOST = "shared.example.test"


def test_the_model_name_chooses(cluster: Cluster, namespace: str) -> None:
    cluster.serve(namespace, "first", **exposed(HOST))
    cluster.serve(namespace, "second", router={"ref": {"name": "first"}})
    for name in ("first", "second"):
        cluster.until_ready(namespace, name)
    assert {p["metadata"]["labels"]["app.kubernetes.io/instance"] for p in _routers(cluster, namespace)} == {"first"}
    with cluster.openai(HOST) as client:
        assert {model.id for model in client.models.list().data} == {"first", "second"}
    for name in ("first", "second"):
        with cluster.openai(HOST) as client:
            raw = client.completions.with_raw_response.create(model=name, prompt="Once", max_tokens=2)
        assert raw.parse().model == name
        assert raw.headers["x-octavo-replica"].startswith(f"{name}-engine-")
    with cluster.openai(HOST) as client, pytest.raises(NotFoundError, match="third"):
        client.completions.create(model="third", prompt="Once")


def _routers(cluster: Cluster, namespace: str) -> list[dict]:
    return cluster.find("Pod", namespace, "app.kubernetes.io/component=router")
