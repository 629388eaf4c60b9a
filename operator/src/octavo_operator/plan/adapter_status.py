"""The status field `adapters`, and notices to pods whose list of adapters has changed, by the reports of the routers.

A replica reports the digest of the list that it follows, and the adapters of that list that it has not loaded. A report
about an older list says nothing about the present one; until there is a report about that, an adapter with the same
location keeps its row.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from octavo_operator.desired.adapters import adapter_list, digest_of_list
from octavo_operator.observed import AdapterReport, Observed
from octavo_operator.plan.actions import NotifyPod
from octavo_operator.plan.events import ServiceEvent
from octavo_operator.service import InferenceService

#: Reasons that last while replicas read a changed list.
KEPT = ("Loaded", "LoadFailed")
#: Reasons that are failures -> reason of the event.
EVENTS: dict[str, str] = {"LoadFailed": "AdapterLoadFailed", "NameTaken": "AdapterNameTaken"}


def adapter_rows(service: InferenceService, observed: Observed) -> list[dict[str, Any]]:
    """One row for each adapter of the spec, in its order."""
    before = {(row["name"], row.get("uri")): row for row in observed.status.get("adapters", ())}
    digest = digest_of_list(adapter_list(service, observed.taken_models))
    serving = [pod.name for pod in observed.pods if pod.serves]
    reports = {pod: [r for r in _reports(observed, pod) if r.digest == digest] for pod in serving}
    rows = []
    for adapter in service.spec.adapters or ():
        if (owner := observed.taken_models.get(adapter.name)) is not None:
            why = f"the name belongs to InferenceService {owner}, which has the same router: choose another name"
            state = "NameTaken", why
        else:
            state = _state(adapter.name, reports, before.get((adapter.name, adapter.uri), {}))
        row = {"name": adapter.name, "uri": adapter.uri, "ready": state[0] == "Loaded"}
        rows.append({**row, "reason": state[0], "message": state[1]})
    return rows


def notify_actions(service: InferenceService, observed: Observed) -> Iterator[NotifyPod]:
    """Notify each pod that follows another list than the present one, once for each list."""
    if service.spec.adapters is None:
        return
    digest = digest_of_list(adapter_list(service, observed.taken_models))
    for pod in observed.staying_pods:
        reports = _reports(observed, pod.name)
        if reports and pod.adapter_list != digest and all(report.digest != digest for report in reports):
            yield NotifyPod(pod.name, pod.uid, digest, "its list of adapters has changed")


def adapter_events(rows: Iterable[Mapping[str, Any]], before: Iterable[Mapping[str, Any]]) -> Iterator[ServiceEvent]:
    """Yield an event for each adapter that has begun to fail. `before`: the rows of the status."""
    old = {row["name"]: row.get("reason") for row in before}
    for row in rows:
        if row["reason"] in EVENTS and old.get(row["name"]) != row["reason"]:
            note = f"adapter {row['name']}: {row['message']}"
            yield ServiceEvent("Warning", EVENTS[row["reason"]], note, "LoadAdapter")


def _reports(observed: Observed, pod: str) -> list[AdapterReport]:
    reports = (report.adapters.get(pod) for report in observed.routers.values() if report is not None)
    return [report for report in reports if report is not None]


def _state(name: str, replicas: Mapping[str, Sequence[AdapterReport]], before: Mapping[str, Any]) -> tuple[str, str]:
    """Reason and message. `replicas`: reports about the present list. `before`: the row of the status."""
    if not replicas:
        return "NoReplicas", "no replica serves now"
    for pod, reports in replicas.items():
        for report in reports:
            if why := report.missing.get(name):
                return "LoadFailed", f"{pod}: {why}"
    if not all(replicas.values()) and before.get("reason") in KEPT:
        return before["reason"], before["message"]
    num_loaded = sum(any(name not in report.missing for report in reports) for reports in replicas.values())
    reason = "Loaded" if num_loaded == len(replicas) else "Loading"
    return reason, f"{num_loaded} of {len(replicas)} replicas have loaded it"
