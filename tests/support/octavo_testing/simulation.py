"""A scheduler, a `SimExecutor` and requests in one loop, with the laws of scheduling asserted at each step.

A test may delay results, so that several plans are in flight. Each output is compared with `expected_output`, which is
computed without blocks, batches or preemption.
"""

from collections import deque
from dataclasses import dataclass, field

from octavo_engine.core.scheduler import Scheduler
from octavo_engine.core.sequence import Sequence
from octavo_engine.loop.engine_core import Proposer
from octavo_engine.settings.records import SchedulerConfig
from octavo_engine.wire.hashing import root_hash
from octavo_engine.wire.plan import StepCosts, StepPlan, StepResult
from octavo_engine.wire.records import EngineRequest, ImageInput, SeqOutput, TokenLogprobs
from octavo_engine.wire.sampling import SamplingParams

from octavo_testing.sim_executor import SimExecutor, expected_output

Output = tuple[str, int]


def sim_config(**fields: object) -> SchedulerConfig:
    defaults: dict[str, object] = {
        "max_model_len": 64,
        "num_blocks": 16,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "hash_root": root_hash("sim", "f32", 4),
        "debug_invariants": True,
    }
    return SchedulerConfig(**(defaults | fields))  # type: ignore[arg-type]


def sim_request(
    request_id: str,
    prompt: list[int],
    *,
    priority: int = 0,
    arrival_s: float = 0.0,
    eos: int | None = None,
    salt: str = "",
    images: tuple[ImageInput, ...] = (),
    tenant: str = "",
    weight: float = 1.0,
    adapter: str = "",
    **params: object,
) -> EngineRequest:
    defaults: dict[str, object] = {"temperature": 1.0, "seed": 1000 + sum(map(ord, request_id)), "max_tokens": 4}
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        params=SamplingParams(**(defaults | params)),  # type: ignore[arg-type]
        priority=priority,
        arrival_s=arrival_s,
        eos_token_id=eos,
        cache_salt=salt,
        images=images,
        tenant=tenant,
        weight=weight,
        adapter=adapter,
    )


@dataclass
class Received:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    last: SeqOutput | None = None


