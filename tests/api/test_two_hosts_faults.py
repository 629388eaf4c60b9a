"""A host that ends, or whose link is dead, ends the engine with an error that names it; no process is left."""

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from typing import Any

import psutil
import pytest
from octavo_testing.serve_command import free_port
from octavo_testing.tiny_models import make_tiny
from octavo_testing.two_hosts import Place, headless, host_flags, places

pytestmark = pytest.mark.slow
#: Seconds within which streams must have their error: after the end of a process, and of the link.
SOON_S, LINK_S = 3.0, 10.0
STREAMS = {"busy": 2, "idle": 0}


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny("llama", tmp_path_factory.mktemp("model")))


@dataclass
class TwoHosts:
    """`processes`: all of both hosts."""

    places: list[Place]
    first: "Popen[str]"
    other: "Popen[str]"
    log: Path
    processes: list[psutil.Process]

    @property
    def core(self) -> psutil.Process:
        return psutil.Process(self.first.pid).children()[0]

    @property
    def rank(self) -> psutil.Process:
        return psutil.Process(self.other.pid).children()[0]


@contextmanager
def running(kind: str, state: str, model: str, folder: Path, **more: Any) -> Iterator[TwoHosts]:
    port, logs = free_port(), [folder / "first", folder / "second"]
    with places(kind) as (first, second):
        other = headless(second, host_flags(model, first, port), logs[1])
        arguments = {"model": model, "tensor_parallel_size": 2, "nnodes": 2, "master_port": port, "num_threads": 1}
        arguments |= more | {"master_addr": first.address, "dtype": "float32", "num_gpu_blocks_override": 64}
        script = [sys.executable, "-m", "octavo_testing.two_hosts_streams", json.dumps(arguments), str(STREAMS[state])]
        process = first.start(script, logs[0])
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n", logs[0].read_text() + logs[1].read_text()
        found = [psutil.Process(each.pid) for each in (process, other)]
        found += [child for each in found for child in each.children(recursive=True)]
        yield TwoHosts([first, second], process, other, logs[1], found)


def end(hosts: TwoHosts, fault: Callable[[], object], within_s: float) -> str:
    """Cause a fault; return the error of all streams. All processes must have ended soon afterwards."""
    began_s = time.monotonic()
    fault()
    assert hosts.first.stdout is not None
    report = json.loads(hosts.first.stdout.readline())
    assert report["ended_s"] - began_s <= within_s, report
    assert all(error == report["cause"] for error in report["errors"])
    for process in (hosts.first, hosts.other):
        process.wait(60)
    _, alive = psutil.wait_procs(hosts.processes, timeout=60)
    assert not alive
    return str(report["cause"])


@pytest.mark.parametrize("state", STREAMS)
def test_a_killed_host_is_named_by_the_first(state: str, tiny_model: str, tmp_path: Path) -> None:
    with running("loopback", state, tiny_model, tmp_path) as hosts:
        cause = end(hosts, lambda: hosts.other.send_signal(signal.SIGKILL), SOON_S)
        assert "rank 1 on host 1 (127.0.0.1) failed: the host has ended, or gave no sign of life for 5 s." in cause


@pytest.mark.parametrize("state", STREAMS)
def test_a_killed_rank_of_another_host_is_named_by_both(state: str, tiny_model: str, tmp_path: Path) -> None:
    with running("loopback", state, tiny_model, tmp_path) as hosts:
        cause = end(hosts, hosts.rank.kill, SOON_S)
        assert "rank 1 on host 1 (127.0.0.1) failed: its process was killed by signal 9." in cause
        assert hosts.other.returncode == 1
        assert "rank 1 on host 1 (127.0.0.1) failed: its process was killed by signal 9." in hosts.log.read_text()


@pytest.mark.parametrize("state", STREAMS)
def test_a_killed_first_host_is_named_by_the_other(state: str, tiny_model: str, tmp_path: Path) -> None:
    with running("loopback", state, tiny_model, tmp_path) as hosts:
        end(hosts, hosts.core.kill, SOON_S)
        assert hosts.other.returncode == 1
        assert "has ended, or gave no sign of life for 5 s." in hosts.log.read_text()


@pytest.mark.parametrize("state", STREAMS)
def test_a_dead_link_ends_both_hosts(state: str, tiny_model: str, tmp_path: Path) -> None:
    """The core waits in gloo, whose timeout is 60 s."""
    with running("namespaces", state, tiny_model, tmp_path) as hosts:
        cause = end(hosts, lambda: hosts.places[1].set_link("down"), LINK_S)
        assert "rank 1 on host 1 (10.77.0.2) failed: the host has ended, or gave no sign of life for 5 s." in cause
        assert hosts.other.returncode == 1
        assert "has ended, or gave no sign of life for 5 s." in hosts.log.read_text()


def test_a_dead_link_that_comes_back_soon_breaks_nothing(tiny_model: str, tmp_path: Path) -> None:
    with running("namespaces", "busy", tiny_model, tmp_path) as hosts:
        hosts.places[1].set_link("down")
        with pytest.raises(TimeoutExpired):
            hosts.first.wait(2)
        hosts.places[1].set_link("up")
        with pytest.raises(TimeoutExpired):
            hosts.first.wait(LINK_S)
        assert hosts.other.poll() is None
        end(hosts, lambda: hosts.other.send_signal(signal.SIGKILL), SOON_S)


def test_a_rank_that_stands_still_is_named_with_its_host(tiny_model: str, tmp_path: Path) -> None:
    with running("loopback", "busy", tiny_model, tmp_path, distributed_timeout_seconds=3) as hosts:
        cause = end(hosts, hosts.rank.suspend, 3 + SOON_S)
        assert "rank 1 on host 1 (127.0.0.1) did not answer within 3 s (--distributed-timeout-seconds)" in cause


def test_a_host_that_stands_still_is_named_by_the_first(tiny_model: str, tmp_path: Path) -> None:
    with running("loopback", "busy", tiny_model, tmp_path) as hosts:
        began_s = time.monotonic()
        psutil.Process(hosts.other.pid).suspend()
        assert hosts.first.stdout is not None
        report = json.loads(hosts.first.stdout.readline())
        assert report["ended_s"] - began_s <= LINK_S
        cause = "rank 1 on host 1 (127.0.0.1) failed: the host has ended, or gave no sign of life for 5 s."
        assert cause in report["cause"]
        psutil.Process(hosts.other.pid).resume()
        assert hosts.other.wait(60) == 1


def test_a_first_host_that_stands_still_is_named_by_the_other(tiny_model: str, tmp_path: Path) -> None:
    with running("loopback", "busy", tiny_model, tmp_path) as hosts:
        core = hosts.core
        core.suspend()
        assert hosts.other.wait(LINK_S) == 1
        assert "has ended, or gave no sign of life for 5 s." in hosts.log.read_text()
        core.kill()
        hosts.first.wait(60)
