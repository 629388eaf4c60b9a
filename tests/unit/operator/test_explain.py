"""An explanation has the cause of `Ready`, the documented meaning and remedy, and commands for more details."""

import re
from pathlib import Path
from typing import Any

import pytest
from octavo_operator.explain.command import lines_of, table_of
from octavo_operator.explain.explanation import Explanation, explain_service
from octavo_operator.explain.meanings import MEANINGS
from octavo_operator.plan.conditions import (
    INFORMATION,
    NON_BLOCKING,
    OF_REVISION,
    REASONS,
    Condition,
    ready,
    with_transition_times,
)

DOCUMENT = Path(__file__).parents[3] / "docs" / "reference" / "conditions.md"
ROW = re.compile(r"\| `\w+` \| `\w+` \|")
NOW = "2026-11-21T20:00:00Z"


def test_the_documentation_has_the_same_meanings(request: pytest.FixtureRequest) -> None:
    """`--update-golden` writes the table of the page."""
    table = [
        f"| `{condition}` | `{reason}` | {meaning.text} | {meaning.remedy}{' ' if meaning.remedy else ''}|"
        for condition, reasons in MEANINGS.items()
        for reason, meaning in reasons.items()
    ]
    lines = DOCUMENT.read_text().splitlines()
    rows = [line for line in lines if ROW.match(line)]
    if request.config.getoption("--update-golden"):
        first = lines.index(rows[0])
        kept = [line for line in lines if not ROW.match(line)]
        DOCUMENT.write_text("\n".join([*kept[:first], *table, *kept[first:]]) + "\n")
        rows = table
    assert rows == table, f"if this is meant: pytest {request.path} --update-golden"


def test_every_reason_has_a_meaning() -> None:
    assert {c: set(reasons) for c, reasons in MEANINGS.items()} == {c: set(reasons) for c, reasons in REASONS.items()}


def service(*reasons: tuple[str, str], generation: int = 1, **metadata: Any) -> dict[str, Any]:
    """A service with the status that the operator writes; `reasons` replace the reasons of a serving service."""
    chosen = {name: next(r for r, status in known.items() if status == "True") for name, known in REASONS.items()}
    if any(name in OF_REVISION and reason not in NON_BLOCKING for name, reason in reasons):
        chosen["ReplicasAdmitted"] = "WaitingForRouter"
    chosen |= dict(reasons)
    usual = [(n, r) for n, r in chosen.items() if n not in ("Ready", *INFORMATION) or (n, r) in reasons]
    conditions = [Condition(n, r, f"about {n}") for n, r in usual]
    rows = with_transition_times([*conditions, ready(conditions, message="it serves")], (), generation=1, now=NOW)
    status = {"conditions": rows, "observedGeneration": 1, "url": "http://llm", "replicas": {"summary": "1/2"}}
    about = {"name": "llm", "namespace": "team", "generation": generation, **metadata}
    return {"metadata": about, "spec": {"model": {"uri": "hf://org/m"}}, "status": status}


def pod(name: str, component: str = "engine", **status: Any) -> dict[str, Any]:
    about = {"name": name, "uid": name, "labels": {"app.kubernetes.io/component": component}}
    return {"metadata": about, "status": status}


def container(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "restartCount": 0, "state": {}, **fields}


FETCH_LOG = "10:00 INFO fetching\noctavo: org/m: no such model on the hub"
FAILED_FETCH = container("fetch", state={"terminated": {"exitCode": 1, "message": FETCH_LOG}})
FETCHING = container("fetch", state={"running": {}})
CRASHED = container("engine", restartCount=4, lastState={"terminated": {"exitCode": 1, "message": "octavo: bad flag"}})


def text(found: Explanation) -> str:
    return "\n".join(lines_of(found))


def test_a_ready_worker_serves_without_a_gate() -> None:
    """No router sends requests to it, and none admits it."""
    for component, state in (("engine-worker", "serves"), ("engine", "waits for the router")):
        conditions = [{"type": "ContainersReady", "status": "True"}]
        assert explain_service(service(), [pod("x", component, conditions=conditions)]).pods[0].state == state


