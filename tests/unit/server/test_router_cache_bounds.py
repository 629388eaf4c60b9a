"""Caches of the router hold no more than they count, whatever clients send: salts, roles, wide texts, models."""

import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest
from octavo_engine.text.template import ChatTemplate
from octavo_server.openai.rendering import RenderOptions, render_conversation
from octavo_server.router.prompts import estimate as estimate_module
from octavo_server.router.prompts import template_cache
from octavo_server.router.prompts.chat_fields import ChatFields
from octavo_server.router.prompts.estimate import estimate
from octavo_server.router.prompts.template_cache import TemplateCache

EACH = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
PLAIN = RenderOptions()
MIB = 2**20


@pytest.fixture
def held():
    """Bytes allocated since the test began."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    yield lambda: tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()


def test_long_salts_are_not_kept(held):
    estimate_module._drawn.cache_clear()
    for i in range(8):
        estimate("chat", {"cache_salt": f"{i}" * MIB, "messages": [{"role": "user", "content": "hi"}]})
    assert held() < MIB


def test_salts_keep_conversations_apart():
    ask = {"messages": [{"role": "user", "content": "hi"}]}
    salts = ["", "a", "b", "s" * 1000, "s" * 999 + "t", "\ud800" * 1000]
    assert len({estimate("chat", {**ask, "cache_salt": salt}).affinity for salt in salts}) == len(salts)


def test_long_roles_count(held):
    cache = TemplateCache(EACH, max_bytes=4 * MIB)
    for i in range(16):
        cache.text((f"{i:04d}" + "r" * MIB,), ["hi"], options=PLAIN, options_key=b"")
    assert cache._known.num_bytes <= 4 * MIB
    assert held() < 5 * MIB


@pytest.mark.parametrize("part", [{}, "👩" + "a" * 100, [[]] * 10], ids=["objects", "wide texts", "lists"])
def test_messages_count_what_they_hold(held, part):
    fields = ChatFields(max_bytes=4 * MIB)
    for i in range(64):
        fields.conversation([{"role": "user", "content": "a", "tool_calls": [{"x": part}] * 500, "name": str(i)}])
    assert fields._messages.num_bytes <= 4 * MIB
    assert held() < 6 * MIB


def test_a_rendering_in_one_thread_holds_up_no_other(monkeypatch):
    """A lock was held while a template was rendered in a thread, and the event loop waited for it."""
    is_rendering, may_end = threading.Event(), threading.Event()

    def render(template, conversation, options):
        if conversation[0]["role"] == "slow":
            is_rendering.set()
            assert may_end.wait(5)
        return render_conversation(template, conversation, options)

    monkeypatch.setattr(template_cache, "render_conversation", render)
    cache = TemplateCache(EACH, max_bytes=MIB)
    with ThreadPoolExecutor(1) as executor:
        slow = executor.submit(cache.text, ("slow",), ["a"], options=PLAIN, options_key=b"")
        assert is_rendering.wait(5)
        assert cache.text(("user",), ["b"], options=PLAIN, options_key=b"")[0] == "<user>b"
        assert not slow.done()
        may_end.set()
        assert slow.result(5)[0] == "<slow>a"
