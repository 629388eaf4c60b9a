"""Runs policies over workloads, loads and numbers of replicas, in parallel processes.

Load is a share of *capacity*: the rate of finished requests under overload, with the better policy of `SATURATED_BY`.
Capacity is measured for each workload with at most `SATURATED_REPLICAS` replicas, and scaled to more.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from typing import Any, TypeVar

from router_sim.figures import Figures, figures
from router_sim.hardware import HARDWARE, Hardware
from router_sim.oracle import Oracle
from router_sim.policies import POLICIES
from router_sim.workloads import WORKLOADS, Request
from router_sim.world import World, policy_request

SATURATED_BY = ("aware", "loadaware")
SATURATED_REPLICAS = 8
OVERLOAD = 1.3
SATURATED_S = 20.0  # minimum duration, several times that of an answer
WARM = 0.3  # first share of the arrival time; requests that finish in it aren't counted

_Job = TypeVar("_Job")
_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The conditions that determine a capacity. `requests` is an approximate number.

    `blocks` overrides the hardware's KV blocks of each replica. Each of `routers` has an index of its own.
    """

    workload: str
    replicas: int
    hardware: str
    requests: int
    seed: int
    blocks: int | None = None
    routers: int = 1

    @property
    def replica(self) -> Hardware:
        hardware = HARDWARE[self.hardware]
        return hardware if self.blocks is None else replace(hardware, num_blocks=self.blocks)

    def generate_requests(self, rate: float, *, for_s: float = 0.0) -> list[Request]:
        count = max(self.requests, round(rate * for_s))
        workload = WORKLOADS[self.workload]
        return workload.requests(rate=rate, count=count, replicas=self.replicas, seed=self.seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run. `load` is a share of the capacity."""

    setting: Setting
    policy: str
    load: float
    rate: float


def run(case: Case) -> Figures:
    world = _world(case.setting, case.setting.replica, case.policy)
    world.run(case.setting.generate_requests(case.rate))
    world.check()
    return figures(world)


def capacity(setting: Setting) -> float:
    """Return the capacity in requests per second."""
    requests = setting.generate_requests(OVERLOAD * ideal_capacity(setting), for_s=SATURATED_S)
    unbounded = replace(setting.replica, max_queued=len(requests))
    return max(_finished_rate(setting, unbounded, policy, requests) for policy in SATURATED_BY)


def ideal_capacity(setting: Setting) -> float:
    """Return an upper bound of the capacity: every batch is full and every hit of the oracle is found."""
    hardware, oracle = setting.replica, Oracle()
    requests = setting.generate_requests(10.0 * setting.replicas, for_s=SATURATED_S)
    decode_s = hardware.duration_s(0, hardware.max_num_seqs) / hardware.max_num_seqs
    total_s = 0.0
    for request in requests:
        missing = len(request.prompt) - oracle.count_findable(policy_request(request))
        total_s += missing * hardware.prefill_token_s + len(request.answer) * decode_s
        oracle.add_answer(request)
    return setting.replicas * len(requests) / total_s


def capacities(settings: list[Setting], *, jobs: int, on_done: Callable[[], object]) -> dict[Setting, float]:
    smaller = {setting: _smaller(setting) for setting in settings}
    found = dict(run_each(capacity, [*dict.fromkeys(smaller.values())], jobs=jobs, on_done=on_done))
    return {large: found[small] * large.replicas / small.replicas for large, small in smaller.items()}


def _smaller(setting: Setting) -> Setting:
    return replace(setting, replicas=min(setting.replicas, SATURATED_REPLICAS), requests=0, routers=1)


def run_all(cases: list[Case], *, jobs: int, on_done: Callable[[], object]) -> Iterator[tuple[Case, Figures]]:
    return run_each(run, cases, jobs=jobs, on_done=on_done)


def as_json(case: Case, found: Figures) -> dict[str, Any]:
    return {"case": asdict(case), "figures": asdict(found), "hits_of_oracle": found.hits_of_oracle}


def from_json(saved: dict[str, Any]) -> tuple[Case, Figures]:
    case = {**saved["case"], "setting": Setting(**saved["case"]["setting"])}
    return Case(**case), Figures(**saved["figures"])


def _finished_rate(setting: Setting, hardware: Hardware, policy: str, requests: list[Request]) -> float:
    world = _world(setting, hardware, policy)
    world.run(requests)
    duration_s = requests[-1].at_s
    ends = [outcome.ended_s or 0.0 for outcome in world.outcomes.values()]
    return sum(WARM * duration_s < end <= duration_s for end in ends) / ((1 - WARM) * duration_s)


def _world(setting: Setting, hardware: Hardware, policy: str) -> World:
    return World(hardware, setting.replicas, POLICIES[policy], seed=setting.seed, routers=setting.routers)


def run_each(
    work: Callable[[_Job], _Found], todo: list[_Job], *, jobs: int, on_done: Callable[[], object]
) -> Iterator[tuple[_Job, _Found]]:
    if jobs == 1:
        for job in todo:
            found = work(job)
            on_done()
            yield job, found
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(work, job): job for job in todo}
        for done in as_completed(running):
            on_done()
            yield running[done], done.result()
