"""Pending prompts with small numbers in place of hashes, from their arrival until the core receives them."""

import pytest
from octavo_engine.wire.records import EngineRequest
from octavo_engine.wire.sampling import SamplingParams
from octavo_server.kv import pending_prompts
from octavo_server.kv.frames import ReplicaLoad
from octavo_server.kv.pending_prompts import PendingPrompts

BLOCK = 16


def add(pending, blocks, *, stored=(), extra_tokens=1, **params):
    request = EngineRequest(
        request_id="r", prompt_token_ids=[7] * (BLOCK * len(blocks) + extra_tokens), params=SamplingParams(**params)
    )
    return pending.add(request, blocks, {*stored}.__contains__)


@pytest.mark.parametrize(
    ("stored", "coming", "cached_tokens"),
    [
        ([], [1, 2, 3], 0),
        ([1, 2], [3], 32),
        ([1, 2, 3], [], 48),
        ([2, 3], [1], 0),  # blocks behind a gap are not found
        ([1, 3], [2], 16),
    ],
)
def test_unstored_blocks_are_coming_and_stored_blocks_are_cached(stored, coming, cached_tokens):
    prompt = add(PendingPrompts(BLOCK), [1, 2, 3], stored=stored)
    assert (prompt.num_tokens, prompt.cached_tokens, [*prompt.coming]) == (49, cached_tokens, coming)


def test_the_last_token_is_always_computed():
    assert add(PendingPrompts(BLOCK), [1, 2], stored=[1, 2], extra_tokens=0).cached_tokens == 31
    assert add(PendingPrompts(BLOCK), [], extra_tokens=0).cached_tokens == 0


@pytest.mark.parametrize("params", [{"skip_reading_prefix_cache": True}, {"prompt_logprobs": 1}])
def test_a_request_that_skips_the_cache_finds_nothing_but_stores(params):
    prompt = add(PendingPrompts(BLOCK), [1, 2, 3], stored=[1], **params)
    assert (prompt.cached_tokens, [*prompt.coming]) == (0, [2, 3])


def test_coming_blocks_are_cached_for_the_next_prompt():
    """A router that connected meanwhile, or whose prediction expired, gets the blocks again."""
    pending = PendingPrompts(BLOCK)
    add(pending, [1, 2])
    second = add(pending, [1, 2, 3])
    assert (second.cached_tokens, [*second.coming]) == (32, [1, 2, 3])


def test_coming_blocks_of_an_ended_prompt_are_not_cached():
    """The prompt ran and its blocks were evicted since, or it failed."""
    pending = PendingPrompts(BLOCK)
    add(pending, [1, 2])
    pending.add_to_load(ReplicaLoad(received=1, running=1))
    assert add(pending, [1, 2]).cached_tokens == 0
    assert add(pending, [1, 2]).cached_tokens == 32
    pending.add_to_load(ReplicaLoad(received=2, running=1, waiting=1))
    assert add(pending, [1, 2]).cached_tokens == 32


def test_coming_blocks_of_a_long_prompt_are_bounded(monkeypatch):
    monkeypatch.setattr(pending_prompts, "MAX_COMING", 2)
    pending = PendingPrompts(BLOCK)
    prompt = add(pending, [1, 2, 3, 4, 5], stored=[1])
    assert ([*prompt.coming], prompt.cached_tokens) == ([2, 3], 16)
    assert add(pending, [1, 2, 3, 4, 5], stored=[1]).cached_tokens == 48


def test_the_latest_prompts_are_the_waiting_ones():
    pending = PendingPrompts(BLOCK)
    for number in range(4):
        add(pending, range(number), stored=range(number))
    assert pending.add_to_load(ReplicaLoad()) == ReplicaLoad(
        received=4, waiting=4, prefill_backlog_tokens=1 + 17 + 33 + 49, waiting_cached_tokens=16 + 32 + 48
    )
    core = ReplicaLoad(received=3, running=1, waiting=2, prefill_backlog_tokens=55)
    published = pending.add_to_load(core)
    assert (published.received, published.waiting, published.prefill_backlog_tokens) == (4, 3, 55 + 49)
    assert published.waiting_cached_tokens == 16 + 32 + 48
    published = pending.add_to_load(ReplicaLoad(received=4, running=3, waiting=1, prefill_backlog_tokens=50))
    assert (published.waiting, published.prefill_backlog_tokens, published.waiting_cached_tokens) == (1, 50, 48)
    idle = ReplicaLoad(received=4, running=4)
    assert pending.add_to_load(idle) == idle
    preempted = ReplicaLoad(received=4, running=3, waiting=1, prefill_backlog_tokens=30)
    assert pending.add_to_load(preempted) == preempted


def test_prompts_without_hashes_are_counted():
    """A publisher without listeners hashes no prompt, and still counts each prompt as a request."""
    pending = PendingPrompts(BLOCK)
    add(pending, [], extra_tokens=100)
    published = pending.add_to_load(ReplicaLoad())
    assert (
        published.received,
        published.waiting,
        published.prefill_backlog_tokens,
        published.waiting_cached_tokens,
    ) == (1, 1, 100, 0)
