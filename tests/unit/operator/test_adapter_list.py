"""`spec.adapters`: the list that engines follow, what mounts it, and the state of each adapter in the status."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from octavo_operator.desired.adapters import ADAPTERS_FILE, adapter_list, desired_adapters, digest_of_list
from octavo_operator.desired.children import desired_children
from octavo_operator.desired.engine import desired_engine, engine_revision
from octavo_operator.observed import AdapterReport, Observed, Pod, RouterReport, ServiceBehind
from octavo_operator.plan.actions import Apply
from octavo_operator.plan.adapter_status import EVENTS, adapter_events, adapter_rows, notify_actions
from octavo_operator.plan.plan import plan
from octavo_operator.service import InferenceService, Settings, read_service
from octavo_server.api.adapter_file import read_adapter_file
from octavo_testing.infsvc_cases import Case, stored
from octavo_testing.plan_cluster import SECRETS, PlanCluster, settle

SETTINGS = Settings(engine_image="engine:1", router_image="router:1", operator_namespace="octavo-system")
DOCUMENT = Path(__file__).parents[3] / "docs" / "reference" / "conditions.md"
NAMES = ("a", "b")


def _service(*names: str, **spec: Any) -> InferenceService:
    adapters = [{"name": name, "uri": f"hf://team/{name}"} for name in names]
    return read_service(stored(Case("", {"adapters": adapters} | spec, name="llm")))


def _pod(name: str, *, serves: bool = True) -> Pod:
    return Pod(name=name, uid=name, revision="r", is_ready=serves, is_pod_ready=serves, is_admitted=serves)


def _observed(*routers: dict[str, AdapterReport], pods: tuple[str, ...] = ("p", "q"), **fields: Any) -> Observed:
    """`routers`: what each reports about the adapters of replicas."""
    reports = {f"router-{i}": RouterReport(pod=f"router-{i}", adapters=found) for i, found in enumerate(routers)}
    return Observed(pods=tuple(map(_pod, pods)), routers=reports, **fields)


def _report(digest: str | None = None, **missing: str) -> AdapterReport:
    """The report of a replica that follows the list of `NAMES`."""
    return AdapterReport(digest or digest_of_list(adapter_list(_service(*NAMES), ())), missing)


def _reasons(observed: Observed) -> list[str]:
    return [row["reason"] for row in adapter_rows(_service(*NAMES), observed)]


def test_engines_follow_a_list_in_a_mounted_config_map(tmp_path: Path) -> None:
    """The server reads the list as it was written, and reports the digest by which the operator knows it."""
    service = _service("support", "legal")
    (config,) = [m for m in desired_children(service, SETTINGS) if m["metadata"]["name"] == "llm-adapters"]
    file = tmp_path / "adapters.json"
    file.write_text(config["data"][ADAPTERS_FILE])
    listed = read_adapter_file(file)
    assert (listed.uris, listed.faults) == ({"support": "hf://team/support", "legal": "hf://team/legal"}, {})
    assert listed.digest == digest_of_list(adapter_list(service, ()))
    pod = desired_engine(service, SETTINGS, replicas=1)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert {"--enable-lora", "--lora-modules-file=/etc/octavo/adapters/adapters.json"} <= set(container["args"])
    assert {"name": "adapters", "mountPath": "/etc/octavo/adapters", "readOnly": True} in container["volumeMounts"]
    assert {"name": "adapters", "configMap": {"name": "llm-adapters"}} in pod["volumes"]


def test_only_setting_the_field_is_a_rollout() -> None:
    without = read_service(stored(Case("", {}, name="llm")))
    revisions = [engine_revision(service, SETTINGS) for service in (_service(), _service("a"), _service("b", "c"))]
    assert len({*revisions}) == 1
    assert engine_revision(without, SETTINGS) != revisions[0]
    assert desired_adapters(without, ()) == []


def test_a_changed_list_writes_the_config_map_only_and_a_removed_field_deletes_it() -> None:
    cluster = PlanCluster()
    settle(cluster, _service("a"), SETTINGS)
    config, pods = cluster.objects["ConfigMap", "llm-adapters"], {*cluster.pods}
    settle(cluster, _service("a", "b"), SETTINGS)
    assert cluster.objects["ConfigMap", "llm-adapters"]["data"] != config["data"]
    assert {*cluster.pods} == pods
    settle(cluster, read_service(stored(Case("", {}, name="llm"))), SETTINGS)
    assert ("ConfigMap", "llm-adapters") not in cluster.objects
    assert pods.isdisjoint(cluster.pods)


def test_a_claim_is_where_engines_mount_it() -> None:
    listed = [{"name": "a", "uri": "pvc://models/adapters/a"}]
    service = _service(model={"uri": "pvc://models/llama"}, adapters=listed)
    assert json.loads(adapter_list(service, ())) == [{"name": "a", "uri": "/models/adapters/a"}]


def test_routers_know_adapters_that_no_replica_holds() -> None:
    behind = {"llm": ServiceBehind(("llm",), ("a",), sleeps=True)}
    made = {
        (m["kind"], m["metadata"]["name"]): m for m in desired_children(_service("a"), SETTINGS, behind_router=behind)
    }
    (listed,) = json.loads(made["ConfigMap", "llm-router"]["data"]["services.json"])["services"]
    assert listed == {"name": "llm", "models": ["llm"], "adapters": ["a"], "sleeps": True}


@pytest.mark.parametrize(
    ("observed", "reasons"),
    [
        (_observed({"p": _report(), "q": _report()}), ["Loaded", "Loaded"]),
        (_observed({"p": _report()}), ["Loading", "Loading"]),
        (_observed({"p": _report(), "q": _report(b="")}), ["Loaded", "Loading"]),
        (_observed({"p": _report(), "q": _report(b="rank 64")}), ["Loaded", "LoadFailed"]),
        (_observed({"p": _report(), "q": _report("old", b="rank 64")}), ["Loading", "Loading"]),
        (_observed({"p": _report()}, {"q": _report()}), ["Loaded", "Loaded"]),
        (_observed({"p": _report(b="rank 64")}, pods=("q",)), ["Loading", "Loading"]),
        (_observed({"p": _report()}, pods=()), ["NoReplicas", "NoReplicas"]),
        (_observed(pods=("p",)), ["Loading", "Loading"]),
    ],
)
def test_an_adapter_is_ready_when_all_serving_replicas_have_loaded_the_present_list(
    observed: Observed, reasons: list[str]
) -> None:
    assert _reasons(observed) == reasons
    assert [row["ready"] for row in adapter_rows(_service(*NAMES), observed)] == [r == "Loaded" for r in reasons]


def test_a_changed_list_leaves_the_rows_of_other_adapters_until_replicas_report() -> None:
    """An adapter that serves stays ready, and a failure causes no second event."""
    service, old = _service(*NAMES), _report("old")
    rows = adapter_rows(service, _observed({"p": _report(b="rank 64"), "q": _report()}))
    unread = _observed({"p": old, "q": old}, status={"adapters": rows})
    assert adapter_rows(service, unread) == rows
    assert adapter_rows(service, _observed({"p": _report(a="rank 64"), "q": old}, status={"adapters": rows})) == [
        rows[0] | {"ready": False, "reason": "LoadFailed", "message": "p: rank 64"},
        rows[1],
    ]
    moved = [row | {"uri": "hf://team/moved"} for row in rows]
    unread = _observed({"p": old, "q": old}, status={"adapters": moved})
    assert [row["reason"] for row in adapter_rows(service, unread)] == ["Loading", "Loading"]


def test_a_message_names_the_replica_and_the_reason() -> None:
    rows = adapter_rows(_service(*NAMES), _observed({"p": _report(), "q": _report(b="rank 64")}))
    assert [row["message"] for row in rows] == ["2 of 2 replicas have loaded it", "q: rank 64"]


def test_a_name_of_another_service_stops_only_this_adapter() -> None:
    service, taken = _service(*NAMES), {"b": "other"}
    digest = digest_of_list(adapter_list(service, taken))
    assert [entry["name"] for entry in json.loads(adapter_list(service, taken))] == ["a"]
    observed = _observed({"p": AdapterReport(digest, {})}, pods=("p",), taken_models=taken)
    planned = plan(service, observed, SETTINGS, now="t", new_secrets=SECRETS)
    assert [row["reason"] for row in planned.status["adapters"]] == ["Loaded", "NameTaken"]
    assert "InferenceService other" in planned.status["adapters"][1]["message"]
    assert planned.status["conditions"][0]["reason"] == "Valid"


def test_a_pod_with_another_list_is_notified_once_of_the_present_one() -> None:
    """The kubelet then updates the mounted file at once."""
    service, old = _service(*NAMES), _report("old")
    digest = _report().digest
    observed = _observed({"p": old, "q": _report()}, {"p": old}, pods=("p", "q", "starting"))
    assert [(a.pod, a.uid, a.digest) for a in notify_actions(service, observed)] == [("p", "p", digest)]
    notified = replace(observed, pods=tuple(replace(pod, adapter_list=digest) for pod in observed.pods))
    without = read_service(stored(Case("", {}, name="llm")))
    assert [*notify_actions(service, notified), *notify_actions(without, observed)] == []
    actions = plan(service, observed, SETTINGS, now="t", new_secrets=SECRETS).actions
    kinds = [a.manifest["kind"] if isinstance(a, Apply) else type(a).__name__ for a in actions]
    assert kinds.index("ConfigMap") < kinds.index("NotifyPod")


def test_a_failure_is_one_event() -> None:
    failed = _observed({"p": _report(b="rank 64")}, pods=("p",))
    first = plan(_service(*NAMES), failed, SETTINGS, now="t", new_secrets=SECRETS)
    found = [event for event in first.events if event.action == "LoadAdapter"]
    assert [(e.type, e.reason, e.note) for e in found] == [
        ("Warning", "AdapterLoadFailed", "adapter b: p: rank 64"),
    ]
    rows = first.status["adapters"]
    assert [*adapter_events(rows, rows)] == []
    assert [*adapter_events(rows[:1], ())] == []


def test_the_status_has_no_adapters_without_the_field() -> None:
    without = read_service(stored(Case("", {}, name="llm")))
    for service in (without, _service()):
        assert "adapters" not in plan(service, Observed(), SETTINGS, now="t", new_secrets=SECRETS).status


def test_every_event_is_documented() -> None:
    rows = [line.split("|")[1].strip(" `") for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    assert {*EVENTS.values()} <= {*rows}
