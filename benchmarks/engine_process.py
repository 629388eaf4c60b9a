"""The measuring side of an engine in a process tree of its own, which is stopped (SIGSTOP) outside its turns.

All engines stay loaded and take turns, so that noise of the machine affects them alike. They are stopped because some
engines spin while idle. `engines/worker.py` describes the commands and answers.
"""

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from dev_packages import psutil

ENGINES = Path(__file__).parent / "engines"
STOP_TIMEOUT_S = 30


class EngineProcess:
    """An engine that is loaded inside a `with` block and runs only during its turns."""

    def __init__(self, name: str, command: list[str], *, env: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.load_s = 0.0
        self._command = command
        self._env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ENGINES.parent), **env}
        self._log = log

    def __enter__(self) -> "EngineProcess":
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                self._command, env=self._env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        try:
            self.load_s = self._read()["load_s"]
        except BaseException:
            self.__exit__()
            raise
        self._signal("suspend")
        return self

    def __exit__(self, *_: object) -> None:
        """End the engine by closing its input; kill the processes that are left after `STOP_TIMEOUT_S`."""
        self._signal("resume")
        tree = self._tree()
        assert self._process.stdin
        self._process.stdin.close()
        for process in psutil.wait_procs(tree, timeout=STOP_TIMEOUT_S)[1]:
            process.kill()
        with self._process:  # closes its pipes and waits for it
            pass

    @contextmanager
    def turn(self) -> Iterator["EngineProcess"]:
        """Let the engine run inside the block."""
        self._signal("resume")
        try:
            yield self
        finally:
            self._signal("suspend")

    def generate(self, prompts: list[list[int]], max_tokens: int) -> dict[str, float]:
        """Return the seconds of one call, and the growth of the engine's counters, if it has any."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def seconds(self, prompts: list[list[int]], max_tokens: int) -> float:
        return self.generate(prompts, max_tokens)["seconds"]

    def peak_bytes(self) -> int:
        """Return the sum of the most memory that each process of the tree has taken so far."""
        statuses = [Path(f"/proc/{process.pid}/status").read_text() for process in self._tree()]
        return sum(1024 * int(status.partition("VmHWM:")[2].split()[0]) for status in statuses)

    def _read(self) -> dict[str, float]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended; its log: {self._log}\n{self._log.read_text()[-2000:]}")
        answer: dict[str, float] = json.loads(line)
        return answer

    def _tree(self) -> list[psutil.Process]:
        try:
            root = psutil.Process(self._process.pid)
            return [*root.children(recursive=True), root]
        except psutil.NoSuchProcess:
            return []

    def _signal(self, action: str) -> None:
        for process in self._tree():
            try:
                getattr(process, action)()
            except psutil.NoSuchProcess:
                continue
