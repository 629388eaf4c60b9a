"""Loads of adapters whose source stalls, over HTTP: others continue; a client that leaves, or an exit, ends one."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from octavo_engine import AsyncLLM
from octavo_engine.settings.engine_args import resolve_config
from octavo_testing.adapter_files import llama_pairs, write_adapter
from octavo_testing.file_server import FileServer
from octavo_testing.local_bucket import LocalBucket
from octavo_testing.local_hub import LocalHub
from octavo_testing.local_model_scope import LocalModelScope
from octavo_testing.serve_command import octavo_serve
from octavo_testing.server import MODEL, Served, serving
from octavo_testing.tiny_models import make_tiny

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
SOURCES = {"s3": "s3://models/tiny", "hub": "hf://org/model", "ms": "ms://org/model"}
LIMIT_S = 240


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Return a server of each kind of source, with an adapter, in the environment of engines that start later."""
    cache = tmp_path_factory.mktemp("cache")
    folder = write_adapter(tmp_path_factory.mktemp("remote") / "a", llama_pairs(seed=7))
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    bucket, hub, scope = LocalBucket(), LocalHub(), LocalModelScope()
    bucket.files = {f"tiny/{name}": content for name, content in files.items()}
    hub.files, scope.files = dict(files), dict(files)
    with (
        bucket.running() as s3_url,
        hub.running() as hub_url,
        scope.running() as ms_url,
        pytest.MonkeyPatch.context() as patch,
    ):
        names = {"HF_ENDPOINT": hub_url, "MODELSCOPE_ENDPOINT": ms_url, "HF_HOME": str(cache / "hf")}
        names |= {"XDG_CACHE_HOME": str(cache), "HOME": str(cache), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
        for name, value in {**bucket.environment(s3_url), **names}.items():
            patch.setenv(name, value)
        yield {"s3": bucket, "hub": hub, "ms": scope, "folder": folder}


@asynccontextmanager
async def tiny_llama(folder: Path, num_ranks: int = 1) -> AsyncIterator[Served]:
    model = make_tiny("llama", folder)
    config = resolve_config(
        model=str(model),
        dtype="float32",
        enable_lora=True,
        enable_sleep_mode=True,
        num_gpu_blocks_override=600,
        num_threads=num_ranks,
        tensor_parallel_size=num_ranks,
    )
    engine = await AsyncLLM.start(config)
    try:
        async with serving(engine, allows_adapter_updates=True) as started:
            yield started
    finally:
        await engine.shutdown()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served(servers, tmp_path_factory) -> AsyncIterator[Served]:
    async with tiny_llama(tmp_path_factory.mktemp("model")) as started:
        yield started


def hanging_adapter(folder: Path, seed: int) -> Path:
    """Write an adapter whose settings are a FIFO without a writer: opening it hangs."""
    settings = write_adapter(folder, llama_pairs(seed=seed)) / "adapter_config.json"
    settings.unlink()
    os.mkfifo(settings)
    return folder


async def load(served: Served, name: str, path: str | Path) -> httpx.Response:
    return await served.http.post(LOAD, json={"lora_name": name, "lora_path": str(path)})


async def unload(served: Served, name: str) -> httpx.Response:
    return await served.http.post(UNLOAD, json={"lora_name": name})


async def post_completion(served: Served, model: str, **fields: Any) -> httpx.Response:
    body = {"model": model, "prompt": "hello world", "max_tokens": 4, "temperature": 0, **fields}
    return await served.http.post("/v1/completions", json=body)


async def completion(served: Served, model: str) -> str:
    answer = await post_completion(served, model)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


async def names(served: Served) -> list[str]:
    return [entry["id"] for entry in (await served.http.get("/v1/models")).json()["data"]]


async def leave(served: Served, loading: "asyncio.Task[httpx.Response]") -> None:
    """Close the connection of a load, and wait until its call has ended."""
    loading.cancel()
    async with asyncio.timeout(LIMIT_S):
        while served.engine._adapter_names._coming:
            await asyncio.sleep(0.01)


async def check_others(served: Served, folder: Path) -> None:
    """Other adapters, the name itself, and the model are served."""
    async with asyncio.timeout(LIMIT_S):
        assert (await load(served, "other", folder)).status_code == 200
        assert await completion(served, "other")
        assert await completion(served, MODEL)
        assert (await unload(served, "other")).status_code == 200


@pytest.mark.parametrize("kind", SOURCES)
async def test_a_client_that_leaves_ends_its_load_and_a_later_one_resumes(served, servers, kind):
    server: FileServer = servers[kind]
    end = "/repo" if kind == "ms" else "adapter_model.safetensors"
    server.held = {end: 1000}
    loading = asyncio.create_task(load(served, "remote", SOURCES[kind]))
    assert await asyncio.to_thread(server.reached.wait, LIMIT_S)
    await check_others(served, servers["folder"])
    await leave(served, loading)
    assert await names(served) == [MODEL]
    await check_others(served, servers["folder"])
    server.held = {}
    server.released.set()
    async with asyncio.timeout(LIMIT_S):
        again = await load(served, "remote", SOURCES[kind])
    assert (again.status_code, again.text) == (200, "Success: LoRA adapter 'remote' added successfully.")
    assert (await load(served, "local", servers["folder"])).status_code == 200
    assert await completion(served, "remote") == await completion(served, "local") != await completion(served, MODEL)
    hashes = {adapter.hash for adapter in served.engine.adapters.values()}
    assert len(hashes) == 1, "what was fetched in two parts is what the server has"
    assert (await unload(served, "remote")).status_code == 200
    assert await completion(served, "local")
    assert (await unload(served, "local")).status_code == 200
    assert await names(served) == [MODEL]


async def test_a_read_that_never_returns_blocks_no_other_load_and_is_dropped_when_it_does(served, servers, tmp_path):
    folder = hanging_adapter(tmp_path / "fifo", seed=8)
    settings = (servers["folder"] / "adapter_config.json").read_bytes()
    loading = asyncio.create_task(load(served, "fifo", folder))
    waiting = asyncio.create_task(unload(served, "fifo"))
    await check_others(served, servers["folder"])
    loading.cancel()
    async with asyncio.timeout(LIMIT_S):
        assert (await waiting).status_code == 404
        assert (await load(served, "fifo", servers["folder"])).status_code == 200
    before = served.engine.adapters["fifo"].hash
    await asyncio.to_thread((folder / "adapter_config.json").write_bytes, settings)  # the hanging read returns
    await check_others(served, servers["folder"])
    assert served.engine.adapters["fifo"].hash == before
    assert (await unload(served, "fifo")).status_code == 200


async def test_a_stalled_load_delays_nothing_on_two_ranks(servers, tmp_path):
    async with tiny_llama(tmp_path, num_ranks=2) as served:
        loading = asyncio.create_task(load(served, "fifo", hanging_adapter(tmp_path / "fifo", seed=8)))
        await check_others(served, servers["folder"])
        loads = [load(served, name, servers["folder"]) for name in ("a", "b")]
        assert [answer.status_code for answer in await asyncio.gather(*loads)] == [200, 200]
        assert await completion(served, "a") == await completion(served, "b") != await completion(served, MODEL)
        await leave(served, loading)
        assert set(await names(served)) == {MODEL, "a", "b"}


@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_an_adapter_that_stalls_after_a_sleep_ends_its_own_requests_only(tmp_path, num_ranks):
    folder = write_adapter(tmp_path / "a", llama_pairs(seed=7))
    file = folder / "adapter_config.json"
    settings = file.read_bytes()
    async with tiny_llama(tmp_path, num_ranks) as served, asyncio.timeout(LIMIT_S):
        assert (await load(served, "a", folder)).status_code == 200
        before, base = await completion(served, "a"), await completion(served, MODEL)
        assert (await served.http.post("/sleep?level=2")).status_code == 200
        file.unlink()
        os.mkfifo(file)
        assert (await served.http.post("/wake_up")).status_code == 200
        stalled = [asyncio.create_task(post_completion(served, "a", stream=stream)) for stream in (False, True)]
        assert await completion(served, MODEL) == base
        for answer in await asyncio.gather(*stalled):
            assert answer.status_code == 503, answer.text
            assert str(folder) in answer.json()["error"]["message"]
        file.unlink()
        file.write_bytes(settings)
        assert await completion(served, "a") == before != base


@pytest.mark.parametrize("kind", ["fifo", "s3"])
async def test_a_server_ends_while_a_load_stalls(servers, tmp_path, monkeypatch, kind):
    folder = hanging_adapter(tmp_path / "fifo", seed=9)
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    bucket: FileServer = servers["s3"]
    bucket.held, bucket.released = {"adapter_model.safetensors": 1000}, type(bucket.released)()
    bucket.reached.clear()
    flags = ("--enable-lora", "--num-gpu-blocks-override", "64", "--num-threads", "1", "--drain-timeout", "1")
    model = str(make_tiny("llama", tmp_path))
    with octavo_serve(tmp_path, model, *flags) as process:
        process.wait_until_healthy()
        core = process.core
        async with httpx.AsyncClient(base_url=process.url, timeout=240) as http:
            path = str(folder) if kind == "fifo" else SOURCES["s3"]
            loading = asyncio.create_task(http.post(LOAD, json={"lora_name": "x", "lora_path": path}))
            if kind == "s3":
                assert await asyncio.to_thread(bucket.reached.wait, LIMIT_S)
            else:
                assert (await http.get("/v1/models")).status_code == 200
            process.terminate()
            async with asyncio.timeout(LIMIT_S):
                answer = await loading
        assert answer.status_code == 503, answer.text
        assert json.loads(answer.text)["error"]["type"] == "ServiceUnavailableError"
        assert await asyncio.to_thread(process.exit_code, LIMIT_S) in (0, -signal.SIGTERM)
        assert not core.is_running()
        assert "killed" not in process.log.read_text()
    bucket.released.set()
