"""The KV stream over HTTP: a real scheduler in an engine core process behind a real server."""

import httpx
import pytest
import pytest_asyncio
from octavo_engine.config import EngineConfig
from octavo_engine.wire.hashing import block_hashes, scoped_root, short_hash
from octavo_engine.wire.kv_stream import numbers
from octavo_server.kv.frames import MEDIA_TYPE, Bye, FrameReader, Hello, Part, Snapshot, Step
from octavo_testing.core_process import running, scripted_environment
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import MODEL, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = "The quick brown fox jumps over the lazy dog, and then over all the other dogs, too."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_byte_model(tmp_path_factory.mktemp("model"))
    with scripted_environment():
        yield folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(folder):
    config = EngineConfig(model=str(folder), load_format="dummy", max_model_len=256)
    async with running(config) as llm, serving(llm) as started:
        yield started


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
    """As a router computes them: from the rendered ids and what the replica said of itself."""
    body = {"model": MODEL, "prompt": prompt, **fields}
    (request,) = (await server.http.post("/v1/completions/render", json=body)).json()
    root = scoped_root(hello.root, "", request["cache_salt"] or "")
    return [numbers(short_hash(h))[0] for h in block_hashes(root, request["token_ids"], hello.block_size)]


async def test_what_is_told_is_what_a_router_computes_and_what_is_found(server):
    async with server.http.stream("GET", "/kv/events") as response:
        assert response.headers["content-type"] == MEDIA_TYPE
        stream = Stream(response)
        hello = await stream.until(lambda f: isinstance(f, Hello))
        before = await stream.until(lambda f: isinstance(f, Snapshot))
        assert await complete(server, PROMPT) == 0
        wanted = await rendered_hashes(server, hello, PROMPT)
        await stream.until(lambda f: set(wanted) <= stream.device)
        assert len(wanted) == len(PROMPT) // hello.block_size
        assert await complete(server, PROMPT) == len(wanted) * hello.block_size
        idle = await stream.until(lambda f: isinstance(f, Step) and f.load.running == 0 and f.seq > before.seq)
        assert idle.load.free_blocks + idle.load.cached_blocks == idle.load.total_blocks


async def test_a_salt_has_hashes_of_its_own(server):
    async with server.http.stream("GET", "/kv/events") as response:
        stream = Stream(response)
        hello = await stream.until(lambda f: isinstance(f, Hello))
        salted = await rendered_hashes(server, hello, PROMPT, cache_salt="tenant")
        plain = await rendered_hashes(server, hello, PROMPT)
        await complete(server, PROMPT, cache_salt="tenant")
        await stream.until(lambda f: set(salted) <= stream.device)
        assert not set(salted) & set(plain)


async def test_a_reset_is_told(server):
    await complete(server, PROMPT)
    async with server.http.stream("GET", "/kv/events") as response:
        stream = Stream(response)
        await stream.until(lambda f: isinstance(f, Snapshot))
        assert stream.device
        assert (await server.http.post("/reset_prefix_cache")).json() == {"reset": True}
        cleared = await stream.until(lambda f: isinstance(f, Step) and not stream.device)
        assert cleared.digest == 0


async def test_a_snapshot_ends(server):
    await complete(server, PROMPT)
    answer = await server.http.get("/kv/snapshot")
    frames = [*FrameReader().feed(answer.content)]
    assert [type(frames[0]), type(frames[-1])] == [Hello, Snapshot]
    assert sum(len(numbers(f.device)) for f in frames if isinstance(f, Part)) > 0


async def test_a_server_without_the_stream_says_so(folder):
    config = EngineConfig(model=str(folder), load_format="dummy", max_model_len=256, kv_stream=False)
    async with running(config) as llm, serving(llm) as started:
        answer = await started.http.get("/kv/events")
        assert answer.status_code == 400
        assert "--no-kv-stream" in answer.json()["error"]["message"]


async def test_a_listener_is_told_why_the_stream_ends_and_holds_up_no_shutdown(folder):
    config = EngineConfig(model=str(folder), load_format="dummy", max_model_len=256)
    async with running(config) as llm, serving(llm) as started, started.http.stream("GET", "/kv/events") as response:
        stream = Stream(response)
        await stream.until(lambda f: isinstance(f, Snapshot))
        await started.stop()
        assert (await stream.until(lambda f: isinstance(f, Bye))).reason == "the replica is shutting down"


async def test_a_drain_and_its_end_are_told_at_once(server):
    async with server.http.stream("GET", "/kv/events") as response:
        stream = Stream(response)
        snapshot = await stream.until(lambda f: isinstance(f, Snapshot))
        assert snapshot.load.accepts
        await server.http.post("/drain")
        told = await stream.until(lambda f: isinstance(f, Step) and f.seq > snapshot.seq)
        assert not told.load.accepts
        await server.http.delete("/drain")
        assert (await stream.until(lambda f: isinstance(f, Step) and f.seq > told.seq)).load.accepts
