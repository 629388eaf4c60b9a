"""`EngineCore`: the loop of schedule, run and commit over one scheduler and one executor; no sockets, text or torch.

With `SchedulerConfig.steps_ahead`, a step is planned and submitted while the one before it runs, so that a GPU does not
wait for the host; results are then committed one step later.

Every (request, index) gets exactly one terminal record: from a commit, from an abort, or from an `add` that raises. If
the executor raises, the step's sequences end with "error", and the engine continues to serve. An exception of the
scheduler is a bug, and is raised to the caller.
"""

import gc
import logging
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from octavo_engine.loop.loaded_adapters import AdapterSource, LoadedAdapters, Reply
from octavo_engine.loop.pending_requests import (
    PendingRequests,
    QueueDeadlines,
    Work,
    error_info,
    grammar_work,
    image_work,
)
from octavo_engine.wire.errors import CALL_ERRORS, EngineDead, InvalidRequest, OctavoError, Unavailable
from octavo_engine.wire.inspection import Answer, CallName
from octavo_engine.wire.plan import SeqId, StepCosts, StepPlan, StepResult
from octavo_engine.wire.records import CoreOutputs, EngineRequest, EngineStats, SeqOutput
from octavo_engine.wire.sleep import ASLEEP, WAKE_RETRY_S, MemoryTag

if TYPE_CHECKING:
    from octavo_engine.core.scheduler import Scheduler
    from octavo_engine.core.sequence import Sequence as DecodingSequence
    from octavo_engine.loop.trace_file import TraceFile
    from octavo_engine.runner.executor import Executor

logger = logging.getLogger(__name__)

Clock = Callable[[], float]
P = ParamSpec("P")
T = TypeVar("T")


class Proposer(Protocol):
    """`propose` yields drafts for some of `seqs`, which are all sequences whose next step decodes."""

    def propose(self, seqs: list["DecodingSequence"], costs: StepCosts) -> Iterable[tuple[SeqId, list[int]]]: ...


def _ends_engine(method: Callable[Concatenate["EngineCore", P], T]) -> Callable[Concatenate["EngineCore", P], T]:
    """Make a method store the error that ends the engine, for `shutdown`."""

    @wraps(method)
    def call(core: "EngineCore", /, *args: P.args, **options: P.kwargs) -> T:
        try:
            return method(core, *args, **options)
        except Exception as error:
            if isinstance(error, EngineDead) or not isinstance(error, OctavoError):
                core.end_reason = str(error) or type(error).__name__
            raise

    return call


