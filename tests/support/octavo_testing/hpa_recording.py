"""Recordings of a real HorizontalPodAutoscaler: what it saw at each sync, and the count that it chose.

with record_hpas(plane, namespace, folder, load_series(), sync_s=5) as recorder: ...   # a list of Sync by series
differences(series, syncs, sync_s=5)                     # the syncs at which the Recommender chose otherwise
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from octavo_operator.scaling.behavior import read_behavior
from octavo_operator.scaling.proposal import Metric
from octavo_operator.scaling.recommender import Recommender

from octavo_testing.control_plane import ControlPlane
from octavo_testing.infsvc_cases import Case
from octavo_testing.load_series import AVERAGES, KV, WAITING, LoadSeries
from octavo_testing.metrics_api import api_objects, metrics_api

MERGE_PATCH = "application/merge-patch+json"
CLOCK_S = 0.1  # the HPA reads its clock some milliseconds after the recorded times


@dataclass(frozen=True, slots=True)
class Sync:
    """`replicas`: the count in the spec when the HPA asked for the metrics, so the choice of the sync before.

    `time_s`: when it asked for the last metric. `scaled_s`: when the API server had written its choice, if it was new.
    """

    time_s: float
    kv: float | None
    waiting: float | None
    status_replicas: int
    replicas: int
    scaled_s: float | None = None


class HpaRecorder:
    """Serves each HPA the next values of its series at each sync, and lets the status follow the spec."""

    def __init__(self, plane: ControlPlane, namespace: str, series: Sequence[LoadSeries], sync_s: int) -> None:
        self.syncs: dict[str, list[Sync]] = {one.name: [] for one in series}
        self._plane, self.sync_s = plane, sync_s
        self._series = {one.name: one for one in series}
        self._services = f"/apis/serving.octavo.dev/v1alpha1/namespaces/{namespace}/inferenceservices"
        self._hpas = f"/apis/autoscaling/v2/namespaces/{namespace}/horizontalpodautoscalers"
        self._version = plane.call("GET", "/version")["gitVersion"]
        self._start_s = time.time()
        self._timers: list[threading.Timer] = []

    @property
    def _now_s(self) -> float:
        return round(time.time() - self._start_s, 3)

    @property
    def is_complete(self) -> bool:
        """True once the choice by the last value of each series is known."""
        return all(len(syncs) > len(self._series[name].sums) for name, syncs in self.syncs.items())

    def create(self, series: LoadSeries) -> None:
        self._plane.call("POST", self._services, Case("", {"replicas": series.replicas}, name=series.name).manifest())
        self._set_status(series.name, series.replicas)
        self._plane.call("POST", self._hpas, _hpa(series, self.sync_s))

    def value(self, name: str, metric: str) -> float | None:
        """Value for a request of the HPA. The first metric begins a sync."""
        series, syncs, now_s = self._series[name], self.syncs[name], self._now_s
        if metric == WAITING:
            syncs[-1] = replace(syncs[-1], time_s=now_s)
        elif not self.is_complete:
            kv, waiting = series.sums[min(len(syncs), len(series.sums) - 1)]
            service = self._plane.call("GET", f"{self._services}/{name}")
            total = service["status"]["replicas"]["total"]
            syncs.append(Sync(now_s, kv, waiting, total, service["spec"]["replicas"]))
            self._after(0.3 * self.sync_s, self._follow, series)
        return syncs[-1].kv if metric == KV else syncs[-1].waiting

    def document(self) -> str:
        """JSON of the recording, with a line per series."""
        rows = [
            f'"{name}": {json.dumps([list(asdict(sync).values()) for sync in syncs])}'
            for name, syncs in self.syncs.items()
        ]
        series = ",\n".join(rows)
        return f'{{"kubernetes": "{self._version}", "sync_s": {self.sync_s}, "series": {{\n{series}\n}}}}\n'

    def close(self) -> None:
        for timer in self._timers:  # a timer that ends may add another one
            timer.cancel()
            timer.join()

    def add_scale_times(self) -> None:
        """Add the times of the HPAs' writes, from the audit log."""
        for call in self._plane.audit.calls():
            if (call.resource, call.verb, call.code) == ("inferenceservices/scale", "update", 200):
                written_s = round(call.answered_s - self._start_s, 3)
                syncs = self.syncs[call.name]
                idx = max((idx for idx, sync in enumerate(syncs) if sync.time_s <= written_s), default=None)
                if idx is not None:
                    syncs[idx] = replace(syncs[idx], scaled_s=written_s)

    def _after(self, delay_s: float, act: Callable[..., None], *args: object) -> None:
        timer = threading.Timer(delay_s, act, args)
        self._timers.append(timer)
        timer.start()

    def _follow(self, series: LoadSeries) -> None:
        replicas = self._plane.call("GET", f"{self._services}/{series.name}")["spec"]["replicas"]
        self._after(series.lag * self.sync_s, self._set_status, series.name, replicas)

    def _set_status(self, name: str, replicas: int) -> None:
        status = {"selector": f"app={name}", "replicas": {"total": replicas}}
        self._plane.call("PATCH", f"{self._services}/{name}/status", {"status": status}, kind=MERGE_PATCH)


