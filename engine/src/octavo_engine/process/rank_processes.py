"""The processes of the ranks other than rank 0: starts them, sends them messages, and finds the cause of a fault.

A fault is known at once: a rank reports its error, or its process ends, also while rank 0 loads or waits for requests.
Only a stuck rank is detected later, by a collective operation that fails after its timeout.
"""

import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import zmq

from octavo_engine.log_format import current_format
from octavo_engine.process import rank_messages as messages
from octavo_engine.process.ipc_sockets import make_folder, remove_folder
from octavo_engine.process.messages import Failed, framed, read_message
from octavo_engine.process.remote_hosts import SECRET_VARIABLE, RemoteHosts, RemoteRank
from octavo_engine.settings.config import EngineConfig, ranks_per_host
from octavo_engine.wire.errors import EngineDead, GroupBroken, StartupError

_LOGGER = logging.getLogger(__name__)
_STOP_TIMEOUT_S = 5.0
_RECONNECT_MS = 10

#: A rank and its report; None: its process has ended.
Report = tuple[int, messages.FromRank | None]


if TYPE_CHECKING:
    import torch

    from octavo_engine.devices.memory import HostMemory
    from octavo_engine.ops.rank_group import Group
    from octavo_engine.ops.stages import Stages
    from octavo_engine.runner.rank_plans import RankPlans
    from octavo_engine.sources.model_files import ModelFiles
    from octavo_engine.wire.plan import StepPlan

#: Time within which ranks that are not stuck end, after a collective operation has failed.
_CAUSE_TIMEOUT_S = 1.0
#: Time in which the ranks connect, once all have imported their packages.
_MEETING_TIMEOUT = timedelta(minutes=1)
Message = TypeVar("Message", messages.RankHello, messages.RankReady, messages.Answer)


def without_text(files: "ModelFiles") -> "ModelFiles":
    """Return the files without the tokenizer's settings, which ranks do not use, and which may have large integers."""
    return replace(files, tokenizer_config={}, chat_template=None, named_chat_templates={})


