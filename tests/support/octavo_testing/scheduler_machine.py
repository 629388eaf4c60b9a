"""A state machine for the laws of the scheduler under any order of events, on tiny pools where all requests compete.

The simulation asserts after each step: block conservation, no write to a block that another sequence reads, the token
budget, no overtaking within a tenant, no preemption without effect. The machine asserts that the KV stream reports
exactly the cached blocks, and at the end that every output ended exactly once with exactly its tokens.
"""

import dataclasses
from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from octavo_engine.core.events import KVDelta
from octavo_engine.core.scheduler import Scheduler
from octavo_engine.core.sequence import Sequence
from octavo_engine.loop.engine_core import Proposer
from octavo_engine.loop.proposers import DraftModelProposer, NgramProposer
from octavo_engine.settings.records import SpeculativeConfig
from octavo_engine.wire.errors import InvalidRequest
from octavo_engine.wire.hashing import image_extra, next_hash, scoped_root, short_hash
from octavo_engine.wire.kv_stream import KVSet, numbers
from octavo_engine.wire.plan import StepCosts
from octavo_engine.wire.records import ImageInput, TenantUsage

from octavo_testing.sim_executor import VOCAB
from octavo_testing.simulation import Simulation, sim_config

MAX_IN_FLIGHT = 3
ADAPTERS = ("", "", "x", "y", "z")
costs = st.builds(
    StepCosts,
    prefill_token_s=st.sampled_from([0.0, 1.0]),
    swap_block_s=st.sampled_from([0.0, 0.5, 9.0]),
    context_token_s=st.sampled_from([0.0, 0.1]),
    step_s=st.sampled_from([0.0, 2.0]),
)
configs = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(3, 14),
        "num_host_blocks": st.sampled_from([0, 0, 1, 2, 5, 20]),
        "block_size": st.sampled_from([1, 2, 4]),
        "max_model_len": st.integers(6, 40),
        "max_num_seqs": st.integers(1, 7),
        "max_loras": st.sampled_from([0, 0, 1, 2]),
        "max_num_batched_tokens": st.integers(1, 12),
        "steps_ahead": st.sampled_from([0, 0, 1, 2]),
        "policy": st.sampled_from(["fcfs", "priority"]),
        "enable_prefix_caching": st.sampled_from([True, True, True, False]),
        "long_prefill_token_threshold": st.sampled_from([0, 0, 1, 3]),
        "max_step_ms": st.sampled_from([0.0, 1.0, 9000.0]),
        "enable_chunked_prefill": st.sampled_from([True, True, False]),
        "watermark": st.sampled_from([0.0, 0.2]),
        "preemption_mode": st.sampled_from(["auto", "swap", "recompute"]),
    }
)
requests = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 12),
        "n": st.sampled_from([1, 1, 1, 2, 3, 4]),
        "priority": st.integers(-1, 1),
        "eos": st.sampled_from([None, 3]),
        "stop_token_ids": st.sampled_from([None, [5, 6, 7]]),
        "ignore_eos": st.booleans(),
        "prompt_logprobs": st.sampled_from([None, None, None, 1]),
        "logprobs": st.sampled_from([None, 1]),
        "skip_reading_prefix_cache": st.sampled_from([None, None, None, True]),
        "salt": st.sampled_from(["", "", "s"]),
        "images": st.sampled_from([(), (), (), ((0, 5, b"a"),), ((3, 2, b"b"),), ((1, 3, b"a"), (4, 6, b"b"))]),
        "adapter": st.sampled_from(ADAPTERS),
        "tenant": st.sampled_from(["", "", "b", "c"]),
        "weight": st.sampled_from([1.0, 1.0, 2.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.0, 1.0, 1.0, 2.0]),
    }
)


speculation = st.builds(
    SpeculativeConfig,
    num_speculative_tokens=st.integers(1, 4),
    prompt_lookup_max=st.integers(1, 2),
    prompt_lookup_min=st.just(1),
)


proposers = st.none() | st.builds(NgramProposer, speculation) | st.builds(DraftModelProposer, st.integers(1, 4))


def _image(start: int, length: int, name: bytes) -> ImageInput:
    return ImageInput(start=start, length=length, digest=name * 32, data=b"")


