"""`octavo up` as a process with scripted engines, and the processes that it starts."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

import httpx
import psutil

from octavo_testing.scripted import write_byte_model
from octavo_testing.serve_command import free_port

TIMEOUT_S = 240
SCRIPTED_UP = (sys.executable, "-P", "-m", "octavo_testing.scripted_up", "up")
REAL_UP = (sys.executable, "-P", "-m", "octavo_server.cli.main", "up")
SERVING = "Ctrl-C stops all"


class UpProcess:
    def __init__(self, process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_text()

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait for the condition, which `what` names; fail with the log on a timeout or when the process ends."""
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert self.process.poll() is None, f"ended before {what}:\n{self.log}"
            assert time.monotonic() < deadline, f"not within {TIMEOUT_S} s: {what}\n{self.log}"
            time.sleep(0.02)

    def wait_for_log(self, text: str) -> None:
        self.until(lambda: text in self.log, f"{text!r} is logged")

    def metric(self, name: str) -> float:
        found = re.search(rf"^{name}(?:{{.*}})? (\S+)$", httpx.get(f"{self.url}/metrics").text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    @property
    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def child(self, name: str) -> psutil.Process:
        """Return the process of `router` or `replica-N`; N is the replica's position in the order of starts."""
        children = sorted(psutil.Process(self.process.pid).children(), key=lambda child: child.create_time())
        routers = [child for child in children if "route" in child.cmdline()]
        replicas = [child for child in children if child not in routers]
        return routers[0] if name == "router" else replicas[int(name.removeprefix("replica-"))]

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def exit_code(self) -> int:
        return self.process.wait(TIMEOUT_S)


@contextmanager
def octavo_up(
    folder: Path, *flags: str, manifest: str | None = None, command: Sequence[str] = SCRIPTED_UP
) -> Iterator[UpProcess]:
    """Run `octavo up` with model and log in `folder`, and end it with its children afterwards.

    `manifest` is passed on standard input; MODEL in it is replaced by the model's URI. REAL_UP as `command` has real
    engines and takes the model from `flags`.
    """
    model = folder / "model"
    if not model.exists():
        model.mkdir()
        write_byte_model(model)
    port, log = free_port(), folder / "up.log"
    what = [str(model), "--load-format", "dummy"] if manifest is None else ["-f", "-"]
    argv = [*command, *([] if command is REAL_UP else what), "--host", "127.0.0.1", "--port", str(port), *flags]
    with log.open("wb") as output, TemporaryFile() as given:
        given.write((manifest or "").replace("MODEL", f"file://{model}").encode())
        given.seek(0)
        process = subprocess.Popen(argv, stdin=given, stdout=output, stderr=output, start_new_session=True)
    try:
        yield UpProcess(process, port, log)
    finally:
        if process.poll() is None:
            process.kill()  # its children follow
        process.wait(TIMEOUT_S)


def all_exited(family: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(family, timeout=120)[1]
