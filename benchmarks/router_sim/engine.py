"""`SimEngine`: a replica without a model, with the real scheduler and block pool.

The duration of a step is computed from `Hardware`, and the answer of each request is known beforehand. Like a real
engine, it accepts new requests between two steps and publishes a frame about each at once; it publishes a frame when a
step starts and when it ends.
"""

from dataclasses import dataclass

from msgspec.structs import replace
from octavo_engine.core.scheduler import Scheduler
from octavo_engine.wire.kv_stream import KVChange, numbers, run_together
from octavo_engine.wire.plan import SeqResult, StepPlan, StepResult
from octavo_engine.wire.records import EngineRequest, SeqOutput
from octavo_engine.wire.sampling import SamplingParams
from octavo_server.kv.frames import VERSION, Frame, Hello, ReplicaLoad, Snapshot, Step
from octavo_server.kv.pending_prompts import PendingPrompts, full_blocks
from octavo_server.kv.publisher import changes_routing, load_of

from router_sim.hardware import HASH_ROOT, Hardware
from router_sim.workloads import Request


@dataclass(slots=True)
class _Answer:
    """`start`: position in the sequence where the answer begins, which is the length of the prompt."""

    start: int
    tokens: bytes


class SimEngine:
    def __init__(self, hardware: Hardware, epoch: int) -> None:
        self.scheduler = Scheduler(hardware.scheduler_config(), kv_events=True)
        self.busy_s = 0.0
        self.num_requests = 0  # requests that haven't ended
        self._num_received = 0
        self.ends_s = 0.0  # end of the running step
        self.cached: set[int] = set()  # short hashes, with no delay
        self._hardware = hardware
        self._epoch = epoch
        self._seq = 0
        self._digest = 0
        self._pending = PendingPrompts(self.scheduler.config.block_size)
        self._of_scheduler = self._load = ReplicaLoad()
        self._answers: dict[int, _Answer] = {}  # by -1 - request number, and by sequence id once a plan has assigned it
        self._plan: StepPlan | None = None
        self._step_s = 0.0

    @property
    def is_idle(self) -> bool:
        return self._plan is None

    @property
    def is_full(self) -> bool:
        return self.num_requests >= self._hardware.max_queued

    @property
    def num_running(self) -> int:
        return self._load.running

    def hello(self) -> list[Frame]:
        config = self.scheduler.config
        self._of_scheduler = self._load = self._load_now()
        hello = Hello(
            version=VERSION,
            epoch=self._epoch,
            block_size=config.block_size,
            root=config.hash_root,
            max_model_len=config.max_model_len,
            models=["sim"],
            heartbeat_s=1.0,
        )
        return [hello, Snapshot(epoch=self._epoch, seq=0, digest=0, load=self._load)]

    def add(self, request: Request, now: float) -> Step:
        """Accept a request and return the frame about it."""
        self.num_requests += 1
        self._num_received += 1
        self._answers[-1 - request.number] = _Answer(len(request.prompt), request.answer)
        asked = EngineRequest(
            request_id=str(request.number),
            prompt_token_ids=list(request.prompt),
            params=SamplingParams(seed=request.number, max_tokens=len(request.answer), ignore_eos=True),
            arrival_s=now,
        )
        self.scheduler.add(asked, now)
        blocks = full_blocks(asked, HASH_ROOT, self.scheduler.config.block_size)
        arrival = self._pending.add(asked, blocks, self.cached.__contains__)
        self._load = self._pending.add_to_load(self._of_scheduler)
        return self._make_frame(None, coming=run_together(arrival.coming))

    def begin(self, now: float) -> bool:
        """Start a step, which ends at `ends_s`; return False if there is nothing to do."""
        plan = self.scheduler.step(now)
        for new in plan.new_seqs:
            self._answers[new.seq_id] = self._answers[-1 - new.seed]
        if plan.is_empty:
            return False
        prefill = sum(step.num_tokens for step in plan.seqs if step.num_tokens > 1)
        decodes = sum(step.num_tokens == 1 for step in plan.seqs)
        self._step_s = self._hardware.duration_s(prefill, decodes) if plan.seqs else 0.0
        self.busy_s += self._step_s
        self.ends_s = now + self._step_s
        self._plan = plan
        return True

    def started_frame(self) -> Step | None:
        """Return a frame about the running step, if anything changed; its load has the time of the step before."""
        before = self._load
        return self._change_frame(replace(self._load_now(), step_tokens=before.step_tokens, step_ms=before.step_ms))

    def finish(self) -> tuple[list[SeqOutput], Step | None]:
        """End the running step; return its outputs, and the frame about it if anything changed."""
        plan = self._plan
        assert plan is not None
        self._plan = None
        outputs = self.scheduler.commit(self._result(plan), self.ends_s)
        for output in outputs:
            if output.finish_reason is not None:
                self.num_requests -= 1
                del self._answers[-1 - int(output.request_id)]
        for seq_id in plan.dropped_seqs:
            self._answers.pop(seq_id, None)
        return outputs, self._change_frame(self._load_now())

    def _result(self, plan: StepPlan) -> StepResult:
        results = []
        for step in plan.seqs:
            if step.sample:
                answer = self._answers[step.seq_id]
                token = answer.tokens[step.start + step.num_tokens - answer.start]
                results.append(SeqResult(seq_id=step.seq_id, token_ids=[token]))
        return StepResult(step_id=plan.step_id, seqs=results)

    def _change_frame(self, load: ReplicaLoad) -> Step | None:
        change = self.scheduler.take_kv_delta().change()
        before, self._of_scheduler = self._load, load
        self._load = self._pending.add_to_load(load)
        if change is None and not changes_routing(before, self._load):
            return None
        return self._make_frame(change)

    def _make_frame(self, change: KVChange | None, *, coming: bytes = b"") -> Step:
        self._seq += 1
        if change is None:
            return Step(epoch=self._epoch, seq=self._seq, digest=self._digest, load=self._load, coming=coming)
        self._digest = change.digest
        self.cached.update(numbers(change.stored))
        self.cached.difference_update(numbers(change.removed))
        return Step(
            epoch=self._epoch,
            seq=self._seq,
            digest=change.digest,
            load=self._load,
            stored=change.stored,
            removed=change.removed,
        )

    def _load_now(self) -> ReplicaLoad:
        stats = self.scheduler.stats()
        stats.received, stats.step_s = self._num_received, self._step_s
        return load_of(stats)
