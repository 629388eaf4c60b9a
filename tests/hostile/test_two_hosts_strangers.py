"""Strangers on the ports of two hosts: the engine serves, or its start fails with a line."""

import random
import socket
import time
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
from octavo_testing.serve_command import OCTAVO, START_TIMEOUT_S, free_port
from octavo_testing.tiny_models import make_tiny
from octavo_testing.two_hosts import finish, headless, host_flags, places
from octavo_testing.waiting import eventually

pytestmark = pytest.mark.slow
NUM_STRANGERS = 300
#: gloo takes a stranger that sends such a number for the rank that it waits for.
NUMBERS = [number.to_bytes(8, "little") for number in range(4)]


def send(port: int, data: bytes) -> None:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as stranger:
        stranger.sendall(data)


def ports_of(pid: int) -> set[int]:
    """Return the ports on which a process and its children listen."""
    process = psutil.Process(pid)
    found: set[int] = set()
    for each in (process, *process.children(recursive=True)):
        with suppress(psutil.Error):
            found |= {c.laddr.port for c in each.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    return found


def attack(port: int) -> None:
    chance = random.Random(port)
    for number in range(NUM_STRANGERS):
        send(port, NUMBERS[number % 4] if number % 2 else chance.randbytes(chance.randrange(1, 200)))


def answer(port: int) -> list[str]:
    body = {"prompt": [5, 6, 7], "max_tokens": 20, "temperature": 0, "ignore_eos": True, "model": "tiny"}
    response = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=START_TIMEOUT_S)
    assert response.status_code == 200, response.text
    return [choice["text"] for choice in response.json()["choices"]]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny("llama", tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def expected(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The answer of one host without strangers."""
    port, log = free_port(), tmp_path_factory.mktemp("one") / "log"
    with places("loopback") as (place, _):
        flags = [tiny_model, "--served-model-name", "tiny", "--dtype", "float32", "--num-threads", "1"]
        host = place.start([*OCTAVO, "--port", str(port), *flags], log)
        eventually(lambda: "serving at" in log.read_text(), within_s=START_TIMEOUT_S, describe=log.read_text)
        found = answer(port)
        host.terminate()
        finish(host, log)
    return found


def test_strangers_change_no_answer_and_the_control_port_keeps_none(
    tiny_model: str, expected: list[str], tmp_path: Path
) -> None:
    port, http_port = free_port(), free_port()
    logs = [tmp_path / "first", tmp_path / "second"]
    with places("loopback") as (place, _):
        flags = host_flags(tiny_model, place, port, "--served-model-name", "tiny")
        first = place.start([*OCTAVO, "--port", str(http_port), *flags], logs[0])
        eventually(lambda: port in ports_of(first.pid), within_s=START_TIMEOUT_S, describe=logs[0].read_text)
        attack(port)
        other = headless(place, [*flags, "--port", str(free_port())], logs[1])
        eventually(lambda: "serving at" in logs[0].read_text(), within_s=START_TIMEOUT_S, describe=logs[0].read_text)
        core = psutil.Process(first.pid).children()[0]
        assert answer(http_port) == expected
        num_fds = core.num_fds()
        attack(port)
        eventually(lambda: core.num_fds() <= num_fds, describe=core.num_fds)
        gloo_ports = (ports_of(core.pid) | ports_of(other.pid)) - {port}
        for each in gloo_ports:
            attack(each)
        assert answer(http_port) == expected
        assert core.num_fds() <= num_fds + NUM_STRANGERS
        first.terminate()
        for host, log in zip((first, other), logs, strict=True):
            finish(host, log)
        assert "Traceback" not in logs[0].read_text() + logs[1].read_text()


def test_strangers_during_the_start_let_it_serve_or_fail_with_a_line(
    tiny_model: str, expected: list[str], tmp_path: Path
) -> None:
    """They connect to each new port of both hosts."""
    port, http_port = free_port(), free_port()
    logs = [tmp_path / "first", tmp_path / "second"]
    with places("loopback") as (place, _):
        flags = host_flags(tiny_model, place, port, "--served-model-name", "tiny")
        first = place.start([*OCTAVO, "--port", str(http_port), *flags], logs[0])
        other = headless(place, [*flags, "--port", str(free_port())], logs[1])
        attacked: set[int] = {http_port}
        ends_s = time.monotonic() + START_TIMEOUT_S
        while first.poll() is None and "serving at" not in logs[0].read_text():
            assert time.monotonic() < ends_s, logs[0].read_text()
            for each in (ports_of(first.pid) | ports_of(other.pid)) - attacked:
                attacked.add(each)
                attack(each)
        if first.poll() is None:
            assert answer(http_port) == expected
        else:
            assert first.returncode == 1
            assert "octavo: " in logs[0].read_text().splitlines()[-1]
            assert other.wait(60) == 1
        assert len(attacked) > 2
        assert "Traceback" not in logs[0].read_text() + logs[1].read_text()
