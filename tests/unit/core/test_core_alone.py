"""The decisions for requests of one tenant, as a hash: fairness between tenants changes none of them."""

import hashlib
import json
import random
from collections import deque

from octavo_engine.core.scheduler import Scheduler
from octavo_engine.core.trace import encode_ended, encode_plan
from octavo_engine.settings.records import SchedulerConfig
from octavo_engine.wire.errors import InvalidRequest
from octavo_engine.wire.plan import SeqResult, StepCosts, StepResult
from octavo_engine.wire.records import EngineRequest
from octavo_engine.wire.sampling import SamplingParams

NUM_RUNS, NUM_EVENTS = 15, 400
#: Of the plans and ended outputs of all runs, computed before the scheduler knew tenants. The run with the largest host
#: tier, and no other, has changed since: the tier now drops the tail of a used prefix before its head.
EXPECTED = "e089777b34659932b17028aead91300ab9fe6f111579aed14700042bac545191"


def random_config(rng: random.Random) -> SchedulerConfig:
    max_model_len = rng.choice([40, 120, 400])
    chunked = rng.random() < 0.8
    return SchedulerConfig(
        max_model_len=max_model_len,
        num_blocks=rng.choice([12, 30, 60, 200]),
        num_host_blocks=rng.choice([0, 0, 5, 40]),
        block_size=rng.choice([2, 4, 16]),
        max_num_seqs=rng.choice([2, 4, 8, 32]),
        max_num_batched_tokens=rng.choice([16, 48, 128]) if chunked else max_model_len,
        steps_ahead=rng.choice([0, 0, 1, 2]),
        policy=rng.choice(["fcfs", "priority"]),
        enable_prefix_caching=rng.random() < 0.7,
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=rng.choice([0, 0, 9]),
        max_step_ms=rng.choice([0.0, 20.0, 100.0]),
        watermark=rng.choice([0.0, 0.01, 0.1]),
        preemption_mode=rng.choice(["auto", "swap", "recompute"]),
        debug_invariants=rng.random() < 0.05,
    )


class RandomRun:
    """One scheduler under random events; each decision is a line for the hash."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.scheduler = Scheduler(random_config(self.rng))
        measured = StepCosts(prefill_token_s=0.001, context_token_s=1e-6, step_s=0.01, swap_block_s=0.002)
        self.costs = self.rng.choice([StepCosts(), measured])
        self.plans: deque[StepResult] = deque()
        self.lines: list[str] = []
        self.names: list[str] = []
        self.now = 0.0

    def run(self) -> list[str]:
        for _ in range(NUM_EVENTS):
            self.now += 0.01
            draw = self.rng.random()
            if draw < 0.25:
                self.add()
            elif draw < 0.28 and self.names:
                index = self.rng.choice([None, None, 0, 1])
                self.note(encode_ended(self.scheduler.abort(self.rng.choice(self.names), index)))
            elif draw < 0.31:
                self.fork()
            elif draw < 0.36:
                self.propose()
            else:
                self.advance()
        while self.scheduler.has_work() or self.plans:
            self.advance()
        return self.lines

    def note(self, decision: object) -> None:
        self.lines.append(json.dumps(decision))

    def add(self) -> None:
        rng, config = self.rng, self.scheduler.config
        name = f"r{len(self.names)}"
        n = rng.choice([1, 1, 1, 2, 5]) if rng.random() < 0.9 else config.max_num_seqs
        params = SamplingParams(n=n, max_tokens=rng.randint(1, 60), temperature=1.0, seed=0, ignore_eos=True)
        length = rng.randint(1, config.max_model_len // 2)
        prompt = [rng.randint(0, 1)] * (length // 2) + [rng.randint(0, 9) for _ in range(length - length // 2)]
        request = EngineRequest(
            request_id=name,
            prompt_token_ids=prompt,
            params=params,
            arrival_s=self.now,
            priority=rng.randint(0, 2),
            cache_salt=rng.choice(["", "", "s"]),
        )
        try:
            self.scheduler.add(request, self.now)
            self.names.append(name)
        except InvalidRequest:
            self.note("refused")

    def fork(self) -> None:
        parents = [seq for seq in self.scheduler.sequences() if len(seq.indices) == 1]
        if parents:
            self.note(self.scheduler.fork(self.rng.choice(parents).seq_id))

    def propose(self) -> None:
        for seq in self.scheduler.decoding():
            self.scheduler.propose(seq.seq_id, [1, 2, 3][: self.rng.randint(0, 3)])

    def advance(self) -> None:
        """Plan a step, and commit the oldest one unless more may be in flight."""
        if len(self.plans) < self.scheduler.max_in_flight:
            plan = self.scheduler.step(self.now, self.costs)
            self.note(encode_plan(plan))
            if not plan.is_empty:
                seqs = [
                    SeqResult(seq_id=step.seq_id, token_ids=self.rng.choices(range(9), k=1 + accepted))
                    for step in plan.seqs
                    if step.sample
                    for accepted in [self.rng.randint(0, len(step.draft_token_ids))]
                ]
                self.plans.append(StepResult(step_id=plan.step_id, seqs=seqs))
                if self.rng.random() < 0.3:
                    return
        if self.plans:
            result = self.plans.popleft()
            result.error = "the device is on fire" if self.rng.random() < 0.005 else None
            self.note(encode_ended(self.scheduler.commit(result, self.now)))


def test_one_tenant_gets_the_plans_that_it_got_before_tenants_existed() -> None:
    digest, num_plans = hashlib.sha256(), 0
    for seed in range(NUM_RUNS):
        lines = RandomRun(seed).run()
        num_plans += sum('"seqs"' in line for line in lines)
        digest.update("\n".join(lines).encode())
    assert num_plans > 20_000
    assert digest.hexdigest() == EXPECTED
