"""`Component`: a process that a test starts, kills and starts again; each start appends to the same log."""

import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

END_S = 30.0
LAST_LINES = 30


class Component:
    """A process that the kernel kills when the thread that started it ends."""

    def __init__(self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.log = log
        bound = shutil.which("setpriv")
        self._command = [*([bound, "--pdeathsig", "KILL"] if bound else []), *command]
        self._env = env
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def process(self) -> psutil.Process:
        """The running process, for measurements of its CPU time and memory."""
        assert self._process is not None
        return psutil.Process(self._process.pid)

    def start(self) -> None:
        assert not self.is_running
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=self._env
            )

    def kill(self) -> None:
        """Send SIGKILL and wait for the process to end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self, timeout_s: float = END_S) -> int:
        """Send SIGTERM, as a kubelet does, and return the exit code."""
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(timeout_s)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def assert_running(self) -> None:
        """Fail with the end of the log if the process has ended."""
        assert self.is_running, f"{self.name} ended:\n{self.log_tail()}"

    def log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(lines[-LAST_LINES:])

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)
