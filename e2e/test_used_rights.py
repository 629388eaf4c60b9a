"""The audit log of the whole run: operator, routers and engines used exactly the rights in docs/reference/rbac.md."""

import re
from collections.abc import Sequence, Set
from datetime import datetime

import psutil
import pytest
from octavo_e2e.audit import AuditLog
from octavo_e2e.cluster import SYSTEM, Cluster, Raw, exposed
from octavo_testing.audit_log import AuditLog as Log
from octavo_testing.audit_log import Call
from octavo_testing.chart import render
from octavo_testing.rbac import Right, documented_rights, granted_rights, refused_calls, used_rights

pytestmark = pytest.mark.last

BEGAN_S = psutil.Process().create_time()
ACCOUNTS = "system:serviceaccount:"
OPERATOR = f"{ACCOUNTS}{SYSTEM}:octavo-operator"
OPERATOR_SECTIONS = (
    "The operator, in its own namespace",
    "The operator, over services",
    "The operator, for the metrics API",
)
#: Of the Role extension-apiserver-authentication-reader, which every cluster has.
READER = Right("", "configmaps", "get")
OPERATOR_ROLES = ("octavo-operator", "octavo-operator-own")
CLAIM = {"uri": "hf://a/b", "cache": {"mode": "PVC", "size": "1Gi"}}


@pytest.fixture(scope="module")
def calls(cluster: Cluster, smollm2: str, namespace: str, audit: AuditLog) -> list[Call]:
    """The audited calls of this run, after all kinds of children were created and deleted."""
    scaling = {"maxReplicas": 1, "provider": "HPA"}
    cluster.serve(namespace, "host", replicas=0, model=CLAIM, autoscaling=scaling, **exposed("rights.example.test"))
    cluster.serve(namespace, "guest", replicas=0)
    cluster.serve(namespace, "groups", replicas=0, parallelism={"tensor": 2, "nodes": 2})
    for name in ("host", "guest", "groups"):
        cluster.until_reason(namespace, name, "NoReplicas", of="ReplicasAdmitted")
    cluster.serve(namespace, "host", replicas=0, networkPolicy={"enabled": False})
    cluster.serve(namespace, "groups", replicas=0)
    cluster.until("LeaderWorkerSet", namespace, lambda found: not found, within_s=60)
    shared = {"router": {"ref": {"name": "host"}}}
    cluster.serve(namespace, "guest", replicas=0, **shared)
    gone = {
        "PodDisruptionBudget": "guest-router",
        "ConfigMap": "guest-router",
        "Ingress": "host",
        "NetworkPolicy": "host-router",
        "HorizontalPodAutoscaler": "host",
    }
    for kind, name in gone.items():
        _until_gone(cluster, namespace, kind, name)
    scaling = {"minReplicas": 2, "maxReplicas": 2, "provider": "Operator"}
    cluster.serve(namespace, "scaled", replicas=1, autoscaling=scaling)
    cluster.until_one(
        "InferenceService", namespace, "scaled", lambda found: found["spec"]["replicas"] == 2, within_s=60
    )
    cluster.until_ready(smollm2, "smollm2")
    return [call for path in audit.files() for call in Log(path).calls() if call.asked_s > BEGAN_S]


def _is_scaled(found: Sequence[Raw]) -> bool:
    return {"scaled": 2}.items() <= {o["metadata"]["name"]: o["spec"]["replicas"] for o in found}.items()


def _until_gone(cluster: Cluster, namespace: str, kind: str, name: str) -> None:
    cluster.until(kind, namespace, lambda found: name not in [o["metadata"]["name"] for o in found], within_s=60)


def _of(calls: list[Call], accounts: str) -> list[Call]:
    found = [call for call in calls if re.fullmatch(accounts, call.user)]
    assert found, f"the audit log has no calls of {accounts}"
    return found


def _refused_except(known: Set[Right], calls: list[Call]) -> list[Call]:
    return [call for call in refused_calls(calls) if Right(call.group, call.resource, call.verb) not in known]


def test_the_table_has_every_right_that_the_operator_used(calls: list[Call]) -> None:
    """Refused calls count, too: uninstalling removes the rights before the operator has stopped."""
    theirs = _of(calls, OPERATOR)
    own, others, metrics = map(documented_rights, OPERATOR_SECTIONS)
    own, others = own | metrics, others | metrics | {READER: ""}
    assert sorted(used_rights(call for call in theirs if call.namespace == SYSTEM) - own.keys() - others.keys()) == []
    assert sorted(used_rights(call for call in theirs if call.namespace != SYSTEM) - others.keys()) == []
    assert _refused_except(own.keys() | others.keys(), theirs) == []


def test_every_right_was_used_or_has_a_reason(calls: list[Call], cluster: Cluster) -> None:
    born = cluster.find("Namespace", None, f"kubernetes.io/metadata.name={SYSTEM}")[0]["metadata"]["creationTimestamp"]
    if datetime.fromisoformat(born).timestamp() < BEGAN_S:
        pytest.skip("the installation is older than this run, so its Lease and key existed already")
    roles = [m for m in render({}) if m["kind"] in ("Role", "ClusterRole")]
    rights = granted_rights(r for m in roles if m["metadata"]["name"] in OPERATOR_ROLES for r in m["rules"])
    tables = map(documented_rights, OPERATOR_SECTIONS)
    excused = {right for table in tables for right, reason in table.items() if reason}
    assert sorted(rights - used_rights(_of(calls, OPERATOR)) - excused) == []


def test_routers_list_endpoint_slices_and_engines_call_nothing(calls: list[Call]) -> None:
    """A newly started API server may refuse calls at first that it allows later."""
    theirs, known = _of(calls, f"{ACCOUNTS}e2e-[^:]+:[^:]+-router"), documented_rights("A router")
    assert _refused_except(known.keys(), theirs) == []
    assert used_rights(theirs) == known.keys()
    assert [call for call in calls if re.fullmatch(f"{ACCOUNTS}e2e-[^:]+:[^:]+-engine", call.user)] == []
