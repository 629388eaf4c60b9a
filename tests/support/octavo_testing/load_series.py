"""Five series of load, one value per sync, that the cluster's HPA and the operator's Recommender get alike.

Periods and windows are given in syncs, so that a series can be run at any pace. At a sync of 5 s it lasts 200 s.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from random import Random
from typing import Any

from octavo_operator.scaling.behavior import behavior_document, read_behavior

NUM_SYNCS = 40
KV, WAITING = "kv_used_replicas", "waiting_requests"
AVERAGES = {KV: Decimal("0.75"), WAITING: Decimal(2)}

Sums = tuple[float | None, int | None]  # KV, WAITING; None: the metrics API does not have the metric
Policies = Sequence[tuple[str, int, int]]  # type, value, period in syncs


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """`window`: stabilization window in syncs. Windows and periods end between two syncs, not at one of them."""

    window: int
    policies: Policies
    select: str = "Max"

    def document(self, sync_s: int) -> dict[str, Any]:
        return {
            "stabilizationWindowSeconds": _seconds(self.window, sync_s),
            "selectPolicy": self.select,
            "policies": [
                {"type": type, "value": value, "periodSeconds": _seconds(period, sync_s)}
                for type, value, period in self.policies
            ],
        }


def _seconds(num_syncs: int, sync_s: int) -> int:
    return num_syncs * sync_s - sync_s // 2 if num_syncs else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSeries:
    """`lag`: syncs after which `status.replicas` follows the spec. `up`, `down`: None for Kubernetes' default."""

    name: str
    sums: Sequence[Sums]
    replicas: int = 1
    min_replicas: int = 1
    max_replicas: int = 10
    lag: int = 0
    up: Rules | None = None
    down: Rules | None = None

    def behavior(self, sync_s: int) -> dict[str, Any]:
        rules = {"scaleUp": self.up, "scaleDown": self.down}
        return behavior_document(read_behavior({k: v.document(sync_s) for k, v in rules.items() if v is not None}))


def load_series() -> list[LoadSeries]:
    at_once = (("Percent", 100, 3),)
    return [
        LoadSeries(name="a-day", sums=list(_day()), max_replicas=8),
        LoadSeries(
            name="bursts",
            sums=list(_bursts(Random(1))),
            min_replicas=2,
            replicas=2,
            down=Rules(window=6, policies=at_once),
        ),
        LoadSeries(name="gaps", sums=list(_gaps(Random(2))), replicas=4, down=Rules(window=4, policies=at_once)),
        LoadSeries(
            name="slow-pods",
            sums=list(_bursts(Random(3))),
            lag=2,
            up=Rules(window=2, policies=(("Pods", 2, 6), ("Percent", 50, 4)), select="Min"),
            down=Rules(window=3, policies=(("Percent", 30, 5), ("Pods", 1, 2))),
        ),
        LoadSeries(
            name="many-replicas",
            sums=list(_wave(Random(4))),
            replicas=20,
            max_replicas=60,
            up=Rules(window=0, policies=(("Pods", 3, 4), ("Percent", 12, 2))),
            down=Rules(window=0, policies=(("Pods", 5, 3), ("Percent", 10, 6)), select="Min"),
        ),
    ]


def _day() -> Iterator[Sums]:
    """Morning, noon and evening: a rise above the maximum, and a decline to nothing."""
    for idx in range(NUM_SYNCS):
        yield round(7.0 * math.sin(math.pi * idx / (NUM_SYNCS - 1)) ** 2, 6), 0


def _bursts(rng: Random) -> Iterator[Sums]:
    """Quiet periods with noise, and short bursts of waiting requests."""
    waiting = 0
    for _ in range(NUM_SYNCS):
        waiting = rng.randrange(4, 30) if rng.random() < 0.2 else waiting // 3
        yield round(1.2 + rng.gauss(0, 0.4) + waiting / 12, 6), waiting


def _gaps(rng: Random) -> Iterator[Sums]:
    """Metrics that go missing, one of them or both."""
    for idx in range(NUM_SYNCS):
        kv, waiting = round(3.0 + 2.5 * math.sin(idx / 4), 6), rng.randrange(0, 14)
        yield (None if rng.random() < 0.3 else kv), (None if rng.random() < 0.3 else waiting)


def _wave(rng: Random) -> Iterator[Sums]:
    """A large service around its target: at first at the bounds of the tolerance, then beyond them."""
    for ratio in (1.0, 1.1, 0.9, 1.1, 1.0999, 0.9, 0.8999):
        yield round(20 * 0.75 * ratio, 6), 0
    for idx in range(NUM_SYNCS - 7):
        yield round(16.0 + 14.0 * math.sin(idx / 5) + rng.gauss(0, 1), 6), rng.randrange(0, 90)
