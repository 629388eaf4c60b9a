"""`octavo route` as a process over `octavo serve` processes with the scripted engine; tests may kill each of them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from octavo_testing.gate import Valve
from octavo_testing.scripted import VALVE, write_byte_model
from octavo_testing.scripted_serve import SCRIPTED_SERVE
from octavo_testing.serve_command import ServeProcess, free_port, octavo_serve, with_limit

LIMIT_S = 120.0
ROUTE = (sys.executable, "-m", "octavo_server.cli.main", "route", "--host", "127.0.0.1", "--routing-headers")
QUIET = "--disable-uvicorn-access-log"
SERVE_FLAGS = ("--load-format", "dummy", "--dtype", "float32", "--max-model-len", "4096", "--served-model-name", "tiny")


class RouteProcess:
    """A router process that keeps its address when it is started again after `kill`."""

    def __init__(
        self,
        folder: Path,
        flags: Sequence[str],
        headers: Mapping[str, str] | None = None,
        max_files: int | None = None,
    ) -> None:
        self.headers = headers  # of admin requests
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "route.log"
        self._flags, self._max_files = flags, max_files
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as output:
            command = with_limit([*ROUTE, QUIET, "--port", str(self.port), *self._flags], self._max_files)
            self.process = subprocess.Popen(command, stdout=output, stderr=output)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(240)

    def replicas(self) -> dict[str, Any]:
        """Return the router's report of each replica by URL; empty while the router doesn't respond."""
        try:
            answer = httpx.get(f"{self.url}/debug/index", headers=self.headers)
        except httpx.TransportError:
            return {}
        return {found["url"]: found for found in answer.json()["replicas"]}

    def wait_until(self, holds: Callable[[dict[str, Any]], object]) -> None:
        """Wait until `replicas` fulfils the condition."""
        deadline = time.monotonic() + LIMIT_S
        while not holds(found := self.replicas()):
            assert self.process is not None
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, json.dumps(found, indent=1) + self.log.read_text()
            time.sleep(0.02)

    def wait_until_exact(self, num_replicas: int) -> None:
        def holds(found: dict[str, Any]) -> bool:
            return sum(r["state"] == "exact" and r["admitted"] for r in found.values()) == num_replicas

        self.wait_until(holds)


@contextmanager
def octavo_route(
    folder: Path, *flags: str, headers: Mapping[str, str] | None = None, max_files: int | None = None
) -> Iterator[RouteProcess]:
    """Run a router, and stop it afterwards."""
    route = RouteProcess(folder, flags, headers, max_files)
    route.start()
    try:
        yield route
    finally:
        route.stop()


class ServedReplica:
    """An `octavo serve` that keeps its address. With a valve, its engine does only the steps that the test allows."""

    def __init__(self, folder: Path, *, has_valve: bool = False, flags: Sequence[str] = ()) -> None:
        folder.mkdir()
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.name = f"127.0.0.1:{self.port}"
        self.valve = Valve(folder / "valve") if has_valve else None
        self._folder = folder
        self._flags = flags
        self._model = str(write_byte_model(folder))
        self._running = ExitStack()
        self.serving: ServeProcess | None = None

    def start(self) -> None:
        """Start the server, or start it again after its end."""
        self._running.close()
        env = {**os.environ, **({VALVE: str(self.valve.path)} if self.valve else {})}
        flags = (self._model, *SERVE_FLAGS, *self._flags)
        self.serving = self._running.enter_context(
            octavo_serve(self._folder, *flags, module=SCRIPTED_SERVE, port=self.port, env=env)
        )

    def signal(self, number: signal.Signals) -> None:
        assert self.serving is not None
        self.serving.process.send_signal(number)

    @property
    def is_running(self) -> bool:
        return self.serving is not None and self.serving.process.poll() is None

    def kill(self) -> None:
        assert self.serving is not None
        self.serving.process.kill()
        self.serving.process.wait()

    def stop(self) -> None:
        if self.valve is not None:
            self.valve.open()
        self._running.close()


@contextmanager
def served_replicas(folder: Path, number: int, *flags: str, has_valves: bool = False) -> Iterator[list[ServedReplica]]:
    replicas = [ServedReplica(folder / f"replica-{i}", has_valve=has_valves, flags=flags) for i in range(number)]
    with ExitStack() as stack:
        for replica in replicas:
            stack.callback(replica.stop)
            replica.start()
        yield replicas
