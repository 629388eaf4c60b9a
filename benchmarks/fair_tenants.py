"""Service of a tenant beside a greedy one, in virtual time, without a model: the real scheduler with costs of a GPU.

A step takes 20 ms and 50 µs per token; there are 256 places and 262 144 tokens of KV cache. Each tenant keeps a number
of requests in progress; alice comes 20 seconds after mallory. The same load with one tenant for all requests shows what
a scheduler without tenants does. Service counts prompt tokens once and generated tokens twice.
"""

import argparse
from collections import Counter
from dataclasses import dataclass, field

from octavo_engine.core.scheduler import Scheduler
from octavo_engine.settings.records import SchedulerConfig
from octavo_engine.wire.plan import SeqResult, StepCosts, StepPlan, StepResult
from octavo_engine.wire.records import EngineRequest, SeqOutput
from octavo_engine.wire.sampling import SamplingParams
from table import number, print_table

COSTS = StepCosts(step_s=0.02, prefill_token_s=50e-6, context_token_s=1e-9)
LATE_S = 20.0


@dataclass(frozen=True)
class Load:
    """`streams` requests at a time; each has `prompt` tokens and `n` outputs of `output` tokens."""

    streams: int
    prompt: int
    output: int
    n: int = 1
    weight: float = 1.0


@dataclass(frozen=True)
class Row:
    alice: Load
    mallory: Load
    max_step_ms: float = 100.0
    places: int = 256


ONE = Load(1, 200, 100)
ROWS = {
    "1. 512 x (100, 500)": Row(ONE, Load(512, 100, 500)),
    "2. n=256 (100, 8000)": Row(ONE, Load(1, 100, 8000, n=256)),
    "3. 64 x (6000, 2000)": Row(ONE, Load(64, 6000, 2000)),
    "4. 64 x (8000, 1)": Row(ONE, Load(64, 8000, 1)),
    "4. the same, no limit": Row(ONE, Load(64, 8000, 1), max_step_ms=0.0),
    "5. 256 x (100, 100), 512 x (100, 500)": Row(Load(256, 100, 100), Load(512, 100, 500)),
    "6. 64 x (1000, 100), 64 x (8000, 1)": Row(Load(64, 1000, 100), Load(64, 8000, 1)),
    "pair (100, 20), (100, 900), 32 places": Row(Load(64, 100, 20), Load(64, 100, 900), places=32),
}


@dataclass
class Figures:
    """Figures of one tenant, from alice's first request on."""

    ended: int = 0
    service: int = 0
    longest_s: float = 0.0  # until a first token
    most_steps: int = 0


@dataclass
class Request:
    tenant: str
    arrival_s: float
    arrival_step: int
    open: int
    has_started: bool = False


