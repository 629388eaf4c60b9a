"""The KV stream over HTTP: a real scheduler in an engine core process behind a real server."""

from dataclasses import replace

import httpx
import pytest
from octavo_engine.wire.hashing import block_hashes, scoped_root, short_hash
from octavo_engine.wire.kv_stream import numbers
from octavo_server.kv.frames import MEDIA_TYPE, Bye, FrameReader, Hello, Part, Snapshot, Step
from octavo_server.kv.publisher import TenantWindow
from octavo_testing.core_process import running
from octavo_testing.server import MODEL, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = "The quick brown fox jumps over the lazy dog, and then over all the other dogs, too."


class Stream:
    def __init__(self, response: httpx.Response) -> None:
        self._chunks, self._reader = response.aiter_raw(), FrameReader()
        self.device: set[int] = set()

    async def until(self, wanted):
        async for chunk in self._chunks:
            for frame in self._reader.feed(chunk):
                if isinstance(frame, Part):
                    self.device.update(numbers(frame.device))
                elif isinstance(frame, Step):
                    self.device.update(numbers(frame.stored))
                    self.device.difference_update(numbers(frame.removed))
                if wanted(frame):
                    return frame
        raise AssertionError("the stream ended")


async def complete(server, prompt, **fields):
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0, **fields}
    answer = (await server.http.post("/v1/completions", json=body)).json()
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def rendered_hashes(server, hello, prompt, **fields):
    """Hashes as a router computes them, from the rendered ids and the `hello` frame."""
    body = {"model": MODEL, "prompt": prompt, **fields}
    (request,) = (await server.http.post("/v1/completions/render", json=body)).json()
    root = scoped_root(hello.root, "", request["cache_salt"] or "")
    return [numbers(short_hash(h))[0] for h in block_hashes(root, request["token_ids"], hello.block_size)]


async def test_published_hashes_equal_a_routers_and_are_found(core_server):
    async with core_server.http.stream("GET", "/kv/events") as response:
        assert response.headers["content-type"] == MEDIA_TYPE
        stream = Stream(response)
        hello = await stream.until(lambda f: isinstance(f, Hello))
        before = await stream.until(lambda f: isinstance(f, Snapshot))
        assert await complete(core_server, PROMPT) == 0
        wanted = await rendered_hashes(core_server, hello, PROMPT)
        await stream.until(lambda f: set(wanted) <= stream.device)
        assert len(wanted) == len(PROMPT) // hello.block_size
        assert await complete(core_server, PROMPT) == len(wanted) * hello.block_size
        idle = await stream.until(lambda f: isinstance(f, Step) and f.load.running == 0 and f.seq > before.seq)
        assert idle.load.free_blocks + idle.load.cached_blocks == idle.load.total_blocks


async def test_a_request_is_published_before_it_runs_and_counted_once(core_server):
    """A router sees by the count which of its own requests a load includes."""
    async with core_server.http.stream("GET", "/kv/events") as response:
        stream = Stream(response)
        start = await stream.until(lambda f: isinstance(f, Snapshot))
        await complete(core_server, "first " + PROMPT)
        waits = await stream.until(lambda f: isinstance(f, Step) and f.load.received > start.load.received)
        assert (waits.load.waiting, waits.stored) == (start.load.waiting + 1, b"")
        assert waits.load.prefill_backlog_tokens - start.load.prefill_backlog_tokens >= len(PROMPT)
        await complete(core_server, "second " + PROMPT, n=2, temperature=1)
        await stream.until(lambda f: isinstance(f, Step) and f.load.received == start.load.received + 2)
        idle = await stream.until(lambda f: isinstance(f, Step) and f.load.running == f.load.waiting == 0)
        assert (idle.load.received, idle.load.prefill_backlog_tokens) == (start.load.received + 2, 0)


