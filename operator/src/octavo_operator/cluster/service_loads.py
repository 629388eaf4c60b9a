"""`ServiceLoads`: the present load of each service, from the view and the reports of its routers."""

from octavo_operator.cluster.reports import RouterReports
from octavo_operator.cluster.view import Key, View
from octavo_operator.scaling.service_load import ServiceLoad, service_load
from octavo_operator.service import read_running_parts


class ServiceLoads:
    def __init__(self, view: View, reports: RouterReports) -> None:
        self._view = view
        self._reports = reports

    def of(self, key: Key) -> ServiceLoad | None:
        """None if there is no such service, or if one of its ready routers has no fresh report."""
        raw = self._view.services.get(key)
        if raw is None:
            return None
        service = read_running_parts(raw)
        fresh = self._reports.fresh(service.namespace, self._view.router_pods(self._view.router_of(service)))
        seen = self._view.observed(service, fresh)
        admitted = [pod.name for pod in seen.pods if pod.is_admitted and not pod.is_terminating]
        return service_load(self._view.models_of(key), admitted, seen.routers)
