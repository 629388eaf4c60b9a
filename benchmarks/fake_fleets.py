"""A process of fake replicas (`octavo_testing.fake_fleet`) for benchmarks of the router."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import support_path  # noqa: F401  (makes octavo_testing importable)

SUPPORT = Path(__file__).parent.parent / "tests" / "support"


class FakeFleet:
    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.urls: list[str] = self._answer()["urls"]

    def send_command(self, command: str, replica: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command} {replica}\n")
        self._process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def ask(self, command: str, replica: int) -> dict[str, Any]:
        self.send_command(command, replica)
        return self._answer()


@contextmanager
def fake_fleet(**options: float) -> Iterator[FakeFleet]:
    flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    path = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, "-m", "octavo_testing.fake_fleet", *flags],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    ) as process:
        try:
            yield FakeFleet(process)
        finally:
            process.terminate()
