"""The process of one rank other than rank 0, as rank 0 holds it: start, messages, end.

A thread reads the reports of the process and waits for its end, which is thus known at once, in every state.
"""

import logging
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

import zmq

from octavo_engine.process import rank_messages as messages
from octavo_engine.process.messages import Failed
from octavo_engine.process.pipes import framed, read_message

_LOGGER = logging.getLogger(__name__)
_STOP_TIMEOUT_S = 5.0

#: A rank and its report; None: its process has ended.
Report = tuple[int, messages.FromRank | None]


class RankProcess:
    """`reports`: receives all reports. `on_failed`: called on another thread, before the last report, if the rank has
    failed or its process has ended. It is not called if the rank ends because another one is gone.
    """

    def __init__(
        self,
        start: messages.RankStart,
        outbox: "zmq.Socket[bytes]",
        reports: "queue.SimpleQueue[Report]",
        on_failed: Callable[[int, Failed], None],
    ) -> None:
        self.rank, self._outbox, self._reports, self._on_failed = start.rank, outbox, reports, on_failed
        outbox.set_hwm(0)
        outbox.linger = 0
        outbox.bind(messages.inbox_address(start.folder, start.rank))
        command = (sys.executable, "-P", "-m", "octavo_engine.process.rank")
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._write(framed(messages.encode(start)))
        self._thread = threading.Thread(target=self._watch, name=f"rank-{start.rank}", daemon=True)
        self._thread.start()

    def send(self, message: bytes) -> None:
        """Send a message; it is lost if the process is gone, whose end is reported with its cause."""
        with suppress(zmq.Again):
            self._outbox.send(message, zmq.NOBLOCK)

    def kill(self) -> None:
        """Kill the process, also while it is stopped."""
        self._process.kill()

    def request_stop(self) -> None:
        """Close the standard input of the process, which ends it."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def stop(self) -> None:
        """Wait for the end of the process after `request_stop`; kill it if it runs after 5 s."""
        assert self._process.stdout is not None
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._thread.join()
        self._process.stdout.close()
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
            if isinstance(report, Failed):
                self._on_failed(self.rank, report)
            has_cause = isinstance(report, Failed | messages.Left)
            self._reports.put((self.rank, report))
        code = self._process.wait()
        if not has_cause:
            how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
            self._on_failed(self.rank, Failed(f"its process {how}."))
        self._reports.put((self.rank, None))