@contextmanager
def record_hpas(
    plane: ControlPlane, namespace: str, folder: Path, series: Sequence[LoadSeries], *, sync_s: int
) -> Iterator[HpaRecorder]:
    """Start one HPA for each series, on a service without an operator and without pods."""
    recorder = HpaRecorder(plane, namespace, series, sync_s)
    with metrics_api(folder, recorder.value) as port:
        made = api_objects(namespace, port, verified=False)
        for path, document in made:
            plane.call("POST", path, document)
        for one in series:
            recorder.create(one)
        try:
            yield recorder
        finally:
            recorder.close()
            for path, document in reversed(made):  # an API without a server would block the deletion of namespaces
                plane.call("DELETE", f"{path}/{document['metadata']['name']}")


def differences(series: LoadSeries, syncs: Sequence[Sync], *, sync_s: int) -> list[str]:
    """Replay a recording from sync to sync; return a text for each sync at which the Recommender chose another count.

    Each sync starts with the count and the history that the HPA had. A difference is called `clock`, not `fault`, if a
    time within `CLOCK_S` gives the HPA's count: a window or period ended just then.
    """
    recommender, behavior = Recommender(), read_behavior(series.behavior(sync_s))
    replicas, found = syncs[0].replicas, []
    for idx, (sync, following) in enumerate(pairwise(syncs)):
        given: dict[str, Any] = {
            "replicas": replicas,
            "status_replicas": sync.status_replicas,
            "min_replicas": series.min_replicas,
            "max_replicas": series.max_replicas,
            "metrics": [
                Metric(name=name, sum=value, average=AVERAGES[name])
                for name, value in ((KV, sync.kv), (WAITING, sync.waiting))
            ],
            "behavior": behavior,
        }
        others = [deepcopy(recommender).recommend(now_s=sync.time_s + off, **given) for off in (-CLOCK_S, CLOCK_S)]
        chosen = recommender.recommend(now_s=sync.time_s, **given)
        if chosen.replicas != following.replicas:
            is_clock = following.replicas in [other.replicas for other in others]
            found.append(f"{'clock' if is_clock else 'fault'}: {series.name} {idx}: HPA {following.replicas}, {chosen}")
        if sync.scaled_s is not None:
            scaled = {"before": replicas, "after": following.replicas, "behavior": behavior}
            recommender.record_scaling(now_s=sync.scaled_s, **scaled)
        replicas = following.replicas
    return found


def _hpa(series: LoadSeries, sync_s: int) -> dict[str, Any]:
    target = {"apiVersion": "serving.octavo.dev/v1alpha1", "kind": "InferenceService", "name": series.name}
    metrics = [
        {
            "type": "Object",
            "object": {
                "describedObject": target,
                "metric": {"name": name},
                "target": {"type": "AverageValue", "averageValue": str(average)},
            },
        }
        for name, average in AVERAGES.items()
    ]
    spec = {
        "scaleTargetRef": target,
        "minReplicas": series.min_replicas,
        "maxReplicas": series.max_replicas,
        "metrics": metrics,
        "behavior": series.behavior(sync_s),
    }
    return {"metadata": {"name": series.name}, "spec": spec}