class RankProcesses:
    """All ranks except rank 0. `timeout_s`: timeout of collective operations. `hosts`: the other hosts, if any. `stop`
    must be called in every case.
    """

    def __init__(self, size: int, timeout_s: int, hosts: RemoteHosts | None = None) -> None:
        self._size, self._timeout_s, self._hosts = size, timeout_s, hosts
        self._limit = f"{timeout_s} s (--distributed-timeout-seconds)"
        self._ranks: list[RankProcess | RemoteRank] = []
        self._running: set[int] = set()
        self._reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self._entries: queue.SimpleQueue[messages.Entry | None] = queue.SimpleQueue()  # None: a rank has failed
        self._has_started_all = threading.Event()
        self._failed: tuple[int, Failed] | None = None  # the first rank that has failed; set on another thread
        self._group: Group | None = None
        self._stages: Stages | None = None
        self._folder = make_folder()
        # This thread starts before rank 0 binds its own to CPUs and interleaves memory, which ranks must not inherit.
        self._launcher = ThreadPoolExecutor(1, thread_name_prefix="launch-ranks")
        self._launcher.submit(os.getpid).result()
        self._affinity = os.sched_getaffinity(0)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._is_stopping = False
        self._on_lost: Callable[[EngineDead], None] = lambda error: None

    def launch(self, config: EngineConfig, files: "ModelFiles", own: "HostMemory") -> "list[HostMemory]":
        """Start the processes; return each host's memory. Raises StartupError if a rank cannot start."""
        if self._hosts is not None:
            self._hosts.check_files(files, {each.name: Path(each.path) for each in config.lora_modules})
        for rank in range(1, self._size):
            self._running.add(rank)
            self._ranks.append(self._launch_rank(rank, config))
        hellos = self._wait_for_all(messages.RankHello)
        if self._hosts is None:
            return [own]
        per_host = ranks_per_host(config)
        others = {rank: hellos[rank].memory for rank in range(per_host, self._size, per_host)}
        named = [replace(memory, name=self._hosts.name_host(rank)) for rank, memory in others.items() if memory]
        return [replace(own, name="the first host"), *named]

    def start(
        self, files: "ModelFiles", plans: "RankPlans", gpu: "torch.device | None" = None
    ) -> "tuple[Group, Stages]":
        """Let the ranks load; return rank 0's connections to them. Raises StartupError if a rank cannot start."""
        from octavo_engine.ops.message_store import MessageStore  # it needs torch, which this module does not
        from octavo_engine.ops.rank_group import LOOPBACK
        from octavo_engine.ops.stages import open_ranks

        address = LOOPBACK if self._hosts is None else self._hosts.address
        for each in self._ranks:
            part = messages.LoadPart(
                rank=each.rank,
                config=plans.config,
                files=without_text(files),
                host=plans.hosts[each.rank],
                num_blocks=plans.ranks[each.rank].kv.num_blocks,
                num_host_blocks=plans.ranks[each.rank].kv.num_host_blocks,
                num_layers=plans.num_layers,
                address=address,
            )
            each.load(part)
        self._has_started_all.set()
        timeout = timedelta(seconds=self._timeout_s)
        try:
            store = MessageStore(self._send_entry, self._receive_entry, _MEETING_TIMEOUT)
            per_stage, num_layers = plans.config.tensor_parallel_size, plans.num_layers
            self._group, self._stages = open_ranks(
                store, 0, per_stage, num_layers, timeout, _MEETING_TIMEOUT, address=address, gpu=gpu
            )
        except GroupBroken as error:
            self.check()
            raise StartupError(str(error)) from error
        return self._group, self._stages

    def _launch_rank(self, rank: int, config: EngineConfig) -> "RankProcess | RemoteRank":
        if self._hosts is not None and self._hosts.has_rank(rank):
            return self._hosts.start_rank(rank, self._take)
        start = own_start(rank, config, self._folder)
        return self._launcher.submit(RankProcess, start, self._context.socket(zmq.PUSH), self._take).result()

    def check(self) -> None:
        """Raise StartupError if a rank has failed or ended."""
        if self._failed is not None:
            rank, failed = self._failed
            raise StartupError(f"{self._name(rank)}: {failed.message}", code=failed.code)

    def wait_ready(self) -> int:
        """Wait until the ranks have loaded their parts; return the bytes of their weights. Raises StartupError."""
        ready = self._wait_for_all(messages.RankReady)
        remove_folder(self._folder)
        return sum(report.weights_bytes for report in ready.values())

    def run(self, plans: "list[StepPlan]") -> None:
        for plan in plans:
            self.send(messages.RunPlan(plan))

    def on_lost(self, call: Callable[[EngineDead], None]) -> None:
        """Set a function that is called, on another thread, when a rank has failed or ended that was not stopped."""
        self._on_lost = call
        if self._failed is not None:
            call(self._describe(*self._failed))

    def send(self, message: messages.ToRank) -> None:
        """Send a message to all ranks, which handle messages in order."""
        data = messages.encode(message)
        for each in self._ranks:
            each.send(data)

    def collect_answers(self, *, has_limit: bool = False) -> list[StartupError]:
        """Wait for each rank's answer to a call; return the errors among them. Raises EngineDead if a rank has ended.

        `has_limit`: a rank that does not answer within the timeout of collective operations is an error, too.
        """
        try:
            answers = self._wait_for_all(messages.Answer, self._timeout_s if has_limit else None)
        except StartupError as error:
            raise EngineDead(str(error)) from error
        return [
            StartupError(f"{self._name(rank)}: {each.error}")
            for rank, each in answers.items()
            if each.error is not None
        ]

    def find_cause(self, error: GroupBroken) -> EngineDead:
        """Return the cause of a failed collective operation, within a second: the rank that has failed, or is late.

        Ranks that are not stuck end at once: if they are in an operation, because this rank closes its connections, and
        if they wait for a plan, because they get `Leave`. Late ranks are killed.
        """
        assert self._group is not None
        assert self._stages is not None
        self._group.close()
        self._stages.close()
        self.send(messages.Leave())
        ends_s = time.monotonic() + _CAUSE_TIMEOUT_S
        with suppress(queue.Empty):
            while self._running and self._failed is None:
                self._next_report(timeout_s=max(0.0, ends_s - time.monotonic()))
        if self._failed is not None:
            return self._describe(*self._failed)
        if not self._running:
            text = f"{error} The other ranks had no error: rank 0 may have stood still for over {self._limit}."
            return EngineDead(text)
        self._is_stopping = True
        for each in self._ranks:
            if each.rank in self._running:
                each.kill()
        return EngineDead(self._describe_late(self._running))

    def stop(self, reason: str | None = None) -> None:
        """End all processes. Further calls do nothing. `reason`: the error that ends the engine; a failed rank's error
        replaces it."""
        self._is_stopping = True
        self._has_started_all.set()
        self._abort()
        for each in self._ranks:
            each.request_stop()
        for each in self._ranks:
            each.stop()
        self._ranks = []
        if self._hosts is not None:
            self._hosts.stop(reason if self._failed is None else str(self._describe(*self._failed)))
        self._launcher.shutdown()
        os.sched_setaffinity(0, self._affinity)  # for the next engine of a script
        self._context.destroy(linger=0)
        remove_folder(self._folder)

    def _wait_for_all(self, kind: type[Message], timeout_s: float | None = None) -> dict[int, Message]:
        """Wait for a report of each rank. Raises StartupError as soon as one of them has failed or ended instead.

        `timeout_s`: a longer time without any report is an error.
        """
        reports: dict[int, Message] = {}
        while len(reports) < len(self._ranks):
            try:
                rank, report = self._next_report(timeout_s)
            except queue.Empty:
                raise StartupError(self._describe_late(self._running - reports.keys())) from None
            self.check()
            if not isinstance(report, kind):
                raise StartupError(f"{self._name(rank)}: it has lost another rank.")
            reports[rank] = report
        return reports

    def _next_report(self, timeout_s: float | None = None) -> Report:
        """Wait for the next report. Raises queue.Empty without one in time."""
        rank, report = self._reports.get(timeout=timeout_s)
        if report is None or isinstance(report, messages.Left):
            self._running.discard(rank)
        return rank, report

    def _take(self, rank: int, report: messages.FromRank | None) -> None:
        """Take a report, on a thread of the rank."""
        match report:
            case messages.Entry():
                self._has_started_all.wait()
                data = messages.encode(report)
                for each in self._ranks:
                    if each.rank != rank:
                        each.send(data)
                self._entries.put(report)
            case Failed():
                self._fail(rank, report)
                self._reports.put((rank, report))
            case _:
                self._reports.put((rank, report))

    def _send_entry(self, key: str, value: bytes) -> None:
        self.send(messages.Entry(key, value))

    def _receive_entry(self, timeout_s: float) -> tuple[str, bytes]:
        """Wait for an entry of another rank. Raises TimeoutError, and GroupBroken if a rank fails."""
        try:
            entry = self._entries.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"another rank is late, after {timeout_s:.0f} s") from None
        if entry is None:
            raise GroupBroken("another rank has failed")
        return entry.key, entry.value

    def _fail(self, rank: int, failed: Failed) -> None:
        if not self._is_stopping and self._failed is None:
            self._failed = rank, failed
            self._entries.put(None)
            error = self._describe(rank, failed)
            if self._hosts is not None:
                self._hosts.announce_end(str(error))
            self._on_lost(error)
            self._abort()

    def _describe_late(self, ranks: Set[int]) -> str:
        return f"{', '.join(map(self._name, sorted(ranks)))} did not answer within {self._limit}."

    def _describe(self, rank: int, failed: Failed) -> EngineDead:
        return EngineDead(f"{self._name(rank)} failed: {failed.message}")

    def _name(self, rank: int) -> str:
        return f"rank {rank}" if self._hosts is None else self._hosts.name_rank(rank)

    def _abort(self) -> None:
        if self._group is not None:
            self._group.abort()


