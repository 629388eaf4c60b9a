"""Parts of the plan: conditions and their reasons, gates, comparison of objects, documentation of reasons."""

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from octavo_engine.devices.device import open_device
from octavo_engine.devices.memory import MemoryInfo
from octavo_engine.runner.kv_cache_size import ModelMemory, set_kv_bytes, size_kv
from octavo_engine.settings.config import EngineConfig
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.wire.errors import StartupCode, StartupError
from octavo_operator.cluster.pods import pod_of
from octavo_operator.desired.engine import engine_revision
from octavo_operator.names import ENGINE, REVISION_LABEL
from octavo_operator.observed import EngineDeployment, Load, ModelSize, Observed, Pod, Refusal, RouterReport
from octavo_operator.plan.actions import Delete, SetGate
from octavo_operator.plan.apply_digest import matches, with_digest
from octavo_operator.plan.conditions import REASONS, Condition, with_transition_times
from octavo_operator.plan.plan import plan
from octavo_operator.plan.readiness_gates import gate_actions
from octavo_operator.plan.status_conditions import MODEL_NOT_FOUND, NO_DEVICE, OUT_OF_MEMORY, conditions_of, refused
from octavo_operator.service import InferenceService, Settings, read_service
from octavo_operator.spec.quantity import parse_quantity
from octavo_server.cli.termination_message import termination_message
from octavo_testing.infsvc_cases import HOST, OPEN, Case, stored
from octavo_testing.plan_cluster import SECRETS

SETTINGS = Settings(engine_image="engine:1", router_image="router:1", operator_namespace="octavo-system")
DOCUMENT = Path(__file__).parents[3] / "docs" / "reference" / "conditions.md"


def _service(**spec: Any) -> InferenceService:
    return read_service(stored(Case("", spec, name="llm")))


WANTED = engine_revision(_service(), SETTINGS)


def _pod(**fields: Any) -> Pod:
    return Pod(**({"name": "pod-0", "uid": "u0", "revision": WANTED} | fields))


def _serving(**fields: Any) -> Pod:
    return _pod(**({"is_ready": True, "is_pod_ready": True, "is_admitted": True, "admitted_epoch": "e1"} | fields))


def _engine_deployment(**fields: Any) -> EngineDeployment:
    return EngineDeployment(**({"name": "e", "uid": "u", "revision": WANTED, "replicas": 1, "created": "1"} | fields))


def _report(**admitted: str) -> RouterReport:
    return RouterReport(pod="r", admitted={name.replace("_", "-"): epoch for name, epoch in admitted.items()})


def _of(type_: str, service: InferenceService, observed: Observed) -> Condition:
    wanted = engine_revision(service, SETTINGS)
    return next(c for c in conditions_of(service, observed, SETTINGS, wanted=wanted) if c.type == type_)


def test_a_serving_service_is_ready() -> None:
    seen = Observed(pods=(_serving(),), routers={"r": _report(pod_0="e1")})
    assert {c.type: c.status for c in conditions_of(_service(), seen, SETTINGS, wanted=WANTED)} == {
        "Accepted": "True",
        "ChildrenApplied": "True",
        "FitsHardware": "True",
        "ModelReady": "True",
        "WorkloadReady": "True",
        "RouterReady": "True",
        "ReplicasAdmitted": "True",
        "Progressing": "False",
        "Ready": "True",
    }


