"""The router's caches hold no more memory than they count, whatever clients send: salts, wide texts, messages."""

import tracemalloc

import pytest
from octavo_server.router.prompts import prompt as estimate_module
from octavo_server.router.prompts.prompt import estimate
from octavo_server.router.prompts.prompt_hasher import ChatFields

MIB = 2**20


@pytest.fixture
def held():
    """Bytes allocated since the start of the test."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    yield lambda: tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()


def test_long_salts_are_not_stored(held):
    estimate_module._hash_opening.cache_clear()
    for i in range(8):
        estimate("chat", {"cache_salt": f"{i}" * MIB, "messages": [{"role": "user", "content": "hi"}]})
    assert held() < MIB


def test_salts_separate_conversations():
    ask = {"messages": [{"role": "user", "content": "hi"}]}
    salts = ["", "a", "b", "s" * 1000, "s" * 999 + "t", "\ud800" * 1000]
    assert len({estimate("chat", {**ask, "cache_salt": salt}).affinity for salt in salts}) == len(salts)


@pytest.mark.parametrize("part", [{}, "👩" + "a" * 100, [[]] * 10], ids=["objects", "wide texts", "lists"])
def test_cached_messages_count_their_real_size(held, part):
    fields = ChatFields(max_bytes=4 * MIB)
    for i in range(64):
        fields.conversation([{"role": "user", "content": "a", "tool_calls": [{"x": part}] * 500, "name": str(i)}])
    assert fields._messages.num_bytes <= 4 * MIB
    assert held() < 6 * MIB