def own_start(rank: int, config: EngineConfig, folder: str) -> messages.RankStart:
    """Return the start of a child of this process."""
    return messages.RankStart(
        rank=rank, config=config, folder=folder, parent_pid=os.getpid(), log_format=current_format()
    )


def _environment_of_ranks() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != SECRET_VARIABLE}


class RankProcess:
    """The process of one rank, as rank 0 holds it: start, messages, end.

    A thread reads the reports of the process and waits for its end, so that the end is noticed at once in every state.
    The thread calls `on_report` with each report, with `Failed` if the process ends without `Failed` or `Left`, and
    with None after the end.
    """

    def __init__(
        self,
        start: messages.RankStart,
        outbox: "zmq.Socket[bytes]",
        on_report: Callable[[int, messages.FromRank | None], None],
    ) -> None:
        self.rank, self._outbox, self._on_report = start.rank, outbox, on_report
        self._sending = threading.Lock()
        outbox.set_hwm(0)
        outbox.linger = 0
        outbox.reconnect_ivl = _RECONNECT_MS  # the rank binds the address
        outbox.connect(messages.inbox_address(start.folder, start.rank))
        command = (sys.executable, "-P", "-m", "octavo_engine.process.rank")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_environment_of_ranks()
        )
        self._write(framed(messages.encode(start)))
        self._thread = threading.Thread(target=self._watch, name=f"rank-{start.rank}", daemon=True)
        self._thread.start()

    def load(self, part: messages.LoadPart) -> None:
        self.send(messages.encode(part))

    def send(self, message: bytes) -> None:
        """Send a message. This may be called on any thread and at any time: before the process has an inbox, after its
        end and after `stop`."""
        with self._sending:
            if not self._outbox.closed:
                self._outbox.send(message)

    def kill(self) -> None:
        """Kill the process, also while it is stopped."""
        self._process.kill()

    def request_stop(self) -> None:
        """Close the standard input of the process, which ends it."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it ended before it had read its start message
            self._process.stdin.close()

    def stop(self) -> None:
        """Wait until the process has ended after `request_stop`; kill it if it still runs after 5 s."""
        assert self._process.stdout is not None
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._thread.join()
        self._process.stdout.close()
        with self._sending:  # threads of other ranks may still send entries
            self._outbox.close()

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except BrokenPipeError:
            _LOGGER.debug("rank %d ended before it had read its start message", self.rank)

    def _watch(self) -> None:
        assert self._process.stdout is not None
        has_cause = False
        while (data := read_message(self._process.stdout.fileno())) is not None:
            report = messages.decode_from_rank(data)
            has_cause = isinstance(report, Failed | messages.Left)
            self._on_report(self.rank, report)
        code = self._process.wait()
        if not has_cause:
            how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
            self._on_report(self.rank, Failed(f"its process {how}."))
        self._on_report(self.rank, None)
