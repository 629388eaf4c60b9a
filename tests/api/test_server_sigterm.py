"""32 running streams on a real `octavo serve` process that gets SIGTERM: all end with an event, none with a reset."""

import asyncio
import json
import signal

import httpx
import pytest
from octavo_testing.scripted import write_byte_model
from octavo_testing.serve_command import ServeProcess, octavo_serve
from octavo_testing.server import events

pytestmark = pytest.mark.slow

NUM_STREAMS = 32
TINY = ("--load-format", "dummy", "--dtype", "float32", "--max-model-len", "512", "--num-threads", "1")
#: Delay of the second signal, so that late requests are sent while the streams run.
STAYS = ("--shutdown-delay", "600")
TEXT = "/v1/completions"


@pytest.fixture
def tiny(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    return str(write_byte_model(folder))


async def read_stream(http, begun):
    body = {"prompt": "abc", "max_tokens": 500, "ignore_eos": True, "stream": True}
    async with http.stream("POST", TEXT, json=body) as answer:
        assert answer.status_code == 200
        text = ""
        async for part in answer.aiter_text():
            begun.release()
            text += part
    return events(text)


async def late_answers(url, over):
    """Statuses of requests on new connections, from the signal to the end of the last stream or later."""
    statuses = []
    async with httpx.AsyncClient(base_url=url, timeout=240, limits=httpx.Limits(max_keepalive_connections=0)) as http:
        while not statuses or not over.done():
            ready, late = await http.get("/ready"), await http.post(TEXT, json={"prompt": "late", "max_tokens": 1})
            statuses += [ready.status_code, late.status_code]
            assert late.headers["connection"] == "close"
            assert int(late.headers["retry-after"]) > 0
            assert (await http.get("/health")).status_code == 200
            await asyncio.sleep(0.05)
    return statuses


async def terminate_under_load(serving, terminate):
    begun = asyncio.Semaphore(0)
    limits = httpx.Limits(max_connections=NUM_STREAMS)
    async with httpx.AsyncClient(base_url=serving.url, timeout=240, limits=limits) as http:
        streams = asyncio.gather(*(read_stream(http, begun) for _ in range(NUM_STREAMS)))
        for _ in range(2 * NUM_STREAMS):
            await begun.acquire()
        terminate(serving)
        while (await http_get(serving.url, "/ready")).status_code == 200:
            pass
        late = asyncio.create_task(late_answers(serving.url, streams))
        return await streams, await late


async def http_get(url, path):
    async with httpx.AsyncClient(base_url=url, timeout=240) as http:
        return await http.get(path)


def finish_reason(got):
    return json.loads(got[-2])["choices"][0]["finish_reason"]


@pytest.mark.parametrize("terminate", [ServeProcess.terminate, ServeProcess.terminate_group])
def test_all_streams_finish_within_the_drain_timeout(tiny, tmp_path, terminate):
    with octavo_serve(tmp_path, tiny, *TINY, *STAYS, "--drain-timeout", "60") as serving:
        streams, late = asyncio.run(terminate_under_load(serving, terminate))
        terminate(serving)
        assert serving.exit_code() == 0
    assert [finish_reason(got) for got in streams] == ["length"] * NUM_STREAMS
    assert {got[-1] for got in streams} == {"[DONE]"}
    assert set(late) == {503}


def test_streams_that_outlast_the_drain_end_with_an_event(tiny, tmp_path):
    with octavo_serve(tmp_path, tiny, *TINY, *STAYS, "--drain-timeout", "0.3") as serving:
        streams, late = asyncio.run(terminate_under_load(serving, ServeProcess.terminate))
        serving.terminate()
        assert serving.exit_code() == 0
    ends = [json.loads(got[-2]) for got in streams]
    assert all(end.get("error", {}).get("code") == 503 or end["choices"][0]["finish_reason"] for end in ends)
    assert sum("error" in end for end in ends) > 0
    assert {got[-1] for got in streams} == {"[DONE]"}
    assert set(late) == {503}


def test_the_process_ends_with_the_last_stream(tiny, tmp_path):
    with octavo_serve(tmp_path, tiny, *TINY, "--drain-timeout", "60") as serving:
        body = {"prompt": "abc", "max_tokens": 300, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{serving.url}{TEXT}", json=body, timeout=240) as answer:
            parts = answer.iter_text()
            got = next(parts)
            serving.terminate()
            got += "".join(parts)
        assert finish_reason(events(got)) == "length"
        assert serving.exit_code() == 0


def test_a_second_signal_ends_at_once(tiny, tmp_path):
    with octavo_serve(tmp_path, tiny, *TINY, "--drain-timeout", "600", "--shutdown-delay", "600") as serving:
        serving.process.send_signal(signal.SIGTERM)
        while httpx.get(f"{serving.url}/ready").status_code == 200:
            pass
        serving.process.send_signal(signal.SIGTERM)
        assert serving.exit_code() == 0


def test_without_time_a_signal_ends_the_streams(tiny, tmp_path):
    with octavo_serve(tmp_path, tiny, *TINY, "--drain-timeout", "0") as serving:
        body = {"prompt": "abc", "max_tokens": 500, "ignore_eos": True, "stream": True, "n": 8}
        with httpx.stream("POST", f"{serving.url}{TEXT}", json=body, timeout=240) as answer:
            parts = answer.iter_text()
            got = next(parts)
            serving.terminate()
            got += "".join(parts)
        assert serving.exit_code() == 0
    *_, last, done = events(got)
    assert (json.loads(last).get("error", {}).get("code"), done) == (503, "[DONE]")


def test_without_time_an_idle_server_ends(tiny, tmp_path):
    with octavo_serve(tmp_path, tiny, *TINY, "--shutdown-timeout", "0") as serving:
        serving.terminate()
        assert serving.exit_code() == 0
