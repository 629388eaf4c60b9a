"""`ManifestServices`: what a manifest asks for, in this package's own words: the operator's package reads it (cli.plugins)."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestService:
    """`args` and `env` of each of its engines."""

    name: str
    served_names: tuple[str, ...]
    replicas: int
    args: tuple[str, ...]
    env: dict[str, str] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestServices:
    """`keys`: tenant -> API key, None where nobody is asked for one. `notes`: what has no effect on one machine."""

    services: tuple[ManifestService, ...]
    keys: dict[str, str] | None = field(repr=False)
    drain_timeout_s: float
    notes: tuple[str, ...]

    @property
    def num_engines(self) -> int:
        return sum(service.replicas for service in self.services)
