"""The PersistentVolumeClaim for a model cache: who owns it, what outlives the service, and what never changes."""

import copy
from typing import Any

import pytest
from octavo_operator.names import engine_deployment
from octavo_operator.observed import Observed
from octavo_operator.plan.actions import Apply, Delete
from octavo_operator.plan.plan import Plan, plan
from octavo_operator.service import InferenceService, Settings, read_service
from octavo_testing.infsvc_cases import Case, stored
from octavo_testing.plan_cluster import SECRETS

SETTINGS = Settings(engine_image="engine:1", router_image="router:1", operator_namespace="octavo-system")
OTHER = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "theirs", "uid": "u9", "controller": True}
CLAIM = ("PersistentVolumeClaim", "llm-models")


def _service(replicas: int = 1, **cache: Any) -> InferenceService:
    cached = {"mode": "PVC", "size": "10Gi"} | cache
    model = {"uri": "hf://Qwen/Qwen3-0.6B", "cache": {k: v for k, v in cached.items() if v is not None}}
    return read_service(stored(Case("", {"model": model, "replicas": replicas}, name="llm")))


def _plan(service: InferenceService, live: dict[str, Any] | None = None, **fields: Any) -> Plan:
    observed = Observed(children={} if live is None else {CLAIM: live}, **fields)
    return plan(service, observed, SETTINGS, now="t", new_secrets=SECRETS)


def _applied(planned: Plan) -> dict[str, Any] | None:
    """The claim that the plan applies."""
    found = [a.manifest for a in planned.actions if isinstance(a, Apply) and a.manifest["kind"] == CLAIM[0]]
    return dict(found[0]) if found else None


def _live(service: InferenceService, **spec: Any) -> dict[str, Any]:
    """The claim of a service as the API server stores it."""
    manifest = _applied(_plan(service))
    assert manifest is not None
    live = copy.deepcopy(manifest)
    live["metadata"] |= {"uid": "claim", "resourceVersion": "1"}
    live["spec"] = {"storageClassName": "standard", "volumeMode": "Filesystem"} | live["spec"] | spec
    return live


def _condition(planned: Plan, type_: str) -> dict[str, Any]:
    found: dict[str, Any] = next(row for row in planned.status["conditions"] if row["type"] == type_)
    return found


@pytest.mark.parametrize(("policy", "is_owned"), [(None, True), ("Delete", True), ("Retain", False)])
def test_a_retained_claim_has_no_owner(policy: str | None, is_owned: bool) -> None:
    manifest = _applied(_plan(_service(retentionPolicy=policy)))
    assert manifest is not None
    assert ("ownerReferences" in manifest["metadata"]) is is_owned


@pytest.mark.parametrize(("before", "after"), [("Delete", "Retain"), ("Retain", "Delete")])
def test_the_policy_of_a_live_claim_can_be_switched(before: str, after: str) -> None:
    """Server-side apply removes the owner, which the operator set before, if the manifest lacks it."""
    live = _live(_service(retentionPolicy=before))
    manifest = _applied(_plan(_service(retentionPolicy=after), live))
    assert manifest is not None
    assert manifest["metadata"].get("ownerReferences", []) == ([_service().owner] if after == "Delete" else [])
    assert _applied(_plan(_service(retentionPolicy=after), _live(_service(retentionPolicy=after)))) is None


def test_a_retained_claim_is_adopted_by_the_next_service_of_its_name() -> None:
    live = _live(_service(retentionPolicy="Retain"))
    assert _applied(_plan(_service(retentionPolicy="Retain"), live)) is None
    manifest = _applied(_plan(_service(), live))
    assert manifest is not None
    assert manifest["metadata"]["ownerReferences"] == [_service().owner]


@pytest.mark.parametrize("metadata", [{"labels": {}}, {"ownerReferences": [OTHER]}], ids=str)
def test_a_claim_of_another_owner_is_neither_adopted_nor_changed(metadata: dict[str, Any]) -> None:
    live = _live(_service(retentionPolicy="Retain"))
    live["metadata"] |= metadata
    planned = _plan(_service(), live)
    assert _applied(planned) is None
    assert _condition(planned, "ChildrenApplied")["reason"] == "NameTaken"


