"""Version of the measured server, and the share of prompt tokens that its prefix cache has served."""

import re
from dataclasses import dataclass

import msgspec

from octavo_server.client.api import ApiClient, ApiFailure

#: Share of prompt tokens found in the prefix cache above which results measure the cache rather than the engine.
FLATTERING_HIT_RATE = 0.05

_COUNTER = re.compile(r"^(?:\w+:)?prefix_cache_(queries|hits)(?:_total)?(?:\{[^}]*\})? (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class PrefixCache:
    """Numbers of prompt tokens looked up and found in the prefix cache, since the server started or during a run."""

    queries: float
    hits: float

    def since(self, before: "PrefixCache") -> "PrefixCache":
        return PrefixCache(self.queries - before.queries, self.hits - before.hits)

    @property
    def hit_rate(self) -> float:
        return self.hits / self.queries if self.queries else 0.0


def parse_prefix_cache(metrics: str) -> PrefixCache | None:
    """Sum the prefix cache's counters of all engines in Prometheus text; None if the text has no such counters."""
    counts: dict[str, float] = {}
    for kind, value in _COUNTER.findall(metrics):
        counts[kind] = counts.get(kind, 0.0) + float(value)
    return PrefixCache(counts["queries"], counts["hits"]) if {"queries", "hits"} <= counts.keys() else None


async def read_prefix_cache(api: ApiClient) -> PrefixCache | None:
    try:
        return parse_prefix_cache((await api.get(f"{api.url}/metrics")).decode(errors="replace"))
    except ApiFailure:
        return None


async def reset_prefix_cache(api: ApiClient) -> bool:
    """Empty the server's prefix cache; False if the request failed."""
    try:
        await api.post(f"{api.url}/reset_prefix_cache")
    except ApiFailure:
        return False
    return True


async def read_version(api: ApiClient) -> str | None:
    try:
        answer = msgspec.json.decode(await api.get(f"{api.url}/version"))
    except (ApiFailure, msgspec.DecodeError, RecursionError):
        return None
    version = answer.get("version") if isinstance(answer, dict) else None
    return version if isinstance(version, str) else None
