"""Two hosts of one model: processes on the loopback interface, or in two network namespaces, which needs root."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from octavo_testing.core_process import SUPPORT
from octavo_testing.serve_command import OCTAVO, free_port

SECRET = "the secret of the hosts in these tests"
PLACES = ["loopback", "namespaces"]
_NAMES = f"octavo-{os.getpid()}-a", f"octavo-{os.getpid()}-b"
_LINK = "veth0"
_TIMEOUT_S = 300


@dataclass(frozen=True)
class Place:
    """A network in which hosts run. `prefix`: begins each of their commands. `started`: the processes, which are killed
    at the end of a test.
    """

    prefix: tuple[str, ...]
    address: str
    started: "list[subprocess.Popen[str]]"

    def start(self, command: Sequence[str], log: Path, **environment: str) -> "subprocess.Popen[str]":
        """Start a command, whose standard error goes to `log`."""
        env = os.environ | {"OCTAVO_GROUP_SECRET": SECRET, "PYTHONPATH": str(SUPPORT)} | environment
        with log.open("w") as errors:
            argv = [*self.prefix, *command]
            self.started.append(subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=errors, text=True, env=env))
        return self.started[-1]

    def listening(self) -> set[str]:
        """Return the addresses and ports on which processes listen: all of a namespace, or those started here."""
        lines = subprocess.check_output([*self.prefix, "ss", "-ltnpH"], text=True).splitlines()
        started = [psutil.Process(each.pid) for each in self.started]
        pids = {process.pid for each in started for process in (each, *each.children(recursive=True))}
        own = [line for line in lines if self.prefix or any(f"pid={pid}," in line for pid in pids)]
        return {line.split()[3] for line in own}

    def set_link(self, state: str) -> None:
        """Set the state of the link, "up" or "down", of a host in a namespace."""
        subprocess.check_call([*self.prefix, "ip", "link", "set", _LINK, state])


@contextmanager
def places(kind: str) -> Iterator[list[Place]]:
    """Yield the places of two hosts; skip the test without the right to create network namespaces."""
    started: list[subprocess.Popen[str]] = []
    with ExitStack() as stack:
        found = [Place((), "127.0.0.1", started)] * 2 if kind == "loopback" else _namespaces(stack, started)
        stack.callback(_kill, started)
        yield found


def _namespaces(stack: ExitStack, started: "list[subprocess.Popen[str]]") -> list[Place]:
    if os.geteuid() != 0 or subprocess.run(["unshare", "-n", "ip", "link"], capture_output=True).returncode:
        pytest.skip("network namespaces need root and ip")
    for name in _NAMES:
        subprocess.check_call(["ip", "netns", "add", name])
        stack.callback(subprocess.call, ["ip", "netns", "del", name])
    peer = ["type", "veth", "peer", "name", _LINK, "netns", _NAMES[1]]
    subprocess.check_call(["ip", "link", "add", "name", _LINK, "netns", _NAMES[0], *peer])
    for number, name in enumerate(_NAMES, start=1):
        subprocess.check_call(["ip", "-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", _LINK])
        for device in ("lo", _LINK):
            subprocess.check_call(["ip", "-n", name, "link", "set", device, "up"])
    prefix = ("ip", "netns", "exec")
    return [Place((*prefix, name), f"10.77.0.{number}", started) for number, name in enumerate(_NAMES, start=1)]


def _kill(started: "list[subprocess.Popen[str]]") -> None:
    for process in started:
        process.kill()
        process.communicate()


def host_flags(model: str, first: Place, port: int, *flags: str) -> list[str]:
    """Return the arguments that both hosts have."""
    common = ["--tensor-parallel-size", "2", "--nnodes", "2", "--master-addr", first.address, "--dtype", "float32"]
    return [model, *common, "--master-port", str(port), "--num-threads", "1", *flags]


def headless(place: Place, flags: list[str], log: Path, **environment: str) -> "subprocess.Popen[str]":
    """Start the second host."""
    port = [] if "--port" in flags else ["--port", str(free_port())]
    return place.start([*OCTAVO, *flags, *port, "--headless", "--node-rank", "1"], log, **environment)


def finish(process: "subprocess.Popen[str]", log: Path) -> str:
    """Return the output of a process that must succeed."""
    output, _ = process.communicate(timeout=_TIMEOUT_S)
    assert process.returncode == 0, log.read_text()
    return output


def answers_command(model: str, num_texts: int, num_tokens: int, size: int, **arguments: Any) -> list[str]:
    """Return a command that prints the answers of an `LLM` as JSON."""
    given = json.dumps([model, num_texts, num_tokens, size, arguments])
    return [sys.executable, "-m", "octavo_testing.two_hosts", given]


def _print_answers(model: str, num_texts: int, num_tokens: int, size: int, arguments: dict[str, Any]) -> None:
    from octavo_testing.parallel_llm import TEXTS, answers, started

    with started(model, size, **arguments) as llm:
        print(json.dumps(answers(llm, TEXTS[:num_texts], num_tokens)))


if __name__ == "__main__":
    _print_answers(*json.loads(sys.argv[1]))
