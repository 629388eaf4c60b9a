"""`ServiceLoads`: the present load of each service, from the view and the reports of its routers."""

from dataclasses import dataclass

from octavo_operator.cluster.reports import RouterReports
from octavo_operator.cluster.view import Key, View
from octavo_operator.scaling.service_load import ServiceLoad, service_load
from octavo_operator.service import read_running_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """`total`: existing engine pods. `serving`: those that serve. `load`: None if it is unknown. `held`: requests that
    routers hold for a first replica, also if not every router has reported."""

    total: int = 0
    serving: int = 0
    load: ServiceLoad | None = None
    held: int = 0


class ServiceLoads:
    def __init__(self, view: View, reports: RouterReports) -> None:
        self._view = view
        self._reports = reports

    def of(self, key: Key) -> ServiceLoad | None:
        """None if there is no such service, or if one of its ready routers has no fresh report."""
        return self.sample(key).load

    def sample(self, key: Key) -> Sample:
        raw = self._view.services.get(key)
        if raw is None:
            return Sample()
        service = read_running_parts(raw)
        router = self._view.router_of(service)
        fresh = self._reports.fresh(service.namespace, self._view.router_pods(router))
        pods, models = self._view.engine_pods(key), self._view.models_of(key)
        admitted = [pod.name for pod in pods if pod.is_admitted and not pod.is_terminating]
        return Sample(
            total=len(pods),
            serving=sum(pod.serves for pod in pods),
            load=service_load(models, admitted, self._view.serving_routers(router, fresh)),
            held=sum(report.held.get(model, 0) for report in fresh.values() for model in models),
        )
