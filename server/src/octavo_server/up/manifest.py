"""Services of a manifest for `octavo up -f`, as the operator's package returns them (see `cli.plugins`)."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestService:
    """One InferenceService. `args`, `env`: arguments and environment variables of each of its engines."""

    name: str
    served_names: tuple[str, ...]
    replicas: int
    args: tuple[str, ...]
    env: dict[str, str] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestServices:
    """All services of a manifest. `keys`: tenant -> API key; None if no key is required. `notes`: lines for the log
    about settings that have no effect on one machine."""

    services: tuple[ManifestService, ...]
    keys: dict[str, str] | None = field(repr=False)
    drain_timeout_s: float
    notes: tuple[str, ...]
