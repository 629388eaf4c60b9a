"""SIGTERM on any host drains both, and the probes of a host without an API follow the engine."""

import signal
import threading
from pathlib import Path

import httpx
import pytest
from octavo_testing.serve_command import OCTAVO, START_TIMEOUT_S, free_port
from octavo_testing.tiny_models import make_tiny
from octavo_testing.two_hosts import finish, headless, host_flags, places
from octavo_testing.waiting import eventually

pytestmark = pytest.mark.slow
BODY = {"prompt": [5, 6, 7], "max_tokens": 110, "ignore_eos": True, "stream": True, "model": "tiny"}


@pytest.mark.parametrize("stopped", [0, 1], ids=["first host", "second host"])
def test_sigterm_on_either_host_lets_streams_finish(stopped: int, tmp_path: Path) -> None:
    model = str(make_tiny("llama", tmp_path))
    port, ports, logs = free_port(), [free_port(), free_port()], [tmp_path / "first", tmp_path / "second"]
    urls = [f"http://127.0.0.1:{each}" for each in ports]
    finished: list[bool] = []
    begun = threading.Semaphore(0)

    def stream() -> None:
        with httpx.stream("POST", f"{urls[0]}/v1/completions", json=BODY, timeout=START_TIMEOUT_S) as response:
            assert response.status_code == 200
            lines = []
            for line in response.iter_lines():
                if not lines:
                    begun.release()
                lines.append(line)
        finished.append("data: [DONE]" in lines and not any('"error"' in line for line in lines))

    with places("loopback") as (place, _):
        flags = host_flags(model, place, port, "--served-model-name", "tiny", "--max-model-len", "128")
        hosts = [place.start([*OCTAVO, "--port", str(ports[0]), *flags], logs[0])]
        hosts.append(headless(place, [*flags, "--port", str(ports[1])], logs[1]))
        eventually(lambda: status(f"{urls[1]}/health") == 200, within_s=START_TIMEOUT_S, describe=logs[1].read_text)
        eventually(lambda: status(f"{urls[0]}/ready") == 200, within_s=START_TIMEOUT_S, describe=logs[0].read_text)
        eventually(lambda: status(f"{urls[1]}/ready") == 200, describe=logs[1].read_text)
        threads = [threading.Thread(target=stream) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in threads:
            assert begun.acquire(timeout=START_TIMEOUT_S)
        hosts[stopped].send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join()
        for host, log in zip(hosts, logs, strict=True):
            finish(host, log)
    assert finished == [True] * 4


def status(url: str) -> int | None:
    try:
        return httpx.get(url).status_code
    except httpx.TransportError:
        return None


def test_a_host_that_waits_for_the_first_is_not_ready_and_ends_at_once(tmp_path: Path) -> None:
    model, port, log = str(make_tiny("llama", tmp_path)), free_port(), tmp_path / "log"
    with places("loopback") as (place, _):
        host = headless(place, [*host_flags(model, place, free_port()), "--port", str(port)], log)
        eventually(lambda: status(f"http://127.0.0.1:{port}/health") == 200, describe=log.read_text)
        assert status(f"http://127.0.0.1:{port}/ready") == 503
        host.send_signal(signal.SIGTERM)
        finish(host, log)