def test_no_policy_deletes_the_claim_of_a_running_service() -> None:
    service = read_service(stored(Case("", {}, name="llm")))
    planned = _plan(service, _live(_service()))
    assert not any(isinstance(action, Delete) for action in planned.actions)


@pytest.mark.parametrize(
    ("cache", "spec"),
    [
        ({"accessMode": "ReadWriteMany"}, {"accessModes": ["ReadWriteOnce"]}),
        ({"storageClassName": "fast"}, {"storageClassName": "standard"}),
        ({"storageClassName": "fast"}, {"storageClassName": ""}),
        ({"storageClassName": ""}, {"storageClassName": "standard"}),
        ({"size": "5Gi"}, {"resources": {"requests": {"storage": "10Gi"}}}),
        ({"accessMode": "ReadWriteMany", "size": "20Gi"}, {"accessModes": ["ReadWriteOnce"]}),
    ],
    ids=str,
)
def test_fields_that_kubernetes_fixes_are_never_applied_to_a_live_claim(
    cache: dict[str, Any], spec: dict[str, Any]
) -> None:
    """A claim from before, retained or left by an earlier mode, is used as it is; the API server would refuse it."""
    live = _live(_service(retentionPolicy="Retain"), **spec)
    planned = _plan(_service(retentionPolicy="Retain", **cache), live)
    manifest = _applied(planned) or live
    kept = {"accessModes", "storageClassName"}
    assert {k: v for k, v in manifest["spec"].items() if k in kept}.items() <= live["spec"].items()
    assert manifest["spec"]["resources"]["requests"]["storage"] == ("20Gi" if cache.get("size") == "20Gi" else "10Gi")
    accepted = _condition(planned, "Accepted")
    assert accepted["reason"] == "ClaimDiffers"
    assert all(f"cache.{name}" in accepted["message"] for name in cache if cache[name] != "20Gi")


@pytest.mark.parametrize(("name", "spec"), [("", {"storageClassName": ""}), ("fast", {"storageClassName": "fast"})])
def test_a_claim_has_the_class_of_the_spec(name: str, spec: dict[str, Any]) -> None:
    """An empty one is no class, which differs from the cluster's default."""
    manifest = _applied(_plan(_service(storageClassName=name)))
    assert manifest is not None
    assert manifest["spec"].items() >= spec.items()
    manifest = _applied(_plan(_service()))
    assert manifest is not None
    assert "storageClassName" not in manifest["spec"]


def test_a_larger_size_is_applied_to_a_live_claim() -> None:
    planned = _plan(_service(size="20Gi"), _live(_service()))
    manifest = _applied(planned)
    assert manifest is not None
    assert manifest["spec"]["resources"]["requests"]["storage"] == "20Gi"
    assert _condition(planned, "Accepted")["reason"] == "Valid"


@pytest.mark.parametrize(
    ("asked", "live", "reason"),
    [
        ("ReadWriteMany", "ReadWriteOnce", "ClaimIsForOneNode"),
        ("ReadWriteOnce", "ReadWriteMany", "ClaimDiffers"),
        (None, "ReadWriteOnce", "ClaimIsForOneNode"),
        ("ReadWriteMany", "ReadWriteMany", "Valid"),
    ],
)
def test_the_live_claim_decides_whether_it_is_for_one_node(asked: str | None, live: str, reason: str) -> None:
    claim = _live(_service(), accessModes=[live])
    assert _condition(_plan(_service(2, accessMode=asked), claim), "Accepted")["reason"] == reason


def test_an_accepted_difference_does_not_block_ready() -> None:
    planned = _plan(_service(accessMode="ReadWriteMany"), _live(_service()))
    assert _condition(planned, "Accepted")["status"] == "True"
    assert engine_deployment("llm", planned.status["revision"]["updated"]) in str(planned.actions)
