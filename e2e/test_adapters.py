"""`spec.adapters`: adapters come and go without a pod's restart, and no request for one gets another model's answer."""

import base64
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

import numpy as np
import pytest
from httpx2 import HTTPError
from octavo_e2e.cluster import Cluster, Raw, Step, condition, eventually, exposed
from openai import APIStatusError, NotFoundError, OpenAIError
from safetensors.numpy import save

HOST, NAME = "adapters.example.test", "adapted"
ENGINES = f"serving.octavo.dev/service={NAME},app.kubernetes.io/component=engine"
NUM_LAYERS, HIDDEN, KV_WIDTH = 30, 576, 192  # of SmolLM2
QUESTION = "What is the capital of France?"
#: The kubelet updates mounted ConfigMaps with its sync period of a minute and a cache of the same age.
WITHIN_S = 150


def _files(seed: int) -> dict[str, bytes]:
    """An adapter of rank 1, large enough to change each answer and small enough for a ConfigMap."""
    random = np.random.default_rng(seed)
    tensors = {}
    for layer in range(NUM_LAYERS):
        module = f"base_model.model.model.layers.{layer}.self_attn.v_proj"
        tensors[f"{module}.lora_A.weight"] = random.normal(0, HIDDEN**-0.5, (1, HIDDEN)).astype(np.float16)
        tensors[f"{module}.lora_B.weight"] = random.normal(0, 1, (KV_WIDTH, 1)).astype(np.float16)
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["v_proj"]}
    return {"adapter_config.json": json.dumps(config).encode(), "adapter_model.safetensors": save(tensors)}


def _serve(cluster: Cluster, namespace: str, *adapters: str, **spec: Raw | int) -> None:
    """Apply the service. The pods have the files of `first` and `second`, whether or not the spec lists them."""
    names = ("first", "second")
    pod = {
        "volumes": [{"name": name, "configMap": {"name": f"adapter-{name}"}} for name in names],
        "containers": [
            {"name": "engine", "volumeMounts": [{"name": name, "mountPath": f"/adapters/{name}"} for name in names]}
        ],
    }
    engine = {"maxModelLen": 512, "kvCacheMemory": "24Mi", "podTemplate": {"spec": pod}}
    listed = [{"name": name, "uri": f"file:///adapters/{name}"} for name in adapters]
    cluster.serve(namespace, NAME, engine=engine, adapters=listed, **spec, **exposed(HOST))


def _ask(cluster: Cluster, model: str, at: str) -> str:
    return cluster.ask(HOST, model, at=at, question=QUESTION)


def _until_state(cluster: Cluster, namespace: str, **reasons: str) -> Raw:
    def holds(service: Raw) -> bool:
        rows = service.get("status", {}).get("adapters", [])
        return {row["name"]: row["reason"] for row in rows} == reasons

    return cluster.until_one("InferenceService", namespace, NAME, holds, within_s=WITHIN_S, what=f"adapters {reasons}")


def _pods(cluster: Cluster, namespace: str) -> dict[str, int]:
    """Uid of each engine pod -> restarts of its container."""
    found = cluster.find("Pod", namespace, ENGINES)
    return {pod["metadata"]["uid"]: pod["status"]["containerStatuses"][0]["restartCount"] for pod in found}


@contextmanager
def _asking(cluster: Cluster, at: str, model: str, expected: str) -> Iterator[list[str]]:
    """Ask until the end of the block; yields what was no `expected` answer."""
    ends, wrong = Event(), list[str]()

    def ask() -> None:
        while not ends.is_set():
            try:
                text = _ask(cluster, model, at)
            except (OpenAIError, HTTPError) as error:
                wrong.append(repr(error))
            else:
                wrong.extend([] if text == expected else [text])

    asking = Thread(target=ask)
    asking.start()
    try:
        yield wrong
    finally:
        ends.set()
        asking.join(60)


