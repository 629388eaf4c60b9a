"""Autoscaling, by the load of running streams: up, down to the least, to zero, and awake again by a request."""

import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import Any

import pytest
from octavo_e2e.cluster import Cluster, Raw, Step, condition, exposed
from openai import NotFoundError, OpenAI

HOST, NAME = "scaling.example.test", "scaled"
#: Two requests of full length fill the KV cache of a replica.
SMALL = {"engine": {"kvCacheMemory": "24Mi", "maxModelLen": 512}}
HPA = "horizontalpodautoscaler.autoscaling/scaled"
QUICK: Raw = {
    "maxReplicas": 2,
    "behavior": {"scaleDown": {"stabilizationWindowSeconds": 5}},
    "scaleToZero": {"idleSeconds": 10},
}
NUM_STREAMS = 8
PERIOD_S = 15


@pytest.fixture(scope="module")
def scaled(cluster: Cluster, namespace: str) -> str:
    """The namespace of the service."""
    _scale_by(cluster, namespace, "HPA")
    cluster.until_ready(namespace, NAME)
    return namespace


@pytest.mark.parametrize("by", ["HPA", "Operator"])
def test_replicas_follow_the_load_down_to_zero_and_back(scaled: str, cluster: Cluster, step: Step, by: str) -> None:
    _scale_by(cluster, scaled, by)
    with cluster.openai(HOST) as client:
        _ask(client)
    with _load(cluster, scaled) as failed:
        with step("the load asks for two replicas"):
            _until_replicas(cluster, scaled, 2, within_s=3 * PERIOD_S)
        with step("two replicas serve"):
            cluster.until_one(
                "InferenceService", scaled, NAME, lambda found: found["status"]["replicas"]["ready"] == 2, within_s=120
            )
        assert cluster.kubectl("get", "hpa", "-o", "name", "-n", scaled).split() == [HPA] * (by == "HPA")
        if by == "HPA":
            described = cluster.kubectl("describe", "hpa", NAME, "-n", scaled)
            assert {"kv_used_replicas", "waiting_requests"} <= set(re.findall(r"\w+", described))
            assert "ScalingActive" in described
            print(described)
    assert not failed
    with step("without load, one replica stays"):
        _until_replicas(cluster, scaled, 1, within_s=60)
    with step("without requests, none"):
        _until_replicas(cluster, scaled, 0, within_s=60)
    found = cluster.until_reason(scaled, NAME, "Idle")
    assert condition(found, "Ready")["status"] == "True"
    assert found["status"]["autoscaling"]["reason"] == "ScaledToZero"
    with step("a held request is answered"), cluster.openai(HOST) as client:
        _ask(client)
    found = cluster.until_one(
        "InferenceService", scaled, NAME, lambda found: "wakeSeconds" in found["status"]["autoscaling"], within_s=30
    )
    assert 0 < found["status"]["autoscaling"]["wakeSeconds"] < 50


def test_short_requests_keep_a_service_awake(scaled: str, cluster: Cluster) -> None:
    """Each is over long before the operator looks at the load again."""
    with cluster.openai(HOST) as client:
        _ask(client)
        for _ in range(10):
            _ask(client)
            Event().wait(QUICK["scaleToZero"]["idleSeconds"] / 2)
            assert _replicas(cluster, scaled) >= 1
    _until_replicas(cluster, scaled, 0, within_s=60)


def test_a_request_for_an_unknown_model_wakes_nothing(scaled: str, cluster: Cluster) -> None:
    _until_replicas(cluster, scaled, 0, within_s=60)
    with cluster.openai(HOST) as client:
        assert [model.id for model in client.models.list().data] == [NAME]
        with pytest.raises(NotFoundError, match="unknown"):
            client.completions.create(model="unknown", prompt="Once")
    Event().wait(PERIOD_S)
    assert _replicas(cluster, scaled) == 0


def _scale_by(cluster: Cluster, namespace: str, provider: str) -> None:
    cluster.serve(namespace, NAME, autoscaling=QUICK | {"provider": provider}, **SMALL, **exposed(HOST))


def _ask(client: OpenAI) -> Any:
    return client.completions.create(model=NAME, prompt="Once", max_tokens=1)


@contextmanager
def _load(cluster: Cluster, namespace: str) -> Iterator[list[BaseException]]:
    """Send streams until the end of the block; yields the list of their errors."""
    ends, failed = Event(), list[BaseException]()

    def send(client: OpenAI, number: int) -> None:
        prompt = f"Count from {number}."
        while not ends.is_set():
            for _ in client.completions.create(model=NAME, prompt=prompt, max_tokens=400, stream=True):
                pass

    def note(sent: Future[None]) -> None:
        if (error := sent.exception()) is not None:
            failed.append(error)

    with (
        cluster.openai(HOST, at=cluster.direct_url(namespace, NAME)) as client,
        ThreadPoolExecutor(NUM_STREAMS) as pool,
    ):
        for number in range(NUM_STREAMS):
            pool.submit(send, client, number).add_done_callback(note)
        try:
            yield failed
        finally:
            ends.set()


def _until_replicas(cluster: Cluster, namespace: str, number: int, *, within_s: float) -> None:
    cluster.until_one(
        "InferenceService", namespace, NAME, lambda found: found["spec"]["replicas"] == number,
        within_s=within_s, what=f"{number} replicas",
    )  # fmt: skip


def _replicas(cluster: Cluster, namespace: str) -> int:
    found = cluster.get("InferenceService", namespace, NAME)
    assert found is not None
    number: int = found["spec"]["replicas"]
    return number