def test_a_serving_service_is_explained_as_ready() -> None:
    found = explain_service(service())
    assert found.is_ready
    assert found.cause is None
    assert "Ready: it serves requests at http://llm" in text(found)
    assert found.commands == ()


CAUSES = [(c, r) for c, known in REASONS.items() for r, status in known.items() if status != "True"]


@pytest.mark.parametrize(
    ("condition", "reason"), [cause for cause in CAUSES if cause[0] not in ("Progressing", "Ready", "ScalingReady")]
)
def test_each_cause_is_the_one_of_ready_with_its_meaning(condition: str, reason: str) -> None:
    raw = service((condition, reason))
    found = explain_service(raw)
    row = next(c for c in raw["status"]["conditions"] if c["type"] == "Ready")
    assert found.is_ready == (row["status"] == "True")
    if found.cause is None:
        assert reason in ("NotChecked", "Retrying")
        return
    assert (
        (found.cause.reason, found.cause.message) == (row["reason"], row["message"]) == (reason, f"about {condition}")
    )
    assert found.cause.meaning == MEANINGS[condition][reason].text
    assert f"{condition} {reason}" in text(found)
    assert "<- here" in text(found)


@pytest.mark.parametrize("reason", REASONS["ScalingReady"])
def test_the_reason_for_the_number_of_replicas_is_shown_and_is_no_cause(reason: str) -> None:
    found = explain_service(service(("ScalingReady", reason)))
    assert found.is_ready
    assert f"Autoscaling: {reason}." in text(found)
    assert "about ScalingReady" in text(found)
    assert (MEANINGS["ScalingReady"][reason].remedy != "") == ("Remedy: " in text(found))


def test_a_false_condition_is_the_cause_before_an_unknown_one() -> None:
    raw = service(("ModelReady", "Fetching"), ("WorkloadReady", "CrashLoop"), ("RouterReady", "RouterFailed"))
    found = explain_service(raw)
    assert found.cause is not None
    assert found.cause.reason == "CrashLoop"
    assert found.cause.reason == next(c["reason"] for c in raw["status"]["conditions"] if c["type"] == "Ready")


def test_a_new_revision_that_fails_is_no_cause_while_replicas_of_the_old_one_serve() -> None:
    reasons = (("WorkloadReady", "CrashLoop"), ("ReplicasAdmitted", "AllAdmitted"))
    found = explain_service(service(*reasons, ("Progressing", "RollingOut")))
    assert found.is_ready
    assert "NO  WorkloadReady CrashLoop" in text(found)
    assert not explain_service(service(*reasons, ("Progressing", "Complete"))).is_ready


def test_explanations_have_messages_and_commands_of_pods() -> None:
    pods = [
        pod("llm-router-1", "router", conditions=[{"type": "Ready", "status": "True"}]),
        pod("llm-engine-1", containerStatuses=[CRASHED]),
    ]
    found = explain_service(service(("WorkloadReady", "CrashLoop")), pods)
    assert [(p.name, p.state, p.message, p.restarts) for p in found.pods] == [
        ("llm-engine-1", "CrashLoop", "exit code 1: octavo: bad flag", 4),
        ("llm-router-1", "serves", "", 0),
    ]
    assert found.commands == (
        "kubectl logs llm-engine-1 --previous -n team",
        "kubectl describe pod llm-engine-1 -n team",
        "kubectl describe infsvc llm -n team",
    )
    assert "llm-engine-1 (engine): CrashLoop, restarted 4 times\n      exit code 1: octavo: bad flag" in text(found)


def test_a_failed_fetch_has_its_last_log_line_as_message() -> None:
    failed = pod("llm-engine-1", initContainerStatuses=[FAILED_FETCH])
    found = explain_service(service(("ModelReady", "FetchFailed")), [failed])
    assert found.pods[0].message == "exit code 1: octavo: org/m: no such model on the hub"
    waiting = explain_service(service(("ModelReady", "Fetching")), [pod("a", initContainerStatuses=[FETCHING])])
    assert waiting.pods[0].state == "fetches the model"
    assert waiting.commands[0] == "kubectl logs a -c fetch -f -n team"