class SchedulerMachine(RuleBasedStateMachine):
    """`steps_ahead`: of all examples; None: it is drawn."""

    steps_ahead: int | None = None

    @initialize(config=configs, costs=costs, proposer=proposers)
    def start(self, config: dict[str, object], costs: StepCosts, proposer: Proposer | None) -> None:
        if not config["enable_chunked_prefill"]:
            config["max_num_batched_tokens"] = config["max_model_len"]
        if self.steps_ahead is not None:
            config["steps_ahead"] = self.steps_ahead
        scheduler = Scheduler(sim_config(debug_invariants=False, **config), kv_events=True, kv_tokens=True)
        self.prepare(Simulation(scheduler=scheduler, costs=costs, proposer=proposer))

    def prepare(self, sim: Simulation) -> None:
        self.sim = sim
        self.listener = KVSet()
        self.usage: dict[str, TenantUsage] = {}
        self.full_hashes: dict[bytes, bytes] = {}  # full hashes by short hashes
        self.image_extras: set[bytes] = set()  # of all blocks with images so far

    @rule(family=st.integers(0, 1), length=st.integers(1, 20), fields=requests, data=st.data())
    def add(self, family: int, length: int, fields: dict[str, object], data: st.DataObject) -> None:
        min_tokens = data.draw(st.sampled_from([0, 0, fields["max_tokens"]]))
        self.add_request(family, length, fields | {"min_tokens": min_tokens})

    def add_request(self, family: int, length: int, fields: dict[str, object]) -> None:
        size = self.sim.config.block_size
        fields = fields | {"images": tuple(_image(*each) for each in fields["images"] if sum(each[:2]) <= length)}
        spans = [(image.start, image.end, image.digest) for image in fields["images"]]
        self.image_extras |= {image_extra(spans, first, first + size) for first in range(0, length, size)}
        try:
            self.sim.add(f"r{len(self.sim.requests)}", [family] * length, **fields)
        except InvalidRequest:
            config = self.sim.config
            fits = length < min(config.max_model_len, config.num_blocks * config.block_size)
            assert not fits or fields["n"] > config.max_num_seqs

    @precondition(lambda self: len(self.sim.results) < MAX_IN_FLIGHT)
    @rule()
    def step(self) -> None:
        self.sim.step()

    @precondition(lambda self: self.sim.preparing)
    @rule(data=st.data())
    def prepare_images(self, data: st.DataObject) -> None:
        self.sim.prepare(data.draw(st.sampled_from([*self.sim.preparing])))

    @precondition(lambda self: self.sim.results)
    @rule()
    def commit(self) -> None:
        self.sim.commit()

    @precondition(lambda self: not self.sim.results)
    @rule(count=st.integers(1, 6))
    def tick(self, count: int) -> None:
        for _ in range(count):
            self.sim.tick()

    @precondition(lambda self: self.sim.results)
    @rule()
    def fail(self) -> None:
        self.sim.commit(error="the device is on fire")
        while self.sim.results:
            assert not self.sim.commit()

    @precondition(lambda self: self.sim.live)
    @rule(data=st.data(), sibling=st.integers(-1, 3))
    def abort(self, data: st.DataObject, sibling: int) -> None:
        seq = data.draw(st.sampled_from(self.sim.live))
        self.sim.abort(seq.request_id, None if sibling < 0 else sibling)

    @precondition(lambda self: any(len(seq.indices) == 1 for seq in self.sim.live))
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        self.sim.fork(data.draw(st.sampled_from([seq for seq in self.sim.live if len(seq.indices) == 1])))

    @precondition(lambda self: self.sim.live)
    @rule(data=st.data(), right=st.integers(0, 3), wrong=st.integers(0, 3))
    def propose(self, data: st.DataObject, right: int, wrong: int) -> None:
        seq: Sequence = data.draw(st.sampled_from(self.sim.live))
        tokens, _, _ = self.sim.expected(seq.request_id, seq.indices[0])
        prompt = self.sim.requests[seq.request_id].prompt_token_ids
        done = len(seq.token_ids) - len(self.sim.forked_at.get((seq.request_id, seq.indices[0]), prompt))
        self.sim.scheduler.propose(seq.seq_id, tokens[done : done + right] + [VOCAB + 1] * wrong)

    @rule()
    def reset(self) -> None:
        in_use = self.sim.scheduler.stats().in_use_blocks
        assert self.sim.scheduler.reset_prefix_cache() == (in_use == 0)

    @invariant()
    def laws(self) -> None:
        if hasattr(self, "sim"):
            self.sim.scheduler.check()
            self.check_listener()
            self.check_usage()

    def check_blocks(self, delta: KVDelta) -> None:
        """Assert that the hash of each block follows from the root and the published tokens."""
        stored = [block_hash for tier, block_hash in delta.stored if tier == "device"]
        assert [block.hash for block in delta.blocks] == [short_hash(h) for h in stored]
        for block, block_hash in zip(delta.blocks, stored, strict=True):
            parents = [scoped_root(self.sim.config.hash_root, adapter, block.salt) for adapter in ADAPTERS]
            if block.parent is not None:
                parents = [self.full_hashes[block.parent]]
            extras = {b""} | self.image_extras
            assert block_hash in {next_hash(parent, block.token_ids, extra) for parent in parents for extra in extras}
            self.full_hashes[block.hash] = block_hash

    def check_listener(self) -> None:
        """Assert that a listener since the start has exactly the blocks that a new request would find."""
        delta = self.sim.scheduler.take_kv_delta()
        self.check_blocks(delta)
        change = delta.change()
        if change is not None:
            self.listener.apply(change)
        assert self.listener.is_exact
        cached = self.sim.scheduler.cached_hashes()
        assert self.listener.device == {numbers(short_hash(h))[0] for tier, h in cached if tier == "device"}
        assert self.listener.host == {numbers(short_hash(h))[0] for tier, h in cached if tier == "host"}

    def check_usage(self) -> None:
        """Assert that the tenants' tokens add up to the engine's, and that each has the sequences that run for it."""
        for name, change in self.sim.scheduler.take_tenant_usage().items():
            total = self.usage.setdefault(name, TenantUsage())
            for field in dataclasses.fields(TenantUsage):
                setattr(total, field.name, getattr(total, field.name) + getattr(change, field.name))
        stats, usage = self.sim.scheduler.stats(), [*self.usage.values()]
        assert sum(total.prompt_tokens for total in usage) == stats.prompt_tokens
        assert sum(total.cached_tokens for total in usage) == stats.prefix_cache_hits
        assert sum(total.generation_tokens for total in usage) == stats.generation_tokens
        running = Counter(seq.group.request.tenant for seq in self.sim.live if seq.status == "running")
        assert {name: total.running for name, total in self.usage.items() if total.running} == running

    def teardown(self) -> None:
        if hasattr(self, "sim"):
            self.sim.drain(depth=2)
            self.sim.verify()
