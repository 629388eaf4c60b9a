"""`octavo route --workers 2`: processes of one router on one port, as a user starts and stops them."""

import json
import signal
import subprocess
import time

import httpx
import psutil
import pytest
from octavo_testing.route_command import octavo_route, served_replicas

pytestmark = pytest.mark.slow

BODY = {"model": "tiny", "prompt": "abc", "max_tokens": 2}
LIMIT_S = 120.0


@pytest.fixture(scope="module")
def replicas(tmp_path_factory):
    with served_replicas(tmp_path_factory.mktemp("replicas"), 1) as served:
        yield served


@pytest.fixture
def route(replicas, tmp_path):
    with octavo_route(tmp_path, "--workers", "2", "--replica", replicas[0].url) as started:
        until(lambda: num_ready(started) == 2)
        yield started


def until(holds):
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def workers(route):
    return psutil.Process(route.process.pid).children()


def num_ready(route):
    """Number of workers if all of them may send to the replica, by the state of any of them."""
    try:
        with httpx.stream("GET", f"{route.url}/state/events", timeout=LIMIT_S) as answer:
            line = next(line for line in answer.iter_lines() if line)
    except httpx.TransportError:
        return 0
    state = json.loads(line.removeprefix("data: "))["state"]
    return state["workers"] if [replica["admitted"] for replica in state["replicas"]] == [True] else 0


def count(route):
    text = httpx.get(f"{route.url}/metrics").text
    lines = [line for line in text.splitlines() if line.startswith("octavo_router_requests_total{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def test_both_workers_serve_and_report_for_each_other(route):
    for _ in range(30):
        assert httpx.post(f"{route.url}/v1/completions", json=BODY).status_code == 200
    busy = [worker for worker in workers(route) if worker.cpu_times().user > 0]
    assert len(busy) == 2
    assert {count(route) for _ in range(10)} == {30.0}


def test_a_drain_holds_for_all_workers(route):
    assert httpx.post(f"{route.url}/drain").status_code == 200
    until(lambda: {httpx.get(f"{route.url}/ready").status_code for _ in range(10)} == {503})
    assert httpx.delete(f"{route.url}/drain").status_code == 200
    until(lambda: {httpx.get(f"{route.url}/ready").status_code for _ in range(10)} == {200})


def test_a_killed_worker_is_restarted(route):
    first, _ = workers(route)
    first.kill()
    until(lambda: len(workers(route)) == 2 and first not in workers(route))
    until(lambda: num_ready(route) == 2)


def test_no_worker_outlives_a_killed_supervisor(route):
    family = workers(route)
    route.kill()
    assert not psutil.wait_procs(family, timeout=LIMIT_S)[1]


def test_a_signal_stops_all_workers(route):
    family = workers(route)
    route.process.send_signal(signal.SIGINT)
    assert route.process.wait(LIMIT_S) == 0
    assert not psutil.wait_procs(family, timeout=LIMIT_S)[1]


def test_workers_that_fail_to_start_end_the_command(route, tmp_path):
    command = [*route.process.args[:4], "--port", "0", "--workers", "2", "--replica", "http://x", "--api-key-file"]
    ended = subprocess.run([*command, str(tmp_path / "none")], capture_output=True, timeout=LIMIT_S)
    assert ended.returncode == 1
    assert b"none" in ended.stderr
