"""The cached and coming blocks of pending prompts equal those that a real scheduler then finds and stores."""

from hypothesis import given
from hypothesis import strategies as st
from octavo_engine.core.scheduler import Scheduler
from octavo_engine.wire.hashing import tenant_salt
from octavo_engine.wire.kv_stream import KVSet
from octavo_engine.wire.records import EngineRequest
from octavo_engine.wire.sampling import SamplingParams
from octavo_server.kv.frames import ReplicaLoad
from octavo_server.kv.pending_prompts import PendingPrompts, full_blocks
from octavo_testing.simulation import Received, Simulation, sim_config

BLOCK = 4
STEMS = ([], [5] * 4, [5] * 9, [5, 6, 7, 8] * 4)
PROMPTS = st.builds(
    lambda stem, own: [*stem, *own], st.sampled_from(STEMS), st.lists(st.integers(1, 3), min_size=1, max_size=9)
)
SALTS = st.builds(tenant_salt, st.sampled_from(["", "alice", "bob"]), st.sampled_from(["", "own"]))
REQUESTS = st.builds(
    lambda prompt, salt, adapter, n, skips: EngineRequest(
        request_id="", prompt_token_ids=prompt, cache_salt=salt, adapter=adapter,
        params=SamplingParams(max_tokens=1, n=n, temperature=1.0, seed=3, skip_reading_prefix_cache=skips),
    ),
    PROMPTS,
    SALTS,
    st.sampled_from(["", "sha256:1"]),
    st.integers(1, 3),
    st.booleans(),
)  # fmt: skip


class Replica:
    """The engine's scheduler, and the API process's copy of its set with the pending prompts."""

    def __init__(self):
        config = sim_config(block_size=BLOCK, num_blocks=400, max_num_seqs=64, max_num_batched_tokens=1000)
        self.simulation = Simulation(scheduler=Scheduler(config, kv_events=True))
        self.kept, self.pending, self.num_added = KVSet(), PendingPrompts(BLOCK), 0

    def add(self, request):
        self.num_added += 1
        request.request_id = str(self.num_added)
        blocks = full_blocks(request, self.simulation.config.hash_root, BLOCK)
        prompt = self.pending.add(request, blocks, self.kept.has)
        self.simulation.requests[request.request_id] = request
        for index in range(request.params.n):
            self.simulation.received[request.request_id, index] = Received()
        self.simulation.scheduler.add(request, self.simulation.now)
        return prompt

    def run(self):
        self.simulation.drain()
        self.simulation.verify()
        before = {*self.kept.device}
        if (change := self.simulation.scheduler.take_kv_delta().change()) is not None:
            self.kept.apply(change)
        assert self.kept.is_exact
        self.pending.add_to_load(ReplicaLoad(received=self.num_added))
        return self.kept.device - before

    def found(self, request):
        return self.simulation.received[request.request_id, 0].last.num_cached_tokens


@given(requests=st.lists(REQUESTS, min_size=1, max_size=8))
def test_a_single_prompt_is_exact_to_the_token(requests):
    replica = Replica()
    for request in requests:
        prompt = replica.add(request)
        stored = replica.run()
        assert {*prompt.coming} == stored
        assert len(prompt.coming) == len(stored)
        assert prompt.cached_tokens == replica.found(request)


@given(first=st.lists(REQUESTS, max_size=4), together=st.lists(REQUESTS, min_size=1, max_size=8))
def test_prompts_that_wait_together_are_exact_to_a_block(first, together):
    """A prompt that another one computes in the same step recomputes its last block, not its last token."""
    replica = Replica()
    for request in first:
        replica.add(request)
        replica.run()
    predicted = [replica.add(request) for request in together]
    waiting = replica.pending.add_to_load(ReplicaLoad(received=len(first))).waiting_cached_tokens
    assert waiting == sum(arrival.cached_tokens for arrival in predicted)
    stored = replica.run()
    assert {block for arrival in predicted for block in arrival.coming} == stored
    for request, arrival in zip(together, predicted, strict=True):
        assert 0 <= arrival.cached_tokens - replica.found(request) < BLOCK