@pytest.fixture(scope="module")
def adapted(cluster: Cluster, namespace: str) -> str:
    """The URL of the service, which has one adapter."""
    for seed, name in enumerate(("first", "second")):
        data = {file: base64.b64encode(content).decode() for file, content in _files(seed).items()}
        metadata = {"name": f"adapter-{name}"}
        cluster.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "binaryData": data}, namespace)
    _serve(cluster, namespace, "first")
    cluster.until_ready(namespace, NAME)
    _until_state(cluster, namespace, first="Loaded")
    return cluster.direct_url(namespace, NAME)


@pytest.mark.timeout(900, func_only=True)
def test_adapters_come_and_go_without_a_restart(adapted: str, cluster: Cluster, namespace: str, step: Step) -> None:
    base, first = _ask(cluster, NAME, adapted), _ask(cluster, "first", adapted)
    assert base != first
    pods = _pods(cluster, namespace)
    with _asking(cluster, adapted, "first", first) as wrong:
        with step("kubectl apply with one more adapter: until it answers"):
            _serve(cluster, namespace, "first", "second")
            second = eventually(
                lambda: _ask(cluster, "second", adapted), within_s=WITHIN_S, errors=(NotFoundError, APIStatusError)
            )
        assert second not in (base, first)
        with step("until its status is ready"):
            _until_state(cluster, namespace, first="Loaded", second="Loaded")
        with step("an adapter without files: until its status says so"):
            _serve(cluster, namespace, "first", "second", "absent")
            found = _until_state(cluster, namespace, first="Loaded", second="Loaded", absent="LoadFailed")
        assert "/adapters/absent" in found["status"]["adapters"][2]["message"]
        assert condition(found, "Ready")["status"] == "True"
        with step("kubectl apply without the adapter: until it is a 404"):
            _serve(cluster, namespace, "first")
            _until_not_found(cluster, adapted, "second")
        _until_state(cluster, namespace, first="Loaded")
    assert wrong == []
    assert _pods(cluster, namespace) == pods
    assert set(pods.values()) == {0}
    assert "second" not in {model.id for model in _models(cluster, adapted)}
    failures = [e for e in cluster.find("Event", namespace) if e["reason"] == "AdapterLoadFailed"]
    assert [(event["type"], "absent" in event["message"]) for event in failures] == [("Warning", True)]


def _models(cluster: Cluster, at: str) -> list[Raw]:
    with cluster.openai(HOST, at=at) as client:
        return client.models.list().data


def _until_not_found(cluster: Cluster, at: str, model: str) -> None:
    """Until then it still answers, or is unloaded and waits until the router reads the new list (503)."""
    deadline, seen = time.monotonic() + WITHIN_S, set[str]()
    while "NotFoundError" not in seen:
        assert time.monotonic() < deadline, f"{model} is still served after {WITHIN_S} s"
        try:
            _ask(cluster, model, at)
        except APIStatusError as error:
            seen.add(type(error).__name__)
    assert seen <= {"NotFoundError", "InternalServerError"}


@pytest.mark.timeout(900, func_only=True)
def test_a_second_replica_and_a_wake_answer_with_the_adapter_only(
    adapted: str, cluster: Cluster, namespace: str, step: Step
) -> None:
    first = _ask(cluster, "first", adapted)
    with _asking(cluster, adapted, "first", first) as wrong, step("a second replica: until it has the adapter"):
        _serve(cluster, namespace, "first", replicas=2)
        cluster.until_one(
            "InferenceService", namespace, NAME, lambda o: o["status"]["replicas"]["ready"] == 2, within_s=WITHIN_S
        )
        _until_state(cluster, namespace, first="Loaded")
    assert wrong == []
    scaling = {"maxReplicas": 2, "scaleToZero": {"idleSeconds": 10}, "provider": "Operator"}
    _serve(cluster, namespace, "first", autoscaling=scaling)
    with step("without requests, no replica"):
        cluster.until("Pod", namespace, lambda pods: not pods, label=ENGINES, within_s=300, what="no engine")
    with step("a request for the adapter wakes the service and is answered"):
        assert _ask(cluster, "first", adapted) == first
    _until_state(cluster, namespace, first="Loaded")