@dataclass
class Service:
    """`loads` by tenant; all but the first one come late. `has_tenants`: the requests name their tenants."""

    row: Row
    loads: dict[str, Load]
    has_tenants: bool = True
    caching: bool = True
    now: float = 0.0
    num_steps: int = 0
    figures: dict[str, Figures] = field(default_factory=dict)
    _requests: dict[str, Request] = field(default_factory=dict)
    _serial: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_model_len=32768,
                num_blocks=16384,
                max_num_seqs=self.row.places,
                max_num_batched_tokens=8192,
                max_step_ms=self.row.max_step_ms,
                enable_prefix_caching=self.caching,
            )
        )

    def run(self, seconds: float) -> dict[str, Figures]:
        first, *late = self.loads
        self._start(first)
        self._run_until(LATE_S)
        self.figures = {tenant: Figures() for tenant in self.loads}
        for tenant in late:
            self._start(tenant)
        self._run_until(LATE_S + seconds)
        for request in self._requests.values():
            if not request.has_started:
                self._record_first(request)
        return self.figures

    def _start(self, tenant: str) -> None:
        for _ in range(self.loads[tenant].streams):
            self._add(tenant)

    def _add(self, tenant: str) -> None:
        load, name = self.loads[tenant], f"{tenant} {self._serial[tenant]}"
        self._serial[tenant] += 1
        prompt = [*name.encode()] + [7] * load.prompt
        params = SamplingParams(max_tokens=load.output, n=load.n, ignore_eos=True, seed=0)
        request = EngineRequest(
            request_id=name,
            prompt_token_ids=prompt[: load.prompt],
            params=params,
            arrival_s=self.now,
            tenant=tenant if self.has_tenants else "",
            weight=load.weight,
        )
        self._requests[name] = Request(tenant, self.now, self.num_steps, load.n)
        self.scheduler.add(request, self.now)

    def _run_until(self, end_s: float) -> None:
        while self.now < end_s:
            plan = self.scheduler.step(self.now, COSTS)
            self.num_steps += 1
            self.now += COSTS.step_s + sum(COSTS.chunk_s(step.start, step.num_computed) for step in plan.seqs)
            for output in self.scheduler.commit(result_of(plan), self.now):
                self._receive(output)

    def _receive(self, output: SeqOutput) -> None:
        request = self._requests[output.request_id]
        figures = self.figures.get(request.tenant, Figures())
        figures.service += 2 * len(output.token_ids)
        if not request.has_started:
            request.has_started = True
            figures.service += self.loads[request.tenant].prompt
            self._record_first(request)
        if output.finish_reason:
            request.open -= 1
            if not request.open:
                figures.ended += 1
                del self._requests[output.request_id]
                self._add(request.tenant)

    def _record_first(self, request: Request) -> None:
        figures = self.figures.get(request.tenant, Figures())
        figures.longest_s = max(figures.longest_s, self.now - request.arrival_s)
        figures.most_steps = max(figures.most_steps, self.num_steps - request.arrival_step)


def result_of(plan: StepPlan) -> StepResult:
    seqs = [SeqResult(seq_id=step.seq_id, token_ids=[9]) for step in plan.seqs if step.sample]
    return StepResult(step_id=plan.step_id, seqs=seqs, costs=COSTS)


def describe(row: Row, seconds: float, *, caching: bool) -> list[str]:
    """Run alice alone, without tenants and with tenants; return the cells of a row of the table."""
    loads = {"mallory": row.mallory, "alice": row.alice}
    alone = Service(row, {"idle": Load(0, 1, 1), "alice": row.alice}, caching=caching).run(seconds)["alice"]
    cells, totals = [], []
    for has_tenants in (False, True):
        service = Service(row, loads, has_tenants=has_tenants, caching=caching)
        figures = service.run(seconds)
        alice, total = figures["alice"], sum(each.service for each in figures.values())
        totals.append(total)
        cells += [
            number(alice.service / alone.service),
            number(alice.longest_s),
            str(alice.most_steps),
            number(alice.service / total),
        ]
    again = service.scheduler.stats().recomputed_tokens / service.now
    return [*cells, number(totals[1] / totals[0]), number(again)]


def weights(seconds: float) -> list[tuple[str, str]]:
    """Return the parts of three busy tenants with the weights 1, 1 and 2."""
    of = {"a": 1.0, "b": 1.0, "c": 2.0}
    loads = {f"{name}, weight {weight:g}": Load(256, 100, 200, weight=weight) for name, weight in of.items()}
    figures = Service(ROWS["1. 512 x (100, 500)"], loads).run(seconds)
    total = sum(each.service for each in figures.values())
    return [(name, number(each.service / total)) for name, each in figures.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure in virtual time what a tenant gets beside a greedy one.")
    parser.add_argument("--seconds", type=float, default=60.0, help="virtual seconds of each run. Default: 60")
    parser.add_argument("--rows", default="", help="text that the names of rows contain. Default: all rows")
    parser.add_argument("--no-prefix-caching", action="store_true", help="preempted sequences are computed again")
    arguments = parser.parse_args()
    rows = []
    for name, row in ROWS.items():
        if arguments.rows in name:
            rows.append((name, *describe(row, arguments.seconds, caching=not arguments.no_prefix_caching)))
    each = ("/ alone", "first s", "steps", "part")
    print_table("alice without tenants, then with them", ("", *each, *each, "service", "again/s"), rows)
    print_table("parts of all service", ("", "part"), weights(arguments.seconds))


if __name__ == "__main__":
    main()
