"""The load of one service, by which its number of replicas is chosen: sums over replicas and routers.

An HPA divides the value of an Object metric with a target of type AverageValue by the target: desired = ceil(sum /
target). So the metrics are sums over all replicas; a mean would never lead to more than a few replicas.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from octavo_operator.observed import Load, RouterReport


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLoad:
    """The load of a service by the reports of all its ready routers.

    `kv_used_replicas`: sum over the admitted replicas of referenced / total KV blocks, so 1.5 means as many blocks as
    one and a half replicas have. `waiting_requests`: requests that wait in engines and in routers. `held`: how many of
    these wait for a first replica. `unfinished`: all requests that have not ended. `requests`: router -> (id of its
    start, number of requests for the service since then).
    """

    kv_used_replicas: float
    waiting_requests: int
    held: int = 0
    unfinished: int = 0
    requests: Mapping[str, tuple[str, int]] = field(default_factory=dict)


def service_load(
    models: Collection[str], admitted: Collection[str], routers: Mapping[str, RouterReport | None]
) -> ServiceLoad | None:
    """`models`: names by which requests ask for the service. `admitted`: its admitted engine pods. `routers`: the fresh
    report of each ready router, None for a router without one.

    None if a report is missing, of a router or of a replica: its load is unknown, not zero.
    """
    reports = [report for report in routers.values() if report is not None]
    if not reports or len(reports) < len(routers):
        return None
    newest = {pod: _newest_load(pod, reports) for pod in admitted}
    loads = [load for load in newest.values() if load is not None and load.num_blocks]
    if len(loads) < len(newest):
        return None
    held = sum(report.held.get(model, 0) for report in reports for model in models)
    queued = sum(report.queue.get(model, 0) for report in reports for model in models)
    sent = sum(report.in_flight.get(pod, 0) for report in reports for pod in admitted)
    engines = sum(loads, Load())
    return ServiceLoad(
        kv_used_replicas=sum(load.num_used_blocks / load.num_blocks for load in loads),
        waiting_requests=engines.waiting + queued + held,
        held=held,
        unfinished=max(sent, engines.running + engines.waiting) + queued + held,
        requests={r.pod: (r.start, sum(r.requests.get(model, 0) for model in models)) for r in reports},
    )


def _newest_load(pod: str, reports: Collection[RouterReport]) -> Load | None:
    """The load of a replica by the router whose report of it is the freshest: every router repeats the same figures."""
    with_load = [report for report in reports if pod in report.loads]
    newest = max(with_load, key=lambda report: report.load_times.get(pod, 0.0), default=None)
    return None if newest is None else newest.loads[pod]
