"""Compare the rights that operator, routers and engines used in this whole run with docs/reference/rbac.md."""

import re
from collections.abc import Set
from datetime import datetime

import psutil
import pytest
from octavo_e2e.audit import AuditLog
from octavo_e2e.cluster import SYSTEM, Cluster, exposed
from octavo_testing.audit_log import AuditLog as Log
from octavo_testing.audit_log import Call
from octavo_testing.chart import render
from octavo_testing.rbac import Right, documented, granted, refused, used

pytestmark = pytest.mark.last

BEGAN_S = psutil.Process().create_time()
ACCOUNTS = "system:serviceaccount:"
OPERATOR = f"{ACCOUNTS}{SYSTEM}:octavo-operator"
OPERATOR_ROLES = ("octavo-operator", "octavo-operator-own")
CLAIM = {"uri": "hf://a/b", "cache": {"mode": "PVC", "size": "1Gi"}}


@pytest.fixture(scope="module")
def calls(cluster: Cluster, smollm2: str, namespace: str, audit: AuditLog) -> list[Call]:
    """After everything that a service can have was there and has gone, in this run's own accounts."""
    cluster.serve(namespace, "host", replicas=0, model=CLAIM, **exposed("rights.example.test"))
    cluster.serve(namespace, "guest", replicas=0)
    for name in ("host", "guest"):
        cluster.until_reason(namespace, name, "NoReplicas", of="ReplicasAdmitted")
    cluster.serve(namespace, "host", replicas=0, networkPolicy={"enabled": False})
    shared = {"router": {"ref": {"name": "host"}}}
    cluster.serve(namespace, "guest", replicas=0, **shared)
    gone = {
        "RoleBinding": "guest-router",
        "PodDisruptionBudget": "guest-router",
        "Ingress": "host",
        "NetworkPolicy": "host-router",
    }
    for kind, name in gone.items():
        _until_gone(cluster, namespace, kind, name)
    cluster.until_ready(smollm2, "smollm2")
    return [call for path in audit.files() for call in Log(path).calls() if call.asked_s > BEGAN_S]


def _until_gone(cluster: Cluster, namespace: str, kind: str, name: str) -> None:
    cluster.until(kind, namespace, lambda found: name not in [o["metadata"]["name"] for o in found], within_s=60)


def _of(calls: list[Call], accounts: str) -> list[Call]:
    found = [call for call in calls if re.fullmatch(accounts, call.user)]
    assert found, f"the audit log has nothing of {accounts}"
    return found


def _refused_beside(known: Set[Right], calls: list[Call]) -> list[Call]:
    return [call for call in refused(calls) if Right(call.group, call.resource, call.verb) not in known]


def test_all_that_the_operator_asked_for_is_in_the_table(calls: list[Call]) -> None:
    """What was refused, too: whoever uninstalls takes its rights away before it has ended."""
    theirs = _of(calls, OPERATOR)
    own, others = documented("The operator, in its own namespace"), documented("The operator, over services")
    assert sorted(used(call for call in theirs if call.namespace == SYSTEM) - own.keys() - others.keys()) == []
    assert sorted(used(call for call in theirs if call.namespace != SYSTEM) - others.keys()) == []
    assert _refused_beside(own.keys() | others.keys(), theirs) == []


def test_every_right_of_the_operator_was_used_or_its_reason_stands_beside_it(
    calls: list[Call], cluster: Cluster
) -> None:
    born = cluster.find("Namespace", None, f"kubernetes.io/metadata.name={SYSTEM}")[0]["metadata"]["creationTimestamp"]
    if datetime.fromisoformat(born).timestamp() < BEGAN_S:
        pytest.skip("the installation was there before this run: its Lease and its key had been made")
    roles = [m for m in render({}) if m["kind"] in ("Role", "ClusterRole")]
    rights = granted(r for m in roles if m["metadata"]["name"] in OPERATOR_ROLES for r in m["rules"])
    table = documented("The operator, over services") | documented("The operator, in its own namespace")
    excused = {right for right, reason in table.items() if reason}
    assert sorted(rights - used(_of(calls, OPERATOR)) - excused) == []


def test_routers_read_endpoint_slices_and_engines_ask_for_nothing(calls: list[Call]) -> None:
    """An API server that has only just started refuses at first what it allows then."""
    theirs, known = _of(calls, f"{ACCOUNTS}e2e-[^:]+:[^:]+-router"), documented("A router")
    assert _refused_beside(known.keys(), theirs) == []
    assert used(theirs) == known.keys()
    assert [call for call in calls if re.fullmatch(f"{ACCOUNTS}e2e-[^:]+:[^:]+-engine", call.user)] == []
