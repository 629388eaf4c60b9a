"""`Service`: one InferenceService, read and checked; `Settings`: what the operator was installed with."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo_operator.spec.service import GROUP, KIND, VERSION, InferenceServiceSpec, read_spec

#: A deleted namespace goes 10 s and half of its pods' grace later: three quarters of a minute with this.
DEFAULT_DRAIN_S = 45
#: What ending takes besides: last words, connections, the engine.
END_S = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    engine_image: str
    router_image: str
    operator_namespace: str  # its pods are let in by NetworkPolicies, and those of no other namespace
    image_pull_policy: str | None = None
    image_pull_secrets: tuple[str, ...] = ()  # where a spec names none
    cluster_domain: str = "cluster.local"
    lame_duck_s: int = 15  # a pod that is told to end goes on answering while proxies learn of it
    has_pod_monitors: bool = False
    monitor_labels: Mapping[str, str] = field(default_factory=dict)  # by which a Prometheus selects them
    scraped_from: tuple[str, ...] = ()  # namespaces whose Prometheus NetworkPolicies let in to engines and routers
    has_gateway_api: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceService:
    name: str
    namespace: str
    uid: str
    generation: int
    spec: InferenceServiceSpec

    @property
    def router(self) -> str:
        """The name of the service whose router serves this one."""
        ref = self.spec.router.ref
        return self.name if ref is None else ref.name

    @property
    def owns_router(self) -> bool:
        return self.spec.router.ref is None

    @property
    def served_names(self) -> tuple[str, ...]:
        return self.spec.model.served_names or (self.name,)

    @property
    def drain_timeout_s(self) -> int:
        return self.spec.drain.timeout_seconds or DEFAULT_DRAIN_S

    def grace_s(self, settings: Settings) -> int:
        """What its pods have from SIGTERM to their end. They drain while proxies learn of it."""
        return max(self.drain_timeout_s, settings.lame_duck_s) + END_S

    @property
    def owner(self) -> dict[str, Any]:
        """What makes Kubernetes delete children with the service."""
        return {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": KIND,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": False,
        }


def read_service(manifest: Mapping[str, Any]) -> InferenceService:
    """Raises InvalidSpec: a CRD of another version may have let through what this operator can't serve."""
    metadata = manifest["metadata"]
    return InferenceService(
        name=metadata["name"],
        namespace=metadata["namespace"],
        uid=metadata["uid"],
        generation=metadata["generation"],
        spec=read_spec(manifest),
    )