def test_commands_for_router_trouble_name_the_router_pod() -> None:
    unplaced = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes"}
    pods = [pod("engine"), pod("router", "router", conditions=[unplaced])]
    found = explain_service(service(("RouterReady", "RouterFailed")), pods)
    assert "kubectl describe pod router -n team" in found.commands
    assert found.pods[1].message == "Unschedulable: 0/3 nodes"


def test_commands_for_the_trouble_of_a_worker_name_the_worker() -> None:
    """Its leader starts without a trouble of its own, and waits for it."""
    crashed = pod("llm-0-1", "engine-worker", containerStatuses=[CRASHED])
    found = explain_service(service(("WorkloadReady", "CrashLoop")), [pod("llm-0"), crashed])
    assert [each.state for each in found.pods] == ["starts", "CrashLoop"]
    assert "kubectl describe pod llm-0-1 -n team" in found.commands
    assert "kubectl logs llm-0-1 --previous -n team" in found.commands


def test_commands_have_the_services_name() -> None:
    found = explain_service(service(("WorkloadReady", "ScaledToZero"), ("ReplicasAdmitted", "NoReplicas")))
    assert found.cause is not None
    assert found.cause.reason == "NoReplicas"
    quota = explain_service(service(("WorkloadReady", "QuotaExceeded")))
    assert quota.commands[0] == "kubectl describe quota -n team"


def test_a_spec_without_status_is_explained_as_not_seen() -> None:
    bare = {"metadata": {"name": "llm", "namespace": "team", "generation": 1}, "spec": {"model": {"uri": "hf://org/m"}}}
    for raw, message in (
        (bare, "the spec has generation 1, the operator has processed none"),
        (service(generation=3), "the spec has generation 3, the operator has processed 1"),
    ):
        found = explain_service(raw)
        assert found.cause is not None
        assert (found.is_ready, found.cause.reason, found.cause.message) == (False, "NotSeen", message)
        assert found.commands[0] == "kubectl get pods -A -l app.kubernetes.io/name=octavo-operator"
        assert "Not ready: NotSeen." in text(found)


def test_a_service_in_deletion_is_explained_as_such() -> None:
    found = explain_service(service(deletionTimestamp=NOW))
    assert found.cause is not None
    assert (found.cause.reason, found.is_ready) == ("Deleted", False)


def test_an_unknown_reason_is_explained_as_such() -> None:
    raw = service(("WorkloadReady", "CrashLoop"))
    for condition in raw["status"]["conditions"]:
        condition["reason"] = condition["reason"].replace("CrashLoop", "Eclipse")
    found = explain_service(raw)
    assert found.cause is not None
    assert (found.cause.reason, found.is_ready) == ("Eclipse", False)


def test_the_latest_events_are_shown_in_order() -> None:
    events = [
        {
            "metadata": {"creationTimestamp": NOW},
            "regarding": {"kind": "Pod", "name": "p"},
            "type": "Warning",
            "reason": "BackOff",
            "note": f"again\n{minute}",
            "eventTime": f"2026-11-21T20:{minute:02}:00.123456Z",
            "deprecatedCount": minute,
        }
        for minute in (9, 3, 1, 2, 4, 5, 6, 7, 8)
    ]
    found = explain_service(service(("WorkloadReady", "CrashLoop")), (), events)
    assert [event.count for event in found.events] == [2, 3, 4, 5, 6, 7, 8, 9]
    assert "2026-11-21T20:09:00Z  Warning  Pod/p  BackOff  again 9 (x9)" in text(found)


def test_the_table_has_a_row_per_service() -> None:
    rows = list(table_of([explain_service(service()), explain_service(service(("WorkloadReady", "OOMKilled")))]))
    assert rows[0].split() == ["NAMESPACE", "NAME", "MODEL", "READY", "REPLICAS", "REASON", "MESSAGE"]
    assert rows[1].split() == ["team", "llm", "hf://org/m", "True", "1/2", "Serving", "http://llm"]
    assert rows[2].split() == ["team", "llm", "hf://org/m", "False", "1/2", "OOMKilled", "about", "WorkloadReady"]
