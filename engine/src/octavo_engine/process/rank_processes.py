"""The processes of the ranks other than rank 0: starts them, sends them plans, and detects that one has ended.

A thread for each process reads its reports and waits for its end, which is thus known at once, also between two plans.
"""

import logging
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import zmq

from octavo_engine.log_format import current_format
from octavo_engine.process import rank_messages as messages
from octavo_engine.process.ipc_sockets import make_folder, remove_folder
from octavo_engine.process.messages import Failed, Hello
from octavo_engine.process.pipes import framed, read_message
from octavo_engine.wire.errors import EngineDead, StartupError

if TYPE_CHECKING:
    from octavo_engine.ops.group import Group
    from octavo_engine.runner.rank_plans import RankPlans
    from octavo_engine.sources.model_files import ModelFiles

_LOGGER = logging.getLogger(__name__)
_STOP_TIMEOUT_S = 5.0
#: Time in which the end of a rank is reported after an operation with it has failed.
_CAUSE_TIMEOUT_S = 1.0
Message = TypeVar("Message", Hello, messages.RankReady)


class RankProcess:
    """`on_end`: called on another thread when the process has ended, with a sentence about the cause, if it has one.

    A process that ends because another rank is gone reports no cause.
    """

    def __init__(
        self, rank: int, start: messages.RankStart, plans: "zmq.Socket[bytes]", on_end: Callable[[str], None]
    ) -> None:
        self.rank, self._plans, self._on_end = rank, plans, on_end
        self._reports: queue.SimpleQueue[messages.FromRank | None] = queue.SimpleQueue()
        plans.set_hwm(0)
        plans.linger = 0
        plans.bind(messages.plans_address(start.folder, rank))
        command = (sys.executable, "-P", "-m", "octavo_engine.process.rank")
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._write(framed(messages.encode(start)))
        self._thread = threading.Thread(target=self._watch, name=f"rank-{rank}", daemon=True)
        self._thread.start()

    def send(self, plan: bytes) -> None:
        self._plans.send(plan, zmq.NOBLOCK)

    def wait_for(self, kind: type[Message]) -> Message:
        """Wait for the next report. Raises StartupError if the rank has failed or ended instead."""
        report = self._reports.get()
        if isinstance(report, kind):
            return report
        code = report.code if isinstance(report, Failed) else "StartupFailed"
        text = report.message if isinstance(report, Failed) else f"it {self._exit()} while starting."
        raise StartupError(f"rank {self.rank}: {text}", code=code)

    def stop(self) -> None:
        """Close the standard input of the process, which ends it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._thread.join()
        self._process.stdout.close()
        self._plans.close()

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except BrokenPipeError:
            _LOGGER.debug("rank %d ended before it had read its start message", self.rank)

    def _watch(self) -> None:
        assert self._process.stdout is not None
        failure: Failed | None = None
        while (data := read_message(self._process.stdout.fileno())) is not None:
            report = messages.decode_from_rank(data)
            failure = report if isinstance(report, Failed) else failure
            self._reports.put(report)
        code = self._process.wait()
        self._reports.put(None)
        if failure is not None:
            self._on_end(f"rank {self.rank} failed: {failure.message}")
        elif code != messages.GROUP_BROKEN:
            self._on_end(f"rank {self.rank} {self._exit()}.")

    def _exit(self) -> str:
        code = self._process.wait()
        return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"


def without_text(files: "ModelFiles") -> "ModelFiles":
    """Return the files without the tokenizer's settings, which ranks do not use, and which may have large integers."""
    return replace(files, tokenizer_config={}, chat_template=None)


class RankProcesses:
    """All ranks except rank 0. Call `stop` in every state."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._ranks: list[RankProcess] = []
        self._folder = make_folder()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._causes: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._is_stopping = False
        self._lost: EngineDead | None = None
        self._on_lost: Callable[[EngineDead], None] = lambda error: None

    def start(self, files: "ModelFiles", plans: "RankPlans") -> "Group":
        """Start the processes; return the group of all ranks. Raises StartupError if one of them cannot start."""
        from octavo_engine.ops.group import (
            GroupBroken,
            open_group,
        )  # it needs torch, which the rest of this module does not

        for rank in range(1, self._size):
            start = messages.RankStart(
                rank=rank,
                config=plans.config,
                files=without_text(files),
                memory=plans.memory,
                num_blocks=plans.ranks[rank].kv.num_blocks,
                num_host_blocks=plans.ranks[rank].kv.num_host_blocks,
                folder=self._folder,
                parent_pid=os.getpid(),
                log_format=current_format(),
            )
            self._ranks.append(RankProcess(rank, start, self._context.socket(zmq.PUSH), self._end))
        for each in self._ranks:
            each.wait_for(Hello)
        try:
            return open_group(messages.meeting_file(self._folder), 0, self._size)
        except GroupBroken as error:
            raise StartupError(str(self.find_cause(error))) from error

    def wait_ready(self) -> int:
        """Wait until the ranks have loaded their parts; return the bytes of their weights. Raises StartupError."""
        ready = [each.wait_for(messages.RankReady) for each in self._ranks]
        remove_folder(self._folder)
        return sum(report.weights_bytes for report in ready)

    def on_lost(self, call: Callable[[EngineDead], None]) -> None:
        """Set a function that is called, on another thread, when a rank has ended that was not stopped."""
        self._on_lost = call
        if self._lost is not None:
            call(self._lost)

    def send(self, plan: bytes) -> None:
        for each in self._ranks:
            each.send(plan)

    def find_cause(self, error: EngineDead) -> EngineDead:
        """Return the error of the rank that has ended, if one is known within a second; else `error`."""
        try:
            return EngineDead(self._causes.get(timeout=_CAUSE_TIMEOUT_S))
        except queue.Empty:
            return error

    def stop(self) -> None:
        """End all processes. A second call does nothing."""
        self._is_stopping = True
        for each in self._ranks:
            each.stop()
        self._ranks = []
        self._context.destroy(linger=0)
        remove_folder(self._folder)

    def _end(self, cause: str) -> None:
        if not self._is_stopping:
            self._causes.put(cause)
            self._lost = EngineDead(cause)
            self._on_lost(self._lost)
