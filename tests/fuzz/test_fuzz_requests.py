"""Requests that no client should send, at every endpoint: no 5xx, no hang, no block lost, no growth.

LONG=1 sends 10000 requests instead of 500. `-s` prints the figures of the run.
"""

import asyncio
import itertools

import psutil
import pytest
from octavo_testing.fuzz_requests import Fuzzer
from octavo_testing.fuzz_run import Report, send_all
from octavo_testing.run_length import LONG

pytestmark = pytest.mark.slow

SEED = 20260131
NUM_REQUESTS = 10_000 if LONG else 500
WARM_UP = 1000
MOST_GROWTH = 1.05


def memory_bytes(served):
    """Resident bytes of the server and of its engine core."""
    return [psutil.Process(pid).memory_info().rss for pid in (served.process.process.pid, served.process.core.pid)]


def test_no_request_breaks_the_server(tiny, num_blocks):
    report = Report()
    fuzzed = Fuzzer(tiny.http.get("/openapi.json").json(), SEED).requests(NUM_REQUESTS)
    asyncio.run(send_all(tiny.url, itertools.islice(fuzzed, WARM_UP), report))
    before = memory_bytes(tiny)
    asyncio.run(send_all(tiny.url, fuzzed, report))
    after = memory_bytes(tiny)
    _print(report, before, after)

    assert not report.faults, "\n".join(report.faults[:5])
    assert sum(report.statuses.values()) == NUM_REQUESTS
    assert tiny.process.process.poll() is None
    metrics = tiny.metrics_when(lambda m: m['octavo:kv_blocks{state="in_use"}'] == 0)
    blocks = {state: metrics[f'octavo:kv_blocks{{state="{state}"}}'] for state in ("free", "cached")}
    assert blocks["free"] + blocks["cached"] == num_blocks
    assert metrics["vllm:num_requests_running"] == metrics["vllm:num_requests_waiting"] == 0
    assert tiny.http.get("/load").json() == {"server_load": 0}
    answer = tiny.http.post("/v1/completions", json={"prompt": "still there?", "max_tokens": 2})
    assert answer.status_code == 200
    assert all(new <= old * MOST_GROWTH for new, old in zip(after, before, strict=True))


def _print(report, before, after):
    print(f"\nstatuses: {dict(report.statuses.most_common())}")
    print(f"kinds: {dict(report.kinds.most_common())}")
    print(f"faults: {len(report.faults)}; slowest answer: {report.slowest_s:.2f} s")
    for name, old, new in zip(("server", "engine core"), before, after, strict=True):
        print(f"{name}: {old / 2**20:.1f} MiB after at most {WARM_UP} requests, {new / 2**20:.1f} MiB at the end")