async def test_coming_blocks_are_published_when_a_request_arrives(core_server):
    """Each prompt of a request is published once, however many completions it asks for."""
    prompts = ["first " + PROMPT, "second " + PROMPT]
    async with core_server.http.stream("GET", "/kv/events") as response:
        stream = Stream(response)
        hello = await stream.until(lambda f: isinstance(f, Hello))
        wanted = [await rendered_hashes(core_server, hello, prompt, cache_salt="s") for prompt in prompts]
        await complete(core_server, prompts, cache_salt="s", n=2, temperature=1, max_tokens=1)
        for hashes in wanted:
            published = await stream.until(lambda f: isinstance(f, Step) and f.coming)
            assert [*numbers(published.coming)] == hashes
        await stream.until(lambda f: set(wanted[0] + wanted[1]) <= stream.device)
        await complete(core_server, prompts[0], cache_salt="s")
        again = await stream.until(lambda f: isinstance(f, Step) and f.load.received == published.load.received + 1)
        assert again.coming == b""
        assert again.load.waiting_cached_tokens >= len(wanted[0]) * hello.block_size


async def test_the_work_of_a_tenant_is_published_until_its_requests_end(core_server):
    """A request counts once, with its prompt and all generated tokens, however many prompts and outputs it has."""
    async with core_server.http.stream("GET", "/kv/events") as response:
        stream = Stream(response)
        await stream.until(lambda f: isinstance(f, Snapshot))
        core_server.server._context.kv._tenants = TenantWindow(lambda: 0.0)  # no other test's requests
        await complete(core_server, ["one", "three"], n=2, temperature=1, ignore_eos=True)

        def has_ended(frame):
            load = getattr(frame, "tenants", {}).get("")
            return load is not None and load.unfinished == load.running == 0 and load.tokens == 8 + 16

        ended = await stream.until(has_ended)
        assert ended.tenants[""].requests == 1


async def test_a_salt_changes_the_hashes(core_server):
    async with core_server.http.stream("GET", "/kv/events") as response:
        stream = Stream(response)
        hello = await stream.until(lambda f: isinstance(f, Hello))
        salted = await rendered_hashes(core_server, hello, PROMPT, cache_salt="tenant")
        plain = await rendered_hashes(core_server, hello, PROMPT)
        await complete(core_server, PROMPT, cache_salt="tenant")
        await stream.until(lambda f: set(salted) <= stream.device)
        assert not set(salted) & set(plain)


async def test_a_reset_of_the_cache_is_published(core_server):
    await complete(core_server, PROMPT)
    async with core_server.http.stream("GET", "/kv/events") as response:
        stream = Stream(response)
        await stream.until(lambda f: isinstance(f, Snapshot))
        assert stream.device
        assert (await core_server.http.post("/reset_prefix_cache")).json() == {"reset": True}
        cleared = await stream.until(lambda f: isinstance(f, Step) and not stream.device)
        assert cleared.digest == 0


async def test_a_snapshot_is_complete_and_ends(core_server):
    await complete(core_server, PROMPT)
    answer = await core_server.http.get("/kv/snapshot")
    frames = [*FrameReader().feed(answer.content)]
    assert [type(frames[0]), type(frames[-1])] == [Hello, Snapshot]
    assert sum(len(numbers(f.device)) for f in frames if isinstance(f, Part)) > 0


async def test_a_server_without_the_stream_names_the_flag(core_config):
    async with running(replace(core_config, kv_stream=False)) as llm, serving(llm) as started:
        answer = await started.http.get("/kv/events")
        assert answer.status_code == 400
        assert "--no-kv-stream" in answer.json()["error"]["message"]


async def test_a_listener_gets_the_end_reason_and_delays_no_shutdown(core_config):
    async with (
        running(core_config) as llm,
        serving(llm) as started,
        started.http.stream("GET", "/kv/events") as response,
    ):
        stream = Stream(response)
        await stream.until(lambda f: isinstance(f, Snapshot))
        await started.stop()
        assert (await stream.until(lambda f: isinstance(f, Bye))).reason == "the replica is shutting down"


async def test_a_drain_and_its_end_are_published_at_once(core_server):
    async with core_server.http.stream("GET", "/kv/events") as response:
        stream = Stream(response)
        snapshot = await stream.until(lambda f: isinstance(f, Snapshot))
        assert snapshot.load.accepts
        await core_server.http.post("/drain")
        published = await stream.until(lambda f: isinstance(f, Step) and f.seq > snapshot.seq)
        assert not published.load.accepts
        await core_server.http.delete("/drain")
        assert (await stream.until(lambda f: isinstance(f, Step) and f.seq > published.seq)).load.accepts
