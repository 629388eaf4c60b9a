"""`EngineCore`: schedule, run, commit, around one scheduler and one executor. No sockets, no text, no torch.

It owns the law that every (request, index) ends in exactly one terminal event: the ledger of open sequences is kept
here, whatever the scheduler or the executor do. A step whose executor raises ends its sequences with "error" and
leaves the engine serving; an exception in the scheduler is our bug and goes up.
"""

import gc
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol

from octavo_engine.wire.errors import EngineDead, InvalidRequest, OctavoError
from octavo_engine.wire.plan import StepCosts, StepPlan, StepResult
from octavo_engine.wire.records import CoreOutputs, EngineRequest, EngineStats, FinishReason, SeqOutput

if TYPE_CHECKING:
    from octavo_engine.core.scheduler import Scheduler

logger = logging.getLogger(__name__)

Clock = Callable[[], float]


class Executor(Protocol):
    def submit(self, plan: StepPlan) -> Future[StepResult]: ...

    def shutdown(self) -> None: ...


class EngineCore:
    """Raises from `step` only for bugs and for an executor that is gone (EngineDead)."""

    def __init__(self, scheduler: "Scheduler", executor: Executor, *, clock: Clock = time.monotonic) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._costs = StepCosts()
        self._open: dict[str, set[int]] = {}
        self._events: list[SeqOutput] = []  # made here, not by a commit
        self._step_s = 0.0

    def add(self, request: EngineRequest) -> None:
        """A refusal is an "error" event, not an exception: whoever sent the request may be in another process."""
        if request.request_id in self._open:
            raise InvalidRequest(f"request_id {request.request_id!r} is already running.", param="request_id")
        self._open[request.request_id] = set(range(request.params.n))
        try:
            self._scheduler.add(request, self._clock())
        except OctavoError as error:
            self._close_all(request.request_id, "error", str(error))

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Unknown and finished sequences are ignored: an abort may cross the last output on its way."""
        still_open = self._open.get(request_id, set())
        indices = sorted(still_open) if index is None else sorted(still_open & {index})
        if not indices:
            return
        self._scheduler.abort(request_id, index)
        for i in indices:
            self._close(SeqOutput(request_id=request_id, index=i, finish_reason="abort"))

    def has_work(self) -> bool:
        return bool(self._events) or self._scheduler.has_work()

    def step(self) -> CoreOutputs:
        started = self._clock()
        outputs = self._advance(started) if self._scheduler.has_work() else []
        events, self._events = self._events, []
        self._step_s = self._clock() - started
        return CoreOutputs(outputs=events + outputs, stats=self.stats())

    def stats(self) -> EngineStats:
        stats = self._scheduler.stats()
        stats.step_s = self._step_s
        return stats

    def shutdown(self) -> None:
        self._executor.shutdown()

    def _advance(self, now: float) -> list[SeqOutput]:
        plan = self._scheduler.step(now, self._costs)
        result = self._run(plan)
        self._costs = result.costs
        committed = self._scheduler.commit(result, self._clock())
        return [out for out in committed if self._accept(out)]

    def _run(self, plan: StepPlan) -> StepResult:
        if plan.is_empty:
            return StepResult(step_id=plan.step_id, costs=self._costs)
        try:
            return self._executor.submit(plan).result()
        except EngineDead:
            raise
        except Exception as error:
            logger.exception("step %d failed", plan.step_id)
            reason = f"the step failed: {type(error).__name__}: {error}"
            return StepResult(step_id=plan.step_id, costs=self._costs, error=reason)

    def _accept(self, out: SeqOutput) -> bool:
        """Whether `out` belongs to an open sequence; its terminal record closes the sequence."""
        still_open = self._open.get(out.request_id, set())
        if out.index not in still_open:
            return False
        if out.finish_reason is not None:
            still_open.remove(out.index)
            if not still_open:
                del self._open[out.request_id]
        return True

    def _close(self, event: SeqOutput) -> None:
        if self._accept(event):
            self._events.append(event)

    def _close_all(self, request_id: str, reason: FinishReason, message: str) -> None:
        for i in sorted(self._open[request_id]):
            self._close(SeqOutput(request_id=request_id, index=i, finish_reason=reason, error=message))


def settle_memory() -> None:
    """After start: what lives now lives for ever, so the collector need not look at it again during a step."""
    gc.collect()
    gc.freeze()
