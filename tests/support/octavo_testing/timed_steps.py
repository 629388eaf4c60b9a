"""A scheduler in virtual time: `StepCosts` give the duration of each step, and the scheduler gets the measured costs.

There is no model. `TimedSteps` runs requests that arrive at given times.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
from octavo_engine.core.scheduler import Scheduler
from octavo_engine.runner.step_costs import CostMeter, moving_average
from octavo_engine.settings.records import SchedulerConfig
from octavo_engine.wire.plan import SeqResult, StepCosts, StepPlan, StepResult
from octavo_engine.wire.records import EngineRequest, ImageInput
from octavo_engine.wire.sampling import SamplingParams


@dataclass(frozen=True)
class Arrival:
    at_s: float
    prompt: list[int]
    max_tokens: int
    images: tuple[ImageInput, ...] = ()


@dataclass
class TimedStep:
    """`chunks`: prompt tokens that the step computes, by the number of the request. `encode_s`: a part of `seconds`."""

    seconds: float
    chunks: dict[int, int]
    num_seqs: int
    encode_s: float = 0.0


@dataclass
class TimedRequest:
    """`steps_to_first`: steps from the arrival to the first token."""

    steps_to_first: int = 0
    first_token_s: float = 0.0
    prompt_s: float = 0.0  # from arrival to first token


@dataclass
class TimedSteps:
    scheduler: Scheduler
    machine: StepCosts
    noise: float = 0.0  # relative standard deviation of a step's time
    steps: list[TimedStep] = field(default_factory=list)
    requests: list[TimedRequest] = field(default_factory=list)
    now: float = 0.0

    def __post_init__(self) -> None:
        self._meter = CostMeter()
        self._random = random.Random(0)
        self._image_token_s = 0.0

    def run(self, arrivals: Iterable[Arrival]) -> None:
        """Run all requests, in the order of their arrival, to their end."""
        due = sorted(arrivals, key=lambda arrival: arrival.at_s)
        while len(self.requests) < len(due) or self.scheduler.has_work():
            if not self.scheduler.has_work():
                self.now = max(self.now, due[len(self.requests)].at_s)
            while len(self.requests) < len(due) and due[len(self.requests)].at_s <= self.now:
                self._add(due[len(self.requests)])
            self._step()

    def _add(self, arrival: Arrival) -> None:
        params = SamplingParams(temperature=0, max_tokens=arrival.max_tokens, ignore_eos=True)
        request = EngineRequest(
            request_id=str(len(self.requests)),
            prompt_token_ids=arrival.prompt,
            params=params,
            arrival_s=arrival.at_s,
            images=arrival.images,
        )
        self.scheduler.add(request, self.now)
        self._prepare_images()
        self.requests.append(TimedRequest(prompt_s=-arrival.at_s))

    def _step(self) -> None:
        waits = [r for r in self.requests if not r.first_token_s]
        costs = replace(self._meter.current(), image_token_s=self._image_token_s)
        plan = self.scheduler.step(self.now, costs)
        self._prepare_images()
        if plan.is_empty:  # all sequences waited for images
            return
        seconds, encode_s = self._seconds(plan), self._encode(plan)
        requests = {step.seq_id: int(self.scheduler._state.seqs[step.seq_id].request_id) for step in plan.seqs}
        chunks = {requests[step.seq_id]: step.num_tokens for step in plan.seqs if step.num_tokens > 1}
        self.steps.append(TimedStep(seconds + encode_s, chunks, len(plan.seqs), encode_s))
        rows = np.array([step.num_tokens for step in plan.seqs])
        self._meter.record_forward(rows, np.array([step.start for step in plan.seqs]), seconds)
        self.now += seconds + encode_s
        results = [SeqResult(seq_id=step.seq_id, token_ids=[5] if step.sample else []) for step in plan.seqs]
        for request in waits:
            request.steps_to_first += 1
        for output in self.scheduler.commit(StepResult(step_id=plan.step_id, seqs=results), self.now):
            request = self.requests[int(output.request_id)]
            if not request.first_token_s:
                request.first_token_s = self.now
                request.prompt_s += self.now

    def _prepare_images(self) -> None:
        """Prepare the images that requests wait for, in no time."""
        for request, _ in self.scheduler.unprepared:
            assert not self.scheduler.prepared(request.request_id, self.now)

    def _encode(self, plan: StepPlan) -> float:
        """Return the seconds of the images that the step encodes, and measure them."""
        seqs = self.scheduler._state.seqs
        num_tokens = sum(seqs[seq_id].group.request.images[index].length for seq_id, index in plan.encode)
        seconds = num_tokens * self.machine.image_token_s * max(0.5, self._random.gauss(1.0, self.noise))
        if num_tokens:
            self._image_token_s = moving_average(self._image_token_s, seconds / num_tokens)
        return seconds

    def _seconds(self, plan: StepPlan) -> float:
        machine = self.machine
        exact = machine.step_s + sum(machine.chunk_s(step.start, step.num_tokens) for step in plan.seqs)
        return exact * max(0.5, self._random.gauss(1.0, self.noise))


def timed_steps(machine: StepCosts, *, noise: float = 0.0, **config: object) -> TimedSteps:
    defaults: dict[str, object] = {"max_model_len": 131072, "num_blocks": 9000, "enable_prefix_caching": False}
    return TimedSteps(Scheduler(SchedulerConfig(**(defaults | config))), machine, noise)  # type: ignore[arg-type]
