"""The usage of keys behind a router: requests of all kinds, cut ones, and a killed replica. Real processes."""

import asyncio
import json
from collections import Counter
from contextlib import asynccontextmanager

import httpx
import pytest
from octavo_engine.process.client import DEFAULT_LOADER
from octavo_engine.settings.config import EngineConfig
from octavo_testing.core_process import running
from octavo_testing.embedders import make_embedder
from octavo_testing.fleets import until
from octavo_testing.route_command import octavo_route, served_replicas
from octavo_testing.server import MODEL, parse_metrics, serving

pytestmark = pytest.mark.slow

KEYS = ("alice", "bob", "carol", "dave", "erin")
TEXT = "/v1/completions"
PROMPT = "a prompt of more than two blocks, which is then found in the cache: "
KINDS = (
    {"max_tokens": 20, "stream": True},
    {"max_tokens": 7, "n": 4, "temperature": 1},
    {"max_tokens": 3, "n": 2, "use_beam_search": True},
    {"max_tokens": 5, "echo": True},
)
SERVE_FLAGS = ("--router-secret", "s", "--max-num-seqs", "8", "--drain-timeout", "0.3")


def lines_of(log):
    return [json.loads(line) for line in log.read_text().splitlines()]


class Clients:
    """Sends numbered requests of the keys in turn. `answered`, `cut`: their ids."""

    def __init__(self, http):
        self.http, self.num_sent = http, 0
        self.answered, self.cut = [], []

    def next_headers(self):
        self.num_sent += 1
        key = KEYS[self.num_sent % len(KEYS)]
        return {"Authorization": f"Bearer sk-{key}", "X-Request-Id": f"request-{self.num_sent}"}

    async def ask(self, path=TEXT, headers=None, **fields):
        headers = headers or self.next_headers()
        body = {"model": "tiny", "prompt": PROMPT + headers["X-Request-Id"], "ignore_eos": True, **fields}
        answer = await self.http.post(path, json=body, headers=headers)
        if answer.status_code == 200:
            self.answered.append(headers["X-Request-Id"])
        return answer

    async def leave_stream(self):
        """Leave a stream in its middle."""
        headers = self.next_headers()
        body = {"model": "tiny", "prompt": PROMPT, "ignore_eos": True, "max_tokens": 4000, "stream": True}
        async with self.http.stream("POST", TEXT, json=body, headers=headers) as answer:
            await anext(answer.aiter_text())
        self.cut.append(headers["X-Request-Id"])

    def leave_later(self):
        """Return a request that has begun; cancel it to leave."""
        headers = self.next_headers()
        self.cut.append(headers["X-Request-Id"])
        return asyncio.create_task(self.ask(headers=headers, max_tokens=4000))


async def metrics_of(url):
    async with httpx.AsyncClient(base_url=url, timeout=240) as http:
        return parse_metrics((await http.get("/metrics")).text)


async def num_unfinished(*replicas):
    async with httpx.AsyncClient(timeout=240) as http:
        answers = [await http.get(f"{replica.url}/load") for replica in replicas]
    return sum(answer.json()["server_load"] for answer in answers)


def check_sums(metrics):
    """Assert that the tenants' tokens add up to the engine's; return those of each tenant."""
    by_kind = {kind: {} for kind in ("prompt", "cached", "generated")}
    for name, value in metrics.items():
        if name.startswith("octavo:tenant_tokens_total"):
            tenant, kind = (label.split('"')[1] for label in name.split(","))
            by_kind[kind][tenant] = value
    assert sum(by_kind["prompt"].values()) == metrics["vllm:prompt_tokens_total"]
    assert sum(by_kind["cached"].values()) == metrics["vllm:prompt_tokens_cached_total"]
    assert sum(by_kind["generated"].values()) == metrics["vllm:generation_tokens_total"]
    return by_kind


@asynccontextmanager
async def embedding_server(folder):
    model = make_embedder("qwen3", folder / "embedder")
    config = EngineConfig(
        model=str(model), runner="pooling", dtype="float32", max_model_len=128, num_gpu_blocks_override=200
    )
    settings = {"router_secret": ("s",), "usage_log": str(folder / "usage.jsonl")}
    async with running(config, DEFAULT_LOADER) as llm, serving(llm, **settings) as server:
        yield server


