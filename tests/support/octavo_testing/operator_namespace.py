"""`OperatorNamespace`: one namespace of a control plane with an operator that runs inside the `with` block."""

from collections import Counter
from pathlib import Path
from typing import Any, Self

from octavo_operator.cluster.client import path_of
from octavo_operator.names import SERVICE_LABEL
from octavo_operator.spec.service import KIND

from octavo_testing.audit_log import Call
from octavo_testing.control_plane import ControlPlane
from octavo_testing.infsvc_cases import Case
from octavo_testing.operator_command import OperatorProcess
from octavo_testing.waiting import eventually

MERGE = "application/merge-patch+json"
MADE = (
    *("Deployment", "Service", "ServiceAccount", "PodDisruptionBudget", "NetworkPolicy", "RoleBinding", "Secret"),
    "Ingress",
)


class OperatorNamespace:
    """The operator has the rights of `user`. Default: a new account that may do everything."""

    def __init__(
        self, plane: ControlPlane, namespace: str, folder: Path, *, user: str | None = None, **flags: Any
    ) -> None:
        self.plane = plane
        self.namespace = namespace
        self.user = plane.create_account(namespace, "octavo-operator") if user is None else user
        given = {"namespaces": (namespace,), "lease_namespace": namespace, "identity": "one"} | flags
        self.operator = OperatorProcess(folder, plane.kubeconfig(self.user), **given)
        self.services = path_of(KIND, namespace)

    def __enter__(self) -> Self:
        self.operator.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.operator.kill()

    def create(self, name: str, **spec: Any) -> None:
        self.plane.call("POST", self.services, Case("", spec, name=name).manifest())

    def scale(self, name: str, replicas: int) -> None:
        self.plane.call("PATCH", f"{self.services}/{name}", {"spec": {"replicas": replicas}}, kind=MERGE)

    def delete(self, name: str) -> None:
        self.plane.call("DELETE", f"{self.services}/{name}")

    def status(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.plane.call("GET", f"{self.services}/{name}").get("status", {})
        return found

    def wait_until_settled(self, *names: str) -> None:
        """Wait until the status of each service is of its latest generation."""

        def is_settled() -> bool:
            self.operator.assert_running()
            found = {s["metadata"]["name"]: s for s in self.plane.call("GET", self.services)["items"]}
            return {*names} <= {*found} and all(
                found[name].get("status", {}).get("observedGeneration") == found[name]["metadata"]["generation"]
                for name in names
            )

        eventually(is_settled, describe=self.operator.log_tail)

    def wait_for_log(self, what: str, times: int = 1) -> None:
        def is_said() -> bool:
            self.operator.assert_running()
            return self.operator.log.read_text().count(what) >= times

        eventually(is_said, describe=self.operator.log_tail)

    def calls(self, since: int) -> list[Call]:
        """Return the operator's calls, without those for the Lease."""
        return [c for c in self.plane.audit.calls(since=since, user=self.user) if c.resource != "leases"]

    def writes(self, since: int) -> Counter[tuple[str, str]]:
        """Count the operator's writes by resource and name, without Events."""
        calls = [call for call in self.calls(since) if call.is_write and call.resource != "events"]
        return Counter((call.resource, call.name) for call in calls)

    def leftover_objects(self) -> list[str]:
        """Return the kind and name of each object that has the operator's label."""
        roots = {kind: path_of(kind, self.namespace) for kind in MADE}
        found = {kind: self.plane.call("GET", f"{root}?labelSelector={SERVICE_LABEL}") for kind, root in roots.items()}
        return [f"{kind} {item['metadata']['name']}" for kind, page in found.items() for item in page["items"]]

    def lease_holder(self) -> str:
        leases = self.plane.call("GET", path_of("Lease", self.namespace))["items"]
        return next((lease["spec"].get("holderIdentity") or "" for lease in leases), "")