@pytest.mark.parametrize(
    ("observed", "reason"),
    [
        (Observed(), "Waiting"),
        (Observed(pods=(_pod(is_fetching=True),)), "Fetching"),
        (Observed(pods=(_pod(trouble="FetchFailed", message="404"),)), "FetchFailed"),
        (Observed(pods=(_pod(trouble="Unschedulable", message="0/1 nodes: 1 Insufficient cpu"),)), "Unschedulable"),
        (Observed(pods=(_pod(trouble="ImagePullError", message="not found"),)), "ImagePullError"),
        (Observed(pods=(_pod(trouble="CrashLoop", message="octavo: no such file"),)), "CrashLoop"),
        (Observed(pods=(_pod(trouble="OOMKilled", message="limit 1Gi"),)), "OOMKilled"),
        (Observed(pods=(_pod(trouble="CrashLoop", message="exit code 1", failure_code="OutOfMemory"),)), "TooLarge"),
        (Observed(pods=(_pod(trouble="CrashLoop", message="exit code 1", failure_code="ModelNotFound"),)), "NotFound"),
        (Observed(pods=(_pod(trouble="ConfigError", message='secret "token" not found'),)), "ConfigError"),
        (Observed(pods=(_pod(trouble="MountFailed", message='FailedMount: secret "x" not found'),)), "MountFailed"),
        (Observed(pods=(_pod(trouble="NodeLost", message="its node reports nothing"),)), "NodeLost"),
        (Observed(pods=(_pod(trouble="StartFailed", message="exec: not found"),)), "StartFailed"),
        (
            Observed(engine_deployments=(_engine_deployment(failure="exceeded quota: q", exceeds_quota=True),)),
            "QuotaExceeded",
        ),
        (Observed(engine_deployments=(_engine_deployment(failure="violates PodSecurity"),)), "PodRefused"),
        (Observed(refusals={("Service", "llm"): Refusal("NameTaken", "is there")}), "NameTaken"),
        (Observed(refusals={("Service", "llm"): Refusal("Refused", "403 Forbidden")}), "Refused"),
        (Observed(pods=(_pod(is_ready=True),)), "RouterStarting"),
        (Observed(pods=(_pod(is_ready=True),), router_trouble="CrashLoop: …"), "RouterFailed"),
        (Observed(pods=(_pod(is_ready=True),), routers={"r": None}), "WaitingForRouter"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_ready_has_the_reason_of_the_first_blocking_condition(observed: Observed, reason: str) -> None:
    found = _of("Ready", _service(), observed)
    assert (found.status, found.reason) == ("False", reason)
    assert found.message


@pytest.mark.parametrize(("replicas", "reason"), [(1, "Serving"), (2, "Waiting")])
def test_ready_counts_serving_pods_of_any_revision(replicas: int, reason: str) -> None:
    seen = Observed(pods=(_serving(revision="old"), _pod(name="pod-1")), routers={"r": _report(pod_0="e1")})
    assert _of("Ready", _service(replicas=replicas), seen).reason == reason
    assert _of("WorkloadReady", _service(replicas=replicas), seen).reason == "Starting"


def test_a_missing_router_is_named_and_no_object_changes() -> None:
    service = _service(router={"ref": {"name": "other"}})
    planned = plan(service, Observed(), SETTINGS, now="t", new_secrets=SECRETS)
    assert planned.actions == ()
    assert planned.status["conditions"][0]["reason"] == "RouterNotFound"
    assert "'other'" in planned.status["conditions"][0]["message"]


def test_a_host_of_another_service_is_not_accepted() -> None:
    service = _service(exposure=HOST, auth=OPEN)
    planned = plan(service, Observed(host_owner="team-a/first"), SETTINGS, now="t", new_secrets=SECRETS)
    assert planned.actions == ()
    assert "team-a/first" in planned.status["conditions"][0]["message"]


def test_a_model_name_of_another_service_is_not_accepted() -> None:
    accepted = conditions_of(_service(), Observed(taken_models={"llama": "first"}), SETTINGS, wanted=WANTED)[0]
    assert (accepted.reason, "first" in accepted.message) == ("ModelNameTaken", True)


def test_a_gateway_without_the_gateway_api_is_not_accepted() -> None:
    service = _service(exposure={"gateway": {"parentRefs": [{"name": "public"}]}}, auth=OPEN)
    with_gateways = replace(SETTINGS, has_gateway_api=True)
    assert _of("Ready", service, Observed()).reason == "NoGatewayApi"
    known = conditions_of(service, Observed(), with_gateways, wanted=WANTED)
    assert known[0].reason == "Valid"


def test_an_unreadable_spec_is_not_ready() -> None:
    assert [(c.type, c.reason) for c in refused("spec.x: no")] == [
        ("Accepted", "InvalidSpec"),
        ("Ready", "InvalidSpec"),
    ]


@pytest.mark.parametrize(
    ("text", "value"),
    [("1000m", 1), ("0.5", 0.5), ("500m", 0.5), ("1Gi", 2**30), ("2e3", 2000), (4, 4), ("1k", 1000), ("2G", 2e9)]
    + [
        (text, None)
        for text in ("12e3456789012345", "0e12345678901234", "1x", "1K", "1ki", "", "Infinity", "NaN", "1e")
    ],
)
def test_only_text_in_kubernetes_notation_is_a_quantity(text: int | str, value: float | None) -> None:
    assert parse_quantity(text) == value


@pytest.mark.parametrize(
    ("revision", "reasons"),
    [(WANTED, ("NotFound", "CrashLoop")), ("before", ("Fetched", "Starting"))],
)
def test_a_failure_stays_while_a_restarted_pod_shows_no_reason(revision: str, reasons: tuple[str, str]) -> None:
    missing = _pod(trouble="CrashLoop", message="exit code 1", failure_code="ModelNotFound", restarts=1)
    rows = with_transition_times(
        conditions_of(_service(), Observed(pods=(missing,)), SETTINGS, wanted=WANTED), (), generation=1, now="t"
    )
    status = {"conditions": rows, "revision": {"updated": revision}}
    restarting = Observed(pods=(_pod(restarts=2),), status=status)
    assert tuple(_of(type_, _service(), restarting).reason for type_ in ("ModelReady", "WorkloadReady")) == reasons
    ready = Observed(pods=(_pod(restarts=2, is_ready=True),), status=status)
    assert tuple(_of(type_, _service(), ready).reason for type_ in ("ModelReady", "WorkloadReady")) == (
        "Fetched",
        "PodsReady",
    )


def test_a_failing_router_beside_a_ready_one_does_not_block_ready() -> None:
    seen = Observed(pods=(_serving(),), routers={"r": _report(pod_0="e1")}, router_trouble="secret not found")
    assert (_of("RouterReady", _service(), seen).reason, _of("Ready", _service(), seen).status) == (
        "RouterDegraded",
        "True",
    )


def test_a_complete_revision_stays_complete_when_a_pod_dies() -> None:
    row = {"type": "Progressing", "reason": "Complete"}
    before = {"conditions": [row], "revision": {"updated": WANTED}}
    assert _of("Progressing", _service(), Observed(status=before)).reason == "Complete"
    assert (
        _of("Progressing", _service(), Observed(status=before | {"revision": {"updated": "x"}})).reason == "RollingOut"
    )
    assert _of(
        "Progressing", _service(), Observed(status=before, engine_deployments=(_engine_deployment(revision="x"),))
    ).reason == ("RollingOut")


def test_a_transition_keeps_its_time_while_the_status_stays() -> None:
    conditions = [Condition("Ready", "Serving", "2 replicas")]
    before = [{"type": "Ready", "status": "True", "lastTransitionTime": "then"}]
    assert with_transition_times(conditions, before, generation=3, now="now")[0]["lastTransitionTime"] == "then"
    before[0]["status"] = "False"
    assert with_transition_times(conditions, before, generation=3, now="now")[0]["lastTransitionTime"] == "now"


def test_the_gate_opens_once_every_router_has_the_snapshot() -> None:
    pod = _pod(is_ready=True)
    half = Observed(pods=(pod,), routers={"a": _report(pod_0="e1"), "b": _report()})
    both = Observed(pods=(pod,), routers={"a": _report(pod_0="e1"), "b": _report(pod_0="e1")})
    assert list(gate_actions(half, set())) == []
    assert list(gate_actions(Observed(pods=(pod,)), set())) == []
    assert [(g.pod, g.epoch) for g in gate_actions(both, set())] == [("pod-0", "e1")]


def test_a_router_that_restarts_closes_no_gate() -> None:
    for report in (None, _report()):
        seen = Observed(pods=(_serving(),), routers={"a": report, "b": _report(pod_0="e1")})
        assert list(gate_actions(seen, set())) == []
    assert list(gate_actions(Observed(pods=(_serving(),)), set())) == []


def test_a_pod_that_an_older_operator_admitted_is_never_withdrawn() -> None:
    """An older operator stored the epoch elsewhere, so the epoch is unknown until the routers agree."""
    old = _serving(admitted_epoch=None)
    half = Observed(pods=(old,), routers={"a": _report(pod_0="e1"), "b": _report()})
    both = Observed(pods=(old,), routers={"a": _report(pod_0="e1"), "b": _report(pod_0="e1")})
    assert list(gate_actions(half, set())) == []
    assert [gate.epoch for gate in gate_actions(both, set())] == ["e1"]


def test_an_engine_that_restarts_in_its_pod_is_admitted_again() -> None:
    known = Observed(pods=(_serving(),), routers={"a": _report(pod_0="e2")})
    half = Observed(pods=(_serving(),), routers={"a": _report(pod_0="e2"), "b": _report(pod_0="e1")})
    assert [g.epoch for g in gate_actions(known, set())] == ["e2"]
    assert [g.epoch for g in gate_actions(half, set())] == [None]


def test_the_gate_of_a_terminating_pod_is_not_changed() -> None:
    seen = Observed(pods=(_pod(is_ready=True, is_terminating=True),), routers={"a": _report(pod_0="e1")})
    assert list(gate_actions(seen, set())) == []


def test_progress_names_the_revision_that_still_serves() -> None:
    old = EngineDeployment(name="llm-engine-old", uid="u", revision="old", replicas=1, created="1")
    found = _of("Progressing", _service(), Observed(engine_deployments=(old,), pods=(_serving(revision="old"),)))
    assert (found.reason, "old" in found.message) == ("RollingOut", True)


@pytest.mark.parametrize(("last_served", "deleted"), [("old", ["never"]), ("gone", ["old", "never"])])
def test_the_revision_that_served_last_stays_when_its_only_pod_dies(last_served: str, deleted: list[str]) -> None:
    """The new revision may never start, because the API server refuses it, or its image is missing."""
    status = {"revision": {"current": last_served, "updated": WANTED}}
    revisions = (_engine_deployment(name=name, revision=name, uid=name) for name in ("old", "never"))
    pods = (_serving(name="pod-1", revision="old", is_terminating=True), _pod(name="pod-2", revision="old"))
    observed = Observed(engine_deployments=tuple(revisions), pods=pods, status=status)
    found = plan(_service(), observed, SETTINGS, now="now", new_secrets=SECRETS)
    assert [action.name for action in found.actions if isinstance(action, Delete)] == deleted
    assert found.status["revision"].get("current") == (last_served if last_served == "old" else None)


def test_gates_are_set_after_all_other_actions() -> None:
    seen = Observed(pods=(_pod(is_ready=True),), routers={"a": _report(pod_0="e1")})
    assert isinstance(plan(_service(), seen, SETTINGS, now="t", new_secrets=SECRETS).actions[-1], SetGate)


@pytest.mark.parametrize(
    ("wanted", "live", "same"),
    [
        ({"spec": {"a": 1}}, {"spec": {"a": 1, "defaulted": 2}}, True),
        ({"spec": {"a": 1}}, {"spec": {"a": 2}}, False),
        ({"spec": {"list": [{"a": 1}]}}, {"spec": {"list": [{"a": 1, "b": 2}]}}, True),
        ({"spec": {"list": [{"a": 1}]}}, {"spec": {"list": [{"a": 1}, {"a": 2}]}}, False),
        ({"spec": {"cpu": "1000m"}}, {"spec": {"cpu": "1"}}, True),
        ({"spec": {"cpu": "0.5"}}, {"spec": {"cpu": "500m"}}, True),
        ({"spec": {"memory": "1Gi"}}, {"spec": {"memory": "1024Mi"}}, True),
        ({"spec": {"memory": "1Gi"}}, {"spec": {"memory": "1G"}}, False),
        ({"spec": {"on": True}}, {"spec": {"on": 1}}, True),
        ({"spec": {"empty": {}}}, {"spec": {}}, True),
        ({"spec": {"name": "a"}}, {"spec": {"name": "b"}}, False),
    ],
    ids=str,
)
def test_matching_ignores_defaults_and_normalized_quantities(
    wanted: dict[str, Any], live: dict[str, Any], same: bool
) -> None:
    assert matches(wanted, live) is same


def test_a_removed_field_changes_the_digest() -> None:
    before = with_digest({"metadata": {"name": "x"}, "spec": {"a": 1, "b": 2}})
    assert matches(before, before)
    assert not matches(with_digest({"metadata": {"name": "x"}, "spec": {"a": 1}}), before)


def test_every_reason_is_documented() -> None:
    rows = [line.split("|")[1:4] for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    documented = {(condition.strip(" `"), reason.strip(" `")) for condition, reason, _ in rows if "`" in reason}
    assert documented == {(condition, reason) for condition, reasons in REASONS.items() for reason in reasons}


def _memory_error(**fields: int) -> StartupError:
    memory = MemoryInfo(total_bytes=2**30, available_bytes=2**24)
    config = EngineConfig(**fields)
    kv_bytes = set_kv_bytes(config, 2**16)
    model = ModelMemory(weights_bytes=2**20, bytes_per_block=2**16, set_kv_bytes=kv_bytes)
    with pytest.raises(StartupError) as raised:
        size_kv(config, model, memory, max_model_len=4096)
    return raised.value


def _crashed(error: StartupError) -> Observed:
    """The observed state of a pod whose engine failed to start with this error."""
    terminated = {"exitCode": 1, "message": termination_message(error)}
    waiting = {"waiting": {"reason": "CrashLoopBackOff"}}
    container = {"name": ENGINE, "state": waiting, "lastState": {"terminated": terminated}}
    metadata = {"name": "pod-0", "namespace": "default", "uid": "u", "labels": {REVISION_LABEL: WANTED}}
    return Observed(pods=(pod_of({"metadata": metadata, "status": {"containerStatuses": [container]}}),))


@pytest.mark.parametrize(
    ("replicas", "cache", "reason"),
    [
        (2, {"mode": "PVC", "size": "1Gi"}, "ClaimIsForOneNode"),
        (2, {"mode": "PVC", "size": "1Gi", "accessMode": "ReadWriteMany"}, "Valid"),
        (1, {"mode": "PVC", "size": "1Gi"}, "Valid"),
        (2, {"mode": "PVC", "claimName": "models"}, "Valid"),
    ],
    ids=str,
)
def test_replicas_with_a_claim_for_one_node_are_named(replicas: int, cache: dict[str, Any], reason: str) -> None:
    service = _service(replicas=replicas, model={"uri": "hf://Qwen/Qwen3-0.6B", "cache": cache})
    found = _of("Accepted", service, Observed())
    assert (found.reason, found.status) == (reason, "True")


def test_an_engine_without_enough_memory_is_too_large() -> None:
    for error in (
        _memory_error(kv_cache_memory_bytes=2**20),
        _memory_error(kv_cache_memory_bytes=2**28),
        _memory_error(),
    ):
        found = _of("FitsHardware", _service(), _crashed(error))
        assert (found.reason, "MiB" in found.message) == ("TooLarge", True)


@pytest.mark.parametrize("model", ["file:///nowhere", "/nowhere", "pkg://octavo-nothing", "pkg://pytest"])
def test_an_engine_without_its_model_is_not_found(model: str) -> None:
    with pytest.raises(StartupError) as raised:
        resolve_model(model)
    assert _of("ModelReady", _service(), _crashed(raised.value)).reason == "NotFound"


def test_an_engine_without_its_device_has_no_gpu_support() -> None:
    with pytest.raises(StartupError) as raised:
        open_device("cuda")
    found = _of("FitsHardware", _service(), _crashed(raised.value))
    assert (found.reason, "--device cuda" in found.message) == ("NoGpuSupport", True)


def test_the_operator_uses_codes_that_the_engine_has() -> None:
    assert {OUT_OF_MEMORY, MODEL_NOT_FOUND, NO_DEVICE} < set(get_args(StartupCode))


def test_other_start_errors_are_a_crash_loop_with_the_message() -> None:
    seen = _crashed(StartupError("the KV cache does not fit"))
    found = _of("Ready", _service(), seen)
    assert (found.reason, "the KV cache does not fit" in found.message) == ("CrashLoop", True)


SIZE = ModelSize(max_model_len=2048, weights_bytes=270 << 20, kv_bytes=256 << 20, kv_tokens=4096)


def test_the_model_size_stays_in_the_status_within_a_revision() -> None:
    service, report = _service(), RouterReport(pod="r", admitted={"pod-0": "e1"}, sizes={"pod-0": SIZE})
    seen = Observed(pods=(_serving(),), routers={"r": report})
    assert "270 MiB" in _of("FitsHardware", service, seen).message
    assert "4,096 tokens, room for 2.0 requests of full length" in _of("FitsHardware", service, seen).message
    status = plan(service, seen, SETTINGS, now="t", new_secrets=SECRETS).status
    assert status["model"] == {
        "servedNames": ["llm"],
        "maxModelLen": 2048,
        "weightsBytes": 270 << 20,
        "kvBytesPerToken": 65536,
        "maxConcurrentTokens": 4096,
    }
    later = plan(service, Observed(status=status), SETTINGS, now="t", new_secrets=SECRETS).status
    assert later["model"] == status["model"]
    other = read_service(stored(Case("", {"engine": {"maxModelLen": 5}}, name="llm")))
    assert plan(other, Observed(status=status), SETTINGS, now="t", new_secrets=SECRETS).status["model"] == {
        "servedNames": ["llm"]
    }


@pytest.mark.parametrize(
    ("revisions", "shown", "message"),
    [
        ({"pod-0": "c1", "pod-1": "c1"}, "c1", ""),
        ({"pod-0": "c2", "pod-1": "c1", "pod-2": "c1"}, "c1", "different versions of it: c1 (2), c2 (1)"),
        ({"another-0": "c9", "pod-0": "c2"}, "c2", ""),
        ({}, None, ""),
    ],
    ids=str,
)
def test_the_status_has_the_revision_that_most_replicas_serve(
    revisions: dict[str, str], shown: str | None, message: str
) -> None:
    pods = tuple(replace(_serving(), name=f"pod-{number}") for number in range(3))
    reports = {name: RouterReport(pod=name, sizes={"pod-0": SIZE}, revisions=revisions) for name in ("r1", "r2")}
    seen = Observed(pods=pods, routers={**reports, "r3": None})
    status = plan(_service(replicas=3), seen, SETTINGS, now="t", new_secrets=SECRETS).status
    assert status["model"].get("revision") == shown
    assert message in _of("ModelReady", _service(), seen).message
    later = plan(_service(replicas=3), Observed(status=status), SETTINGS, now="t", new_secrets=SECRETS).status
    assert later["model"].get("revision") == shown


def test_the_load_is_that_of_the_services_own_pods() -> None:
    """The router may serve other services, too."""
    loads = {
        "pod-0": Load(running=2, waiting=1, num_blocks=100, num_used_blocks=40),
        "another-0": Load(running=9, waiting=9, num_blocks=100, num_used_blocks=90),
    }
    seen = Observed(pods=(_serving(),), routers={"a": RouterReport(pod="a", loads=loads), "b": None})
    status = plan(_service(), seen, SETTINGS, now="t", new_secrets=SECRETS).status
    assert status["load"] == {"running": 2, "waiting": 1, "kvUsage": "40%"}


@pytest.mark.parametrize(
    ("resources", "reason"),
    [
        ({"limits": {"memory": "1Gi"}}, "TooLarge"),
        ({"limits": {"memory": "3Gi"}}, "NotChecked"),
        ({}, "NotChecked"),
        ({"limits": {"memory": "1Gi", "nvidia.com/gpu": 1}}, "NotChecked"),
        ({"limits": {"memory": "3Gi", "amd.com/gpu": 1}}, "NoGpuSupport"),
    ],
    ids=str,
)
def test_a_spec_that_cannot_fit_is_too_large_before_the_start(resources: dict[str, Any], reason: str) -> None:
    service = _service(engine={"kvCacheMemory": "1536Mi", "swapSpace": "512Mi"}, resources=resources)
    found = _of("FitsHardware", service, Observed())
    assert found.reason == reason
    assert reason != "TooLarge" or "take 2,048 MiB, and the container's memory limit" in found.message
    assert reason != "TooLarge" or "1,024 MiB" in found.message


@pytest.mark.parametrize(("tensor", "reason"), [(1, "NotChecked"), (2, "TooLarge")])
def test_the_kv_cache_of_every_rank_counts(tensor: int, reason: str) -> None:
    spec = {"parallelism": {"tensor": tensor}, "resources": {"limits": {"memory": "3Gi"}}}
    found = _of("FitsHardware", _service(engine={"kvCacheMemory": "2Gi"}, **spec), Observed())
    assert found.reason == reason
    assert reason != "TooLarge" or "kvCacheMemory 2Gi for each of 2 ranks take 4,096 MiB" in found.message
