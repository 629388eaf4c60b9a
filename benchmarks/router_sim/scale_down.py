"""Removes one replica in mid-run and measures by how much the share of prompt tokens found in a cache falls.

The same requests run once for each replica as the victim, so a random victim's dip is the exact mean over replicas.
"""

from dataclasses import dataclass, replace
from statistics import fmean

from router_sim.hardware import HARDWARE
from router_sim.octavo import Octavo
from router_sim.workloads import WORKLOADS, Workload, agents
from router_sim.world import World

LOADS: dict[str, Workload] = {
    "skewed": replace(WORKLOADS["agents"], name="skewed", converse=agents(exponent=1.2)),
    "even": replace(WORKLOADS["agents"], name="even", converse=agents(exponent=0.0)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleDown:
    """One seed of the study. `window_s`: length of the windows before and after the removal at `drain_s`."""

    load: str
    seed: int
    replicas: int
    routers: int
    rate: float
    drain_s: float
    window_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Dips:
    """`worth_tokens` and `dips` by replica: worth at the time of the removal, and the dip if it is the victim.

    A dip is the hit rate in the window before the removal less that in the window after it.
    """

    worth_tokens: list[float]
    dips: list[float]
    before: float  # hit rate in the window before

    @property
    def least_worth(self) -> float:
        return self.dips[self.worth_tokens.index(min(self.worth_tokens))]

    @property
    def most_worth(self) -> float:
        return self.dips[self.worth_tokens.index(max(self.worth_tokens))]

    @property
    def random(self) -> float:
        return fmean(self.dips)


def measure(case: ScaleDown) -> Dips:
    runs = [_remove(case, victim) for victim in range(case.replicas)]
    return Dips(worth_tokens=runs[0][0], dips=[before - after for _, before, after in runs], before=runs[0][1])


def _remove(case: ScaleDown, victim: int) -> tuple[list[float], float, float]:
    """Return each replica's worth at the removal, and the hit rates before and after."""
    world = World(HARDWARE["a10g-7b"], case.replicas, Octavo, seed=case.seed, routers=case.routers)
    worth: list[float] = []

    def choose(world: World) -> int:
        worth.extend(worth_tokens(world))
        return victim

    world.drain_at(case.drain_s, choose)
    count = round(case.rate * (case.drain_s + case.window_s))
    world.run(LOADS[case.load].requests(rate=case.rate, count=count, replicas=case.replicas, seed=case.seed))
    world.check()
    before = _hit_rate(world, case.drain_s - case.window_s, case.drain_s)
    return worth, before, _hit_rate(world, case.drain_s, case.drain_s + case.window_s)


def worth_tokens(world: World) -> list[float]:
    """Return the worth of each replica, summed over routers."""
    return [
        sum(view.replicas[i].local_load.worth_tokens.at(world.now) for view in world.views)
        for i in range(len(world.engines))
    ]


def _hit_rate(world: World, start_s: float, end_s: float) -> float:
    """Return the share of prompt tokens found in a cache, of the requests that arrived between two times."""
    found = [o for o in world.outcomes.values() if start_s <= o.arrived_s < end_s]
    return sum(o.cached_tokens for o in found) / sum(o.prompt_tokens for o in found)
