"""Computes when requests start: a Poisson or (burstier or smoother) gamma process, a rising rate, or all at once."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RampUp:
    strategy: Literal["linear", "exponential"]
    start_rps: float
    end_rps: float

    def rate(self, progress: float) -> float:
        if self.strategy == "linear":
            return self.start_rps + (self.end_rps - self.start_rps) * progress
        return float(self.start_rps * (self.end_rps / self.start_rps) ** progress)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalProcess:
    """`rate`: requests per second. `burstiness` 1: a Poisson process; below 1: burstier; above 1: smoother."""

    rate: float = math.inf
    burstiness: float = 1.0
    ramp_up: RampUp | None = None

    def offsets_s(self, count: int, seed: int) -> list[float]:
        """Seconds from the start to each request; if the rate is constant, scaled so that the last is count / rate."""
        if math.isinf(self.rate) and self.ramp_up is None:
            return [0.0] * count
        dice = random.Random(seed)
        offsets, now = [], 0.0
        for i in range(count):
            rate = self.rate if self.ramp_up is None else self.ramp_up.rate(i / max(count - 1, 1))
            now += dice.gammavariate(self.burstiness, 1 / (max(rate, 1e-3) * self.burstiness))
            offsets.append(now)
        return offsets if self.ramp_up is not None else _scaled(offsets, count / self.rate)


def _scaled(offsets: Sequence[float], end: float) -> list[float]:
    return [offset * end / offsets[-1] for offset in offsets] if offsets else []
