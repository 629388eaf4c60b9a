"""`octavo serve` as a process, started as a user does, on a free loopback port."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

START_TIMEOUT_S = 240
OCTAVO = (sys.executable, "-m", "octavo_server.cli.main", "serve", "--host", "127.0.0.1")


class ServeProcess:
    def __init__(self, process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self.log = log

    def wait_until_healthy(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()
            try:
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.05)
        raise AssertionError(f"not healthy after {START_TIMEOUT_S} s:\n{self.log.read_text()}")

    @property
    def core(self) -> psutil.Process:
        (core,) = psutil.Process(self.process.pid).children()
        return core

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def terminate_group(self) -> None:
        """Send SIGTERM to all processes, the engine core included, as systemd and `tini -g` do."""
        os.killpg(self.process.pid, signal.SIGTERM)

    def exit_code(self, timeout_s: float = 240) -> int:
        return self.process.wait(timeout_s)


def with_limit(command: Sequence[str], max_files: int | None) -> list[str]:
    """Return the command, with this limit of open files if one is given."""
    return [*command] if max_files is None else ["bash", "-c", f'ulimit -n {max_files}; exec "$@"', "bash", *command]


@contextmanager
def octavo_serve(
    folder: Path,
    *flags: str,
    module: tuple[str, ...] = OCTAVO,
    port: int | None = None,
    env: Mapping[str, str] = os.environ,
    max_files: int | None = None,
) -> Iterator[ServeProcess]:
    """Run a server with its log in `folder`; stop it and assert that its engine core has ended, too."""
    port = port or free_port()
    log = folder / "serve.log"
    with log.open("wb") as output:
        argv = with_limit([*module, "--port", str(port), *flags], max_files)
        process = subprocess.Popen(argv, stdout=output, stderr=output, env=env, start_new_session=True)
    serving = ServeProcess(process, port, log)
    family: list[psutil.Process] = []
    try:
        serving.wait_until_healthy()
        family = [serving.core]
        yield serving
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(240)
    assert not psutil.wait_procs(family, timeout=120)[1]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
