"""Images over HTTP while the processes that decode them are killed, hang or lack memory."""

import asyncio
import os
import signal
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from octavo_engine.process.client import DEFAULT_LOADER
from octavo_engine.settings.config import EngineConfig
from octavo_testing.core_process import processes_of, running, scripted_environment
from octavo_testing.limited_workers import HASTY_LOADER, SMALL_LOADER
from octavo_testing.pictures import empty_png, encoded
from octavo_testing.server import Served, serving
from octavo_testing.tiny_vision import make_tiny_vision, picture
from PIL import Image

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vision("smolvlm", tmp_path_factory.mktemp("vision"))


@asynccontextmanager
async def started(folder: Path, loader: str = DEFAULT_LOADER, **fields: Any) -> AsyncIterator[Served]:
    config = EngineConfig(model=str(folder), dtype="float32", max_model_len=256, media_workers=2, **fields)
    with scripted_environment():
        async with running(config, loader) as engine, serving(engine) as served:
            yield served


def workers_of(engine: Any) -> list[psutil.Process]:
    return [child for child in processes_of(engine) if "octavo_engine.media.worker" in child.cmdline()]


async def ask(served: Served, data: bytes, **fields: Any) -> httpx.Response:
    url = f"data:image/png;base64,{b64encode(data).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}]
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 4, **fields}
    return await served.http.post("/v1/chat/completions", json=body, timeout=300)


async def read_text_stream(served: Served) -> list[str]:
    body = {"prompt": "x", "stream": True, "max_tokens": 100, "ignore_eos": True}
    async with served.http.stream("POST", "/v1/completions", json=body, timeout=300) as response:
        return [line async for line in response.aiter_lines() if line]


async def wait_for_requests(served: Served, number: int) -> None:
    while (await served.metrics())['vllm:num_requests_waiting_by_reason{reason="deferred"}'] < number:
        pass


async def fail_eight(served: Served, fault: signal.Signals | None) -> list[int]:
    """Send 8 images to workers that are stopped, then the signal; return the statuses of the answers."""
    for child in workers_of(served.engine):
        child.suspend()
    asked = [asyncio.create_task(ask(served, picture(i), stream=i % 2 == 0)) for i in range(8)]
    stream = asyncio.create_task(read_text_stream(served))
    if fault is not None:
        await wait_for_requests(served, 8)
        for child in workers_of(served.engine):
            child.send_signal(fault)
    lines = await stream
    assert lines[-1] == "data: [DONE]"
    assert not any('"error"' in line for line in lines)
    return [answer.status_code for answer in await asyncio.gather(*asked)]


async def test_requests_end_once_when_workers_are_killed(folder: Path) -> None:
    async with started(folder) as served:
        statuses = await fail_eight(served, signal.SIGKILL)
        assert sorted(statuses) == [200] * 6 + [503] * 2
        assert (await ask(served, picture(9))).status_code == 200


async def test_images_of_workers_that_hang_end_with_400(folder: Path) -> None:
    """A second is too short for some images of a busy machine, so it may end other ones, too."""
    async with started(folder, HASTY_LOADER) as served:
        statuses = await fail_eight(served, None)
        assert statuses.count(400) >= 2
        assert set(statuses) <= {200, 400}
        while (await ask(served, picture(9))).status_code != 200:
            pass


async def test_an_image_beyond_the_memory_of_its_worker_ends_with_400(folder: Path) -> None:
    """It has 48 million pixels, of 4 bytes each, as allowed."""
    async with started(folder, SMALL_LOADER) as served:
        large, streamed, lines, small = await asyncio.gather(
            ask(served, empty_png(8000, 6000)),
            ask(served, empty_png(6000, 8000), stream=True),
            read_text_stream(served),
            ask(served, picture(1)),
        )
        assert (large.status_code, streamed.status_code, small.status_code) == (400, 400, 200)
        assert "more than 512 MiB of memory" in large.json()["error"]["message"]
        assert lines[-1] == "data: [DONE]"
        assert not any('"error"' in line for line in lines)


@pytest.mark.parametrize("is_stopped", [False, True])
async def test_no_worker_outlives_the_core(folder: Path, is_stopped: bool) -> None:
    async with started(folder) as served:
        core, *others = processes_of(served.engine)
        workers = workers_of(served.engine)
        assert len(workers) == len(others) == 2
        for child in workers if is_stopped else ():
            child.suspend()
        os.kill(core.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(workers, 120)
        assert not alive


def resident_bytes(engine: Any) -> int:
    """Return the resident bytes of this process, which has the API server, of the core and of its workers."""
    return sum(process.memory_info().rss for process in (psutil.Process(), *processes_of(engine)))


def noise(number: int) -> bytes:
    """Return a PNG of a megapixel that is as large as its pixels."""
    pixels = np.random.default_rng(number).integers(0, 256, (1000, 1000, 3), dtype=np.uint8)
    return encoded(Image.fromarray(pixels), "PNG", compress_level=0)


async def test_memory_does_not_grow_after_100_images_of_a_megapixel(folder: Path) -> None:
    """The cache of processed images is full before the 100th. Few blocks are all written by then, too."""
    resident: dict[int, int] = {}
    async with started(folder, mm_processor_cache_gb=0.001, num_gpu_blocks_override=64) as served:
        for start in range(0, 300, 4):
            answers = await asyncio.gather(*(ask(served, noise(start + i), max_tokens=1) for i in range(4)))
            assert [answer.status_code for answer in answers] == [200] * 4
            resident[start + 4] = resident_bytes(served.engine)
        assert served.engine.stats.mm_cache_queries == 300
        assert served.engine.stats.mm_cache_hits == 0
    assert resident[300] < 1.1 * resident[100], resident


async def test_logs_errors_and_traces_hold_no_image(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sent = [picture(1), picture(2)[:-40], b"\x89PNG no image at all, but many letters" * 9]
    async with started(folder, trace=str(tmp_path / "trace")) as served:
        answers = [await ask(served, data) for data in sent]
        for child in workers_of(served.engine):
            child.suspend()
        killed = asyncio.create_task(ask(served, picture(3)))
        await wait_for_requests(served, 1)
        for child in workers_of(served.engine):
            child.kill()
        answers.append(await killed)
    assert [answer.status_code for answer in answers] == [200, 400, 400, 503]
    texts = "".join(answer.text for answer in answers) + "".join(capfd.readouterr())
    texts += (tmp_path / "trace").read_text()
    for data in (*sent, picture(3)):
        assert b64encode(data[24:48]).decode() not in texts
        assert data[24:48].hex() not in texts
        assert repr(data[24:40])[2:-1] not in texts
    assert "base64," not in texts
