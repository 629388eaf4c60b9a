"""`PageRun` runs the commands of a page in order, as a reader does who copies them into a terminal.

A command that serves stays in the background until the page starts another server on its port, or ends; commands
after it run when it is ready. Every other command must end with its exit code, 0 by default, and curl fails on an HTTP
error.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

LIMIT_S = 900
_SERVES = re.compile(r"\boctavo (serve|up|route)\b|\bmake (up|serve)\b")
_ENDS = re.compile(r"--dry-run\b|--help\b")
_FOLLOWS = re.compile(r"--follow\b")
_COMMENT = re.compile(r"\s#.*")
_PORT = re.compile(r"(?:--port|PORT)[ =](\d+)")
CURL_SETTINGS = f"fail-with-body\nsilent\nshow-error\nmax-time = {LIMIT_S}\n"
#: Standard input of each command: the questions of a reader who then presses Ctrl-D.
TYPED = b"What is the capital of France?\n"


@dataclass(frozen=True)
class _Background:
    command: str
    ports: frozenset[int]
    process: "subprocess.Popen[bytes]"
    log: Path

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + LIMIT_S
        while True:
            assert self._is_running(), f"{self.command} ended:\n{self.log.read_text()}"
            if all(map(_is_ready, self.ports)):
                return
            assert time.monotonic() < deadline, f"{self.command} is not ready:\n{self.log.read_text()}"
            time.sleep(0.1)

    def stop(self) -> None:
        """End all processes of the command; the shell that started them may have ended before."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        deadline = time.monotonic() + LIMIT_S
        while self._is_running():
            assert time.monotonic() < deadline, f"{self.command} does not end:\n{self.log.read_text()}"
            time.sleep(0.05)

    def _is_running(self) -> bool:
        self.process.poll()
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return False
        return True


class PageRun:
    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder, self._environment = folder, environment
        self._background: list[_Background] = []

    def __enter__(self) -> "PageRun":
        return self

    def __exit__(self, *_: object) -> None:
        for running in self._background:
            running.stop()

    def run_command(self, command: str, exit_code: int = 0) -> None:
        code = _COMMENT.sub("", command)
        serves = _SERVES.search(code) and not _ENDS.search(code)
        if serves or _FOLLOWS.search(code):
            self._start(command, frozenset(map(int, _PORT.findall(code))) or frozenset({8000} if serves else ()))
        else:
            self._run_to_end(["bash", "-c", command], command, exit_code)

    def run_python(self, code: str) -> None:
        self._run_to_end(["python", "-c", code], code)

    def _run_to_end(self, argv: list[str], shown: str, exit_code: int = 0) -> None:
        self.wait_until_ready()
        done = subprocess.run(
            argv,
            input=TYPED,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=self._folder,
            env=self._environment,
            timeout=LIMIT_S,
        )
        print(f"$ {shown.strip()}\n{done.stdout.decode()[-2000:]}")
        logs = "".join(f"\n--- {each.command}{each.log.read_text()[-4000:]}" for each in self._background)
        assert done.returncode == exit_code, f"{shown}ended with {done.returncode}:\n{done.stdout.decode()}{logs}"

    def wait_until_ready(self) -> None:
        for running in self._background:
            running.wait_until_ready()

    def _start(self, command: str, ports: frozenset[int]) -> None:
        others = [each for each in self._background if each.ports & ports]
        if others:
            self.wait_until_ready()
        for other in others:
            other.stop()
            self._background.remove(other)
        log = self._folder / f"background-{time.monotonic_ns()}.log"
        print(f"$ {command.strip()}   # in the background")
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-c", command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self._folder,
                env=self._environment,
                start_new_session=True,
            )
        self._background.append(_Background(command, ports, process, log))


def _is_ready(port: int) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"http://127.0.0.1:{port}/ready", trust_env=False).status_code == 200
    return False
