"""Replicas and a router as processes that a benchmark may kill; each keeps its address when it is started again."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from dev_packages import psutil

ENGINES = Path(__file__).parent / "engines"
SERVE = {"real": ("-m", "octavo_server.cli.main"), "paced": (str(ENGINES / "paced.py"),)}
QUIET = ("--host", "127.0.0.1", "--disable-uvicorn-access-log")
START_TIMEOUT_S = 180
LOOK_S = 0.005
_PR_SET_PDEATHSIG = 1
_prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux only; looked up here, as a fork may copy a locked loader


class Killable:
    def __init__(self, command: Sequence[str], log: Path) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = int(sock.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.name = f"127.0.0.1:{self.port}"
        self.log = log
        self._command = [sys.executable, *command, *QUIET, "--port", str(self.port)]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process in a session of its own: Ctrl-C reaches only the script, which stops it. On Linux the
        process also ends when the script is killed."""
        paths = os.pathsep.join([str(ENGINES), os.environ.get("PYTHONPATH", "")])
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                stdout=output,
                stderr=output,
                env={**os.environ, "PYTHONPATH": paths},
                start_new_session=True,
                preexec_fn=_prctl and partial(_prctl, _PR_SET_PDEATHSIG, signal.SIGTERM),
            )

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """Send SIGKILL and wait for the process to end."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def wait(self) -> int:
        """Wait for the process to end by itself, and return its exit status."""
        assert self._process is not None
        return self._process.wait(START_TIMEOUT_S)

    def cpu_s(self) -> float:
        """Return the CPU seconds of the process since its start."""
        times = psutil.Process(self.pid).cpu_times()
        return float(times.user + times.system)

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait(60)

    def wait_until(self, path: str, holds: Callable[[Any], bool]) -> None:
        """Wait until the JSON that a GET of `path` returns fulfils the condition."""
        deadline = time.monotonic() + START_TIMEOUT_S
        with httpx.Client(base_url=self.url) as http:
            while time.monotonic() < deadline:
                assert self._process is not None
                if self._process.poll() is not None:
                    break
                try:
                    answer = http.get(path)
                    if answer.status_code == 200 and holds(answer.json() if answer.content else None):
                        return
                except httpx.TransportError:
                    pass
                time.sleep(LOOK_S)
        raise RuntimeError(f"{self.url}{path} did not fulfil the condition; its log:\n{self.log.read_text()[-3000:]}")


class Router(Killable):
    def __init__(self, replicas: Sequence[Killable], log: Path, flags: Sequence[str] = ()) -> None:
        named = [word for replica in replicas for word in ("--replica", replica.url)]
        super().__init__(["-m", "octavo_server.cli.main", "route", "--routing-headers", *named, *flags], log)

    def wait_until_exact(self, number: int) -> None:
        self.wait_until("/debug/index", lambda shown: _num_exact(shown) == number)


def _num_exact(shown: Any) -> int:
    return sum(replica["state"] == "exact" and replica["admitted"] for replica in shown["replicas"])


@contextmanager
def routed(
    number: int, folder: Path, *, engine: str, serve_flags: Sequence[str], route_flags: Sequence[str] = ()
) -> Iterator[tuple[list[Killable], Router]]:
    """Run replicas and a router, and yield them when the router is exact for each replica."""
    command = [*SERVE[engine], "serve", "--disable-log-stats", *serve_flags]
    replicas = [Killable(command, folder / f"replica-{i}.log") for i in range(number)]
    router = Router(replicas, folder / "router.log", route_flags)
    try:
        for process in (*replicas, router):
            process.start()
        router.wait_until_exact(number)
        yield replicas, router
    finally:
        for process in (router, *replicas):
            process.stop()