async def send_all(clients, live, killed):
    """Send 280 requests. The steps of the engines stop while requests are cut in the queue and while one is killed."""
    await asyncio.gather(*(clients.ask(**KINDS[i % len(KINDS)]) for i in range(160)))
    await asyncio.gather(*(clients.leave_stream() for _ in range(60)))
    await until_idle(live, killed)
    for replica in (live, killed):
        replica.valve.shut()
    filling = [asyncio.create_task(clients.ask(max_tokens=9)) for _ in range(40)]
    while await num_unfinished(live, killed) < 40:
        await asyncio.sleep(0.02)
    leaving = [clients.leave_later() for _ in range(20)]
    while await num_unfinished(live, killed) < 60:
        await asyncio.sleep(0.02)
    for request in leaving:
        request.cancel()
    killed.kill()
    live.valve.open()
    answers = await asyncio.gather(*filling)
    assert sum(answer.status_code == 200 for answer in answers) > 20


async def until_idle(*replicas):
    while await num_unfinished(*replicas):
        await asyncio.sleep(0.02)


def test_tokens_of_keys_add_up_to_those_of_the_engine_and_each_request_has_a_line(tmp_path):
    log = tmp_path / "usage.jsonl"
    (tmp_path / "keys").write_text("".join(f"{key}: sk-{key}\n" for key in KEYS) + "admin: boss\n")

    async def run(live, killed):
        async with embedding_server(tmp_path) as embedder:
            urls = [word for each in (live, killed, embedder) for word in ("--replica", each.url)]
            flags = (*urls, "--router-secret", "s", "--api-key-file", str(tmp_path / "keys"))
            with octavo_route(tmp_path, *flags, headers={"Authorization": "Bearer boss"}) as route:
                await asyncio.to_thread(route.wait_until_exact, 3)
                limits = httpx.Limits(max_connections=None)
                async with httpx.AsyncClient(base_url=route.url, timeout=240, limits=limits) as http:
                    clients = Clients(http)
                    await send_all(clients, live, killed)
                    vectors = [clients.ask("/v1/embeddings", model=MODEL, input=["one", "two"]) for _ in range(20)]
                    assert {answer.status_code for answer in await asyncio.gather(*vectors)} == {200}
                await until_idle(live, embedder)
            await until(lambda: len(lines_of(log)) >= len(clients.answered))
            return clients, [await metrics_of(each.url) for each in (live, embedder)]

    with served_replicas(tmp_path, 2, *SERVE_FLAGS, "--usage-log", str(log), has_valves=True) as replicas:
        for replica in replicas:
            replica.valve.open()
        clients, (of_live, of_embedder) = asyncio.run(run(*replicas))

    assert clients.num_sent == 300
    for metrics in (of_live, of_embedder):
        by_kind = check_sums(metrics)
        assert by_kind["prompt"].keys() == set(KEYS)
    assert sum(check_sums(of_live)["cached"].values()) > 0
    assert min(check_sums(of_live)["generated"].values()) > 0
    lines = lines_of(log)
    of_killed = {request for request in clients.cut if request not in {line["request_id"] for line in lines}}
    assert len(of_killed) <= 20  # cut in the queue of the replica that was killed
    ids = Counter(line["request_id"] for line in lines)
    assert ids == Counter({*clients.answered, *clients.cut} - of_killed)
    assert {line["finish"] for line in lines if line["request_id"] in clients.cut} == {"cut"}
    assert {line["tenant"] for line in lines} == set(KEYS)


def test_each_request_has_a_line_when_a_signal_stops_the_server(tmp_path):
    log = tmp_path / "usage.jsonl"

    async def run(replica):
        async with httpx.AsyncClient(base_url=replica.url, timeout=240) as http:
            clients = Clients(http)
            sending = [asyncio.create_task(clients.ask(max_tokens=3000, stream=i % 2 == 0)) for i in range(24)]
            while await num_unfinished(replica) < 24:
                await asyncio.sleep(0.02)
            replica.serving.terminate()
            replica.valve.open()
            await asyncio.gather(*sending)
            return clients

    with served_replicas(tmp_path, 1, *SERVE_FLAGS, "--usage-log", str(log), has_valves=True) as (replica,):
        clients = asyncio.run(run(replica))
        assert replica.serving.exit_code() == 0
    lines = lines_of(log)
    assert Counter(line["request_id"] for line in lines) == Counter(f"request-{i + 1}" for i in range(24))
    assert clients.num_sent == 24
    assert {line["finish"] for line in lines} <= {"error", "length"}
    assert "error" in {line["finish"] for line in lines}