class EngineCore:
    """`step` raises only for a bug, or EngineDead if the executor is lost. `shutdown` closes `trace`."""

    def __init__(
        self,
        scheduler: "Scheduler",
        executor: "Executor",
        *,
        clock: Clock = time.monotonic,
        trace: "TraceFile | None" = None,
        grammar_timeout_s: float = 10.0,
        proposer: Proposer | None = None,
        adapters: Iterable[tuple[str, AdapterSource]] = (),
        max_cpu_loras: int = 8,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._trace = trace
        self._proposer = proposer
        self._adapters = LoadedAdapters(executor, clock, max_in_memory=max_cpu_loras, start=adapters)
        self._costs = StepCosts()
        self._pending = PendingRequests()
        self._grammar_timeout_s = grammar_timeout_s
        self._deadlines = QueueDeadlines(scheduler.is_waiting)
        self._events: list[SeqOutput] = []  # terminal records that do not come from a commit
        self._in_flight: deque[tuple[int, Future[StepResult]]] = deque()  # ids and results of submitted plans
        self._released: set[MemoryTag] = set()
        self._lost: EngineDead | None = None  # set on another thread
        self.end_reason: str | None = None
        self._wake: Callable[[], None] = lambda: None
        self._on_lost: Callable[[EngineDead], None] = lambda error: None
        executor.on_lost(self._lose)
        self._step_s = 0.0
        self._batched_tokens = 0
        self._num_received = 0
        self.on_interim: Callable[[CoreOutputs], None] | None = None  # receives outputs before the step has ended

    def add(self, request: EngineRequest) -> None:
        """Queue a request. If it is rejected, `step` returns "error" records: the sender may be in another process."""
        self._num_received += 1
        try:
            if self._released:
                raise Unavailable(ASLEEP, retry_after_s=WAKE_RETRY_S)
            if request.adapter and request.adapter not in self._adapters:
                raise InvalidRequest(f"the adapter {request.adapter!r} is not loaded: load it first.", param="adapter")
            now = self._clock()
            is_ready = self._adapters.is_ready(request.adapter)
            if request.images and self._executor.images is None:
                raise InvalidRequest("this model takes no images: omit them.", param="images")
            self._scheduler.add(request, now, deferred=request.grammar is not None or not is_ready)
            self._start_images()
            if works := self._start_works(request, now):
                self._pending.start(request.request_id, works)
            if request.start_by_s is not None:
                self._deadlines.add(request.request_id, request.start_by_s)
        except EngineDead:
            raise
        except OctavoError as error:
            info = error_info(error)
            self._events += [
                SeqOutput(request_id=request.request_id, index=i, finish_reason="error", error=info)
                for i in range(request.params.n)
            ]

    @_ends_engine
    def load_adapter(self, location: str) -> str:
        """Load an adapter between two steps; return its hash. Raises InvalidRequest, and Unavailable while asleep."""
        if self._released:
            raise Unavailable(ASLEEP, retry_after_s=WAKE_RETRY_S)
        return self._adapters.load(location)

    def start_loading_adapter(self, load_id: Hashable, location: str, reply: Reply) -> None:
        """Load an adapter beside running requests; `reply` is called now, or by a later `step`."""
        self._adapters.start_loading(load_id, location, reply)

    def end_loading_adapter(self, load_id: Hashable) -> None:
        """End a load, unless it has ended; its `reply` gets Unavailable."""
        self._adapters.end_loading(load_id)

    def unload_adapter(self, adapter: str, location: str) -> None:
        """Undo one load: without another, reject new requests for the adapter; free its memory after the last one."""
        self._adapters.unload(adapter, location)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request or one output. Unknown ids are ignored: the last output may have been sent already."""
        self._events += self._scheduler.abort(request_id, index)
        self._forget_ended([request_id])

    def has_work(self) -> bool:
        has_done = self._pending.has_done() or self._adapters.has_done() or self._lost is not None
        return bool(self._events or self._in_flight) or self._scheduler.has_work() or has_done

    def on_more_work(self, call: Callable[[], None]) -> None:
        """Set a function that is called, on any thread, when an idle core may have work again."""
        self._pending.on_done = self._adapters.on_done = self._wake = call

    def on_lost(self, call: Callable[[EngineDead], None]) -> None:
        """Set a function to call with the error once a rank is lost, on any thread. The next step raises the same
        error."""
        self._on_lost = call
        if self._lost is not None:
            call(self._lost)

    def sleep_s(self) -> float | None:
        """Return after how many seconds an idle core must run `step` for a deadline; None if there is no deadline."""
        parts = (self._pending.next_deadline_s, self._deadlines.next_s, self._adapters.next_deadline_s)
        deadlines = [s for s in (next_s() for next_s in parts) if s is not None]
        return max(0.0, min(deadlines) - self._clock()) if deadlines else None

    def wait_for_work(self, timeout_s: float) -> None:
        """Block until there is work: a step to run, or a request whose grammar, image or adapter is ready; or until the
        timeout."""
        futures: list[Future[Any]] = [*self._pending.futures(), *self._adapters.futures()]
        if not self.has_work():
            wait(futures, timeout_s, FIRST_COMPLETED)

    @_ends_engine
    def step(self) -> CoreOutputs:
        """Run one step if there is work; return all records since the previous call."""
        if self._lost is not None:
            raise self._lost
        started = self._clock()
        self._adapters.finish_loading(is_asleep=bool(self._released))
        for request_id, error in self._pending.pop_done(started):
            self._events += self._scheduler.prepared(request_id, started, error=error)
            self._forget_ended([request_id])
        for request_id in self._deadlines.pop_expired(started):
            self.abort(request_id)
        outputs = self._advance(started) if self._in_flight or self._scheduler.has_work() else []
        self._forget_ended([out.request_id for out in outputs if out.finish_reason is not None])
        events, self._events = self._events, []
        self._step_s = self._clock() - started
        kv = self._scheduler.take_kv_delta().change()
        lives = self._scheduler.take_block_lives() or None
        stats = self.stats()
        stats.tenants = self._scheduler.take_tenant_usage()
        self._batched_tokens = stats.batched_tokens
        return CoreOutputs(outputs=events + outputs, stats=stats, kv=kv, block_lives=lives)

    @_ends_engine
    def call(self, name: CallName, tags: Sequence[MemoryTag] = ()) -> Answer:
        """Run a function between two steps. `tags`: of sleep and wake_up. Raises Unavailable if waking fails."""
        match name:
            case "probe":
                return True
            case "debug_requests":
                return self._scheduler.describe_sequences(self._clock())
            case "reset_prefix_cache":
                done = self._scheduler.reset_prefix_cache()
                self._publish_interim()  # before the answer: the caller then sees the blocks as published
                return done
            case "reset_mm_cache":
                if self._executor.images is not None:
                    self._executor.images.reset()
                return True
            case "sleep":
                self._sleep(tags)
                return True
            case "wake_up":
                self._wake_up(tags)
                return True

    @property
    def is_sleeping(self) -> bool:
        return bool(self._released)

    def stats(self) -> EngineStats:
        stats = self._scheduler.stats()
        stats.received, stats.step_s = self._num_received, self._step_s
        if (images := self._executor.images) is not None:
            stats.mm_cache_queries, stats.mm_cache_hits = images.num_queries, images.num_hits
        if self._adapters:
            seqs = [seq for seq in self._scheduler.sequences() if seq.group.request.adapter]
            stats.running_adapters = sorted({s.group.request.adapter for s in seqs if s.status == "running"})
            stats.waiting_adapters = sorted({s.group.request.adapter for s in seqs if s.status != "running"})
        return stats

    def shutdown(self, reason: str | None = None) -> None:
        """Free everything. `reason`: the error that ends the engine; None: an error that a method raised, if any."""
        self._executor.shutdown(reason or self.end_reason)
        if self._trace is not None:
            self._trace.close()

    def _lose(self, error: EngineDead) -> None:
        self._lost = error
        self._wake()
        self._on_lost(error)

    def _advance(self, now: float) -> list[SeqOutput]:
        """Submit a plan if one more may be in flight; commit the oldest plan unless yet another may be submitted."""
        num_before = len(self._in_flight)
        if num_before < self._scheduler.max_in_flight:
            self._submit_next(now)
        if not self._in_flight or num_before < len(self._in_flight) < self._scheduler.max_in_flight:
            return []
        return self._commit_oldest()

    def _submit_next(self, now: float) -> None:
        if self._proposer is not None:
            for seq_id, drafts in self._proposer.propose(self._scheduler.decoding(), self._costs):
                self._scheduler.propose(seq_id, drafts)
        plan = self._scheduler.step(now, self._costs)
        self._start_images()
        if not plan.is_empty:
            self._publish_interim(plan)
            self._in_flight.append((plan.step_id, self._submit(plan)))
            self._release_images(self._scheduler.encoded)

    def _publish_interim(self, plan: StepPlan | None = None) -> None:
        """Publish the block changes and the queue now, before the planned step runs: a prefill may take a second."""
        if self.on_interim is None:
            return
        kv = self._scheduler.take_kv_delta().change()
        if kv is not None or (plan is not None and any(step.num_tokens > 1 for step in plan.seqs)):
            stats = self.stats()
            stats.batched_tokens = self._batched_tokens  # like `step_s`, of the latest step that has ended
            self.on_interim(CoreOutputs(stats=stats, kv=kv, is_interim=True))

    def _sleep(self, tags: Sequence[MemoryTag]) -> None:
        """End all requests with "abort", empty the cache and give memory back, unless it is given back already."""
        for request_id in dict.fromkeys(seq.request_id for seq in self._scheduler.sequences()):
            self.abort(request_id)
        while self._in_flight:
            self._events += self._commit_oldest()
        is_empty = self._scheduler.reset_prefix_cache()
        assert is_empty, "an aborted request holds blocks"
        self._publish_interim()
        for tag in tags:
            if tag not in self._released:
                self._executor.release(tag)
                self._released.add(tag)
        if "weights" in tags:
            self._adapters.forget_memory()

    def _wake_up(self, tags: Sequence[MemoryTag]) -> None:
        for tag in tags:
            if tag in self._released:
                try:
                    self._executor.restore(tag)
                except EngineDead:
                    raise
                except CALL_ERRORS as error:
                    logger.error("waking up failed: %s: %s", tag, error)
                    message = f"The engine still sleeps, as its {tag} could not be restored: {error} Remove the cause, "
                    raise Unavailable(message + "then call wake_up again.", retry_after_s=WAKE_RETRY_S) from error
                self._released.discard(tag)

    def _start_works(self, request: EngineRequest, now: float) -> list[Work]:
        """Start the work that a request waits for, besides its images."""
        works = []
        if request.grammar is not None:
            prepared = self._executor.prepare(request.grammar)
            works.append(grammar_work(prepared, now=now, timeout_s=self._grammar_timeout_s))
        if request.adapter and (reading := self._adapters.acquire(request.request_id, request.adapter)) is not None:
            works.append(Work(reading, error_info))
        return works

    def _start_images(self) -> None:
        """Make the requests that the scheduler has deferred for images wait for these images."""
        for request, first in self._scheduler.unprepared:
            assert self._executor.images is not None, "requests with images are refused"
            needed = {i: image for i, image in enumerate(request.images, start=1) if image.end > first}
            futures = self._executor.images.acquire(request.request_id, [*needed.values()], request.tenant)
            self._pending.start(request.request_id, [image_work(f, i) for i, f in zip(needed, futures, strict=True)])

    def _release_images(self, request_ids: Iterable[str]) -> None:
        if self._executor.images is not None:
            for request_id in request_ids:
                self._executor.images.release(request_id)

    def _forget_ended(self, request_ids: list[str]) -> None:
        """Release images, grammars and adapters of those requests that have ended."""
        for request_id in request_ids:
            if not self._scheduler.is_live(request_id):
                self._pending.forget(request_id)
                self._release_images([request_id])
                self._adapters.release(request_id)

    def _submit(self, plan: StepPlan) -> "Future[StepResult]":
        try:
            return self._executor.submit(plan)
        except EngineDead:
            raise
        except Exception as error:
            logger.exception("step %d failed", plan.step_id)
            future: Future[StepResult] = Future()
            future.set_result(self._failed_result(plan.step_id, error))
            return future

    def _commit_oldest(self) -> list[SeqOutput]:
        """Commit the oldest plan in flight. If it has failed, drop the later plans, which computed without its
        tokens."""
        result = self._next_result()
        self._costs = result.costs
        outputs = self._scheduler.commit(result, self._clock())
        while result.error is not None and self._in_flight:
            self._scheduler.commit(self._next_result(), self._clock())  # without effect
        return outputs

    def _next_result(self) -> StepResult:
        step_id, future = self._in_flight.popleft()
        try:
            return future.result()
        except EngineDead:
            raise
        except Exception as error:
            logger.exception("step %d failed", step_id)
            return self._failed_result(step_id, error)

    def _failed_result(self, step_id: int, error: Exception) -> StepResult:
        reason = f"the step failed: {type(error).__name__}: {error}"
        return StepResult(step_id=step_id, costs=self._costs, error=reason)


def freeze_gc() -> None:
    """Exempt all existing objects from garbage collection: they live until exit, and scanning them delays tokens."""
    gc.collect()
    gc.freeze()