class Simulation:
    """`proposer`: gives decoding sequences drafts before each step, as the engine does; None: the test proposes."""

    def __init__(
        self,
        *,
        scheduler: Scheduler | None = None,
        costs: StepCosts | None = None,
        proposer: Proposer | None = None,
        **config: object,
    ) -> None:
        self.config = scheduler.config if scheduler else sim_config(**config)
        self.scheduler = scheduler or Scheduler(self.config)
        self.executor = SimExecutor(
            num_blocks=self.config.num_blocks,
            num_host_blocks=self.config.num_host_blocks,
            block_size=self.config.block_size,
        )
        self.costs = costs or StepCosts()
        self.proposer = proposer
        self.now = 0.0
        self.requests: dict[str, EngineRequest] = {}
        self.received: dict[Output, Received] = {}
        self.forked_at: dict[Output, list[int]] = {}
        self.results: deque[StepResult] = deque()
        self.preparing: dict[str, int] = {}  # requests that wait for their images, and the token after which these are
        self.prepared: dict[str, int] = {}

    def add(self, request_id: str, prompt: list[int], **fields: object) -> None:
        request = sim_request(request_id, prompt, **fields)  # type: ignore[arg-type]
        self.scheduler.add(request, self.now)
        self._note_unprepared()
        self.requests[request_id] = request
        for index in range(request.params.n):
            self.received[request_id, index] = Received()

    def abort(self, request_id: str, index: int | None = None) -> None:
        self._receive(self.scheduler.abort(request_id, index))

    def prepare(self, request_id: str) -> None:
        """Prepare the images for which a request waits."""
        first = self.preparing.pop(request_id)
        self.prepared[request_id] = min(first, self.prepared.get(request_id, first))
        assert not self.scheduler.prepared(request_id, self.now)

    def _note_unprepared(self) -> None:
        self.preparing |= {request.request_id: first for request, first in self.scheduler.unprepared}

    def fork(self, seq: Sequence) -> Output:
        child = self.seq(self.scheduler.fork(seq.seq_id))
        output = (child.request_id, child.indices[0])
        self.received[output] = Received()
        self.forked_at[output] = list(child.token_ids)
        return output

    def seq(self, seq_id: int) -> Sequence:
        return self.scheduler._state.seqs[seq_id]

    @property
    def live(self) -> list[Sequence]:
        return [*self.scheduler._state.seqs.values()]

    def step(self) -> StepPlan:
        """Plan a step, check the laws and run the plan at once; the result is queued until `commit`."""
        self.now += 1.0
        state = self.scheduler._state
        was_waiting = [*state.waiting]
        if self.proposer is not None:
            for seq_id, drafts in self.proposer.propose(self.scheduler.decoding(), self.costs):
                self.scheduler.propose(seq_id, drafts)
        plan = self.scheduler.step(self.now, self.costs)
        self._check_laws(plan, was_waiting)
        self._check_images(plan)
        self._note_unprepared()
        if not plan.is_empty:
            self.results.append(self.executor.run(plan))
        return plan

    def commit(self, *, error: str | None = None) -> list[SeqOutput]:
        self.now += 1.0
        result = self.results.popleft()
        if error is not None:
            result = StepResult(step_id=result.step_id, error=error)
            self.executor.fail()
        outputs = self.scheduler.commit(result, self.now)
        self._receive(outputs)
        return outputs

    def tick(self) -> StepPlan:
        self.prepare_all()
        plan = self.step()
        while self.results:
            self.commit()
        return plan

    def prepare_all(self) -> None:
        for request_id in [*self.preparing]:
            self.prepare(request_id)

    def drain(self, *, depth: int = 1) -> None:
        """Run until no work is left, with `depth` plans in flight; fail after more steps than the work can take."""
        bound = self._max_steps()
        for _ in range(bound):
            self.prepare_all()
            if not self.scheduler.has_work():
                break
            while len(self.results) >= depth:
                self.commit()
            plan = self.step()
            if plan.is_empty and not self.preparing:
                assert self.results, "nothing in flight, work to do, and an empty plan"
                self.commit()
        while self.results:
            self.commit()
        assert not self.scheduler.has_work(), f"no end after {bound} steps"

    def verify(self) -> None:
        """Assert that each output is the one of a request that runs alone, and that no block is left in use."""
        for (request_id, index), received in self.received.items():
            request, last = self.requests[request_id], received.last
            assert last is not None, f"{request_id}[{index}] never ended"
            tokens, reason, stop = self.expected(request_id, index)
            if last.finish_reason in ("abort", "error"):
                assert received.token_ids == tokens[: len(received.token_ids)]
                continue
            assert (received.token_ids, last.finish_reason, last.stop_reason) == (tokens, reason, stop)
            assert last.timing is not None
            if request.params.logprobs is not None:
                assert [entry.token_ids[0] for entry in received.logprobs] == tokens
            if request.params.prompt_logprobs is not None and received.prompt_logprobs is not None:
                assert received.prompt_logprobs[0] is None
                chosen = [entry.token_ids[0] for entry in received.prompt_logprobs[1:] if entry]
                assert chosen == request.prompt_token_ids[1:]
        stats = self.scheduler.stats()
        assert stats.in_use_blocks == 0
        assert stats.free_blocks + stats.cached_blocks == stats.total_blocks
        host = self.scheduler._state.kv.host
        assert host is None or not [*host.private_keys()]

    def expected(self, request_id: str, index: int = 0) -> tuple[list[int], str, int | None]:
        max_len = min(self.config.max_model_len, self.config.num_blocks * self.config.block_size)
        base = self.forked_at.get((request_id, index))
        return expected_output(self.requests[request_id], index=index, max_len=max_len, start_from=base)

    def _receive(self, outputs: list[SeqOutput]) -> None:
        for output in outputs:
            received = self.received[output.request_id, output.index]
            assert received.last is None, "a record after the last one"
            assert output.token_ids or output.finish_reason, "an empty record"
            received.token_ids += output.token_ids
            received.logprobs += output.logprobs or []
            if output.prompt_logprobs is not None:
                assert received.prompt_logprobs is None, "prompt logprobs twice"
                received.prompt_logprobs = output.prompt_logprobs
            if output.finish_reason is not None:
                received.last = output

    def _check_laws(self, plan: StepPlan, was_waiting: list[Sequence]) -> None:
        config, state = self.config, self.scheduler._state
        self.scheduler.check()
        assert plan.num_tokens <= config.max_num_batched_tokens
        assert len(plan.seqs) <= config.max_num_seqs
        assert len({step.seq_id for step in plan.seqs}) == len(plan.seqs)
        planned = {step.seq_id for step in plan.seqs}
        tenants = {seq.group.tenant for seq in state.seqs.values() if seq.status != "deferred"}
        for tenant in tenants:
            waited = [seq for seq in was_waiting if seq.group.tenant is tenant]
            admitted = [seq for seq in waited if seq.status == "running"]
            overtaken = [seq for seq in waited if seq.status not in ("running", "deferred")]
            pairs = [(first, later) for first in overtaken for later in admitted if first.key < later.key]
            may_wait = config.max_loras > 0  # for its adapter, behind which other adapters wait
            assert all(may_wait and first.adapter and not later.adapter for first, later in pairs), "overtaken"
        preempted = [seq for seq in state.waiting if seq not in was_waiting and seq.status == "preempted"]
        if len(tenants) == 1:
            assert not preempted or not admitted, "preempting and admitting in one step"
        assert not planned & {seq.seq_id for seq in preempted}, "a preempted sequence in the plan"
        for seq in (self.seq(seq_id) for seq_id in planned):
            assert seq.pending <= (1 if seq.needs_newest else 1 + config.steps_ahead)
            assert seq.length <= seq.limit, "a step beyond the length limit"
        adapters = {self.seq(seq_id).adapter for seq_id in planned} - {""}
        assert not config.max_loras or len(adapters) <= config.max_loras, "too many adapters in a step"
        stats = self.scheduler.stats()
        assert stats.free_blocks + stats.cached_blocks + stats.in_use_blocks == stats.total_blocks
        assert stats.kv_used_slots <= stats.in_use_blocks * config.block_size
        assert stats.host_used_blocks <= stats.host_total_blocks

    def _check_images(self, plan: StepPlan) -> None:
        """Assert that the images are prepared of which the plan computes tokens."""
        for step in plan.seqs:
            request = self.seq(step.seq_id).group.request
            for image in request.images:
                if image.start < step.start + step.num_tokens and step.start < image.end:
                    assert image.end > self.prepared[request.request_id], "an image is not prepared"
        for request_id in self.scheduler.encoded:
            del self.prepared[request_id]

    def _max_steps(self) -> int:
        """Bound the number of steps: in each step the first running sequence advances by a token or a whole chunk."""
        chunk = self.config.max_num_batched_tokens
        if self.config.enable_chunked_prefill and self.config.long_prefill_token_threshold:
            chunk = min(chunk, self.config.long_prefill_token_threshold)
        steps = sum(len(s.indices) * (s.limit - s.num_prompt + s.limit // chunk + 2) for s in self.live)
        return 10 + 3 * steps + 2 * len(self.live)
